"""Recipes that are written in Python: functions of a notebook's cells, and rows, as files that other processes read. It
imports base and the files of recipe."""
