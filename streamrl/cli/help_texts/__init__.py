"""Texts of the command line for all commands: examples, and the completion of shells with the command that prints
it."""
