"""Readers of the files of a run, while it goes on or after it ended or was killed: ``run_reader`` finds the files,
``followed_lines`` reads appended lines across rotation. Of other wings only ``run/journal`` is imported."""
