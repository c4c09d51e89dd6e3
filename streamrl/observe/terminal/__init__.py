"""Terminal output: step lines, curves, ``streamrl watch``."""
