"""Rewards: signatures of reward functions, scoring and combining of their values, time limits, messages of the reward
worker. ``calls`` is the reward worker, ``builtin`` the built-in rewards; ``judge`` and ``sandbox`` serve one built-in
reward each."""
