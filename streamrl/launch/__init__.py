"""Assembly of a run: the Python interface, the controller's process, the work of each other process, the directory of a
run and its resumption. Its files may import any wing, as those of ``simulate`` and ``cli`` may."""
