"""The programs of an ``agent`` environment: what they print."""
