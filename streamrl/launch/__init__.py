"""Composition and steering of one run: the Python interface (``pipeline``), the controller's process
(``run_controller``), the work of each other process (``roles``), the directory of a run and its resumption. Its files may
import any wing, as those of ``simulate``, ``prepare``, ``processes`` and ``cli`` may."""
