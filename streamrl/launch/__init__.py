"""Composition and steering of one run: the Python interface (``pipeline``), the controller's process
(``run_controller``), the work of each other process (``roles``), the directory of a run and its resumption. Files of
this room may import any wing, like files of ``simulate``, ``prepare``, ``processes`` and ``cli``."""
