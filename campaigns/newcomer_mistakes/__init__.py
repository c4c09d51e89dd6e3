"""Mistakes of people who begin: each is refused before an engine starts, in one sentence."""
