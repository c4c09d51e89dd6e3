"""What a person sees: step lines, curves, ``streamrl watch``."""
