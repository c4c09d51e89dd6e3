"""Held-out evaluation, and the files in which completions are stored."""
