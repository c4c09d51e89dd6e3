"""Checks of what engines do with a model family, on a tiny checkpoint of it: ``streamrl families`` and campaigns."""
