"""Recipes that are written in Python, as tables: functions of a notebook's cells or of a TRL script, and rows of
prompts, are written to files, which the processes of a run read. Imports base and the files of recipe."""
