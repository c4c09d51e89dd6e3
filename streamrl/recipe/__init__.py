"""The recipe: its sections as structs, reading and checking a file, user code by name.

Imports ``base`` only; rules between fields come from the package ``rules`` where that is there (``load.RULES``).
"""
