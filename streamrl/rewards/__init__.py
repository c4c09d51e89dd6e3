"""Rewards as the rest of the run sees them: the signature of a function, scoring and combining, time limits, messages
of the reward worker. ``calls`` is the worker that calls the functions."""
