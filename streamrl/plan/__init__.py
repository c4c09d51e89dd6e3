"""Fitting a run to a machine: processes and endpoints, memory, GPUs, checks before a start, the dry run's words.

Imports the kernel, ``rules`` and the packages whose parts it checks.
"""
