"""The recipe: its sections as structs, their fields, TOML text, the processes of a run (``topology``), and user code by
name. ``rules`` reads and checks a recipe. Every command and every process of a run imports this room."""
