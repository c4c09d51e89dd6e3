"""What puts a run together: the way in from Python, the controller's process, what each other process does,
the directory of a run and what it resumes from.

With ``cli`` the only folder that knows everybody; nothing else imports it.
"""
