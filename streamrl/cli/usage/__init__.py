"""Texts of the command line that are in one place for all commands. Imports nothing."""
