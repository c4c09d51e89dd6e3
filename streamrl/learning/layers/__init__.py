"""Layers that need something of their own beside packed attention: one file each. Plain layers need none."""
