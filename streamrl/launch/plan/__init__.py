"""Fitting a run to a machine: memory, GPUs, checks before a start, the words of the dry run."""
