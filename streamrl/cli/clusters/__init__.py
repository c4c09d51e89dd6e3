"""Commands for runs on more than one machine."""
