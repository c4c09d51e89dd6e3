"""How a reward worker tells the supervisor what its end means."""

REWARD_RESTART_EXIT_CODE = 75
"""User code holds the process (or too many of its threads) and cannot be stopped: start another worker.

EX_TEMPFAIL of sysexits.h.
"""
