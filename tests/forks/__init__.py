"""Processes of tests as forks of one that has imported what they need.

A trainer imports torch and transformers (7 s of processor time), an engine vLLM (15 s), and a test that starts and
resumes a run pays this ten times. With ``starts.install`` a ``subprocess.Popen`` of pytest's process that starts
Python with a module of streamrl, or with a script of the tests, asks a fork server (``server``) that has paid once.
The process has the arguments, variables, directory, descriptors, session and parent that it would have had, also in
``/proc``.

Forks do not show imports that fail or are missing, variables that a library reads while it is imported, modules with
effects, and the order of sets, whose hashes they share. Tests with ``pytest.mark.started`` start each process for real,
one for each kind of process at least; ``STREAMRL_TESTS_SPAWN=1`` has all tests do so."""
