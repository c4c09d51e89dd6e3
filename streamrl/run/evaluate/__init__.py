"""Completions that nothing is trained on: held-out prompts, and samples kept in files."""
