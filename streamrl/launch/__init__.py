"""What puts a run together: the way in from Python, the controller's process, what each other process does, the
directory of a run and what it resumes from. Its files may import any wing, as those of ``simulate`` and ``cli`` may.
"""
