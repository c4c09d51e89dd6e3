"""Texts of the command line that are in one place for all commands: examples, completion of shells. Imports
``cli.command`` for the command that prints the latter."""
