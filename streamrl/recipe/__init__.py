"""The recipe: its sections as structs, fields, TOML text, who the processes of a run are (``topology``), user code by
name. ``rules`` reads and checks a recipe."""
