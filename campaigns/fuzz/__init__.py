"""Mutated bytes for every decoder of bytes from another process."""
