"""The exit code by which a reward worker asks the supervisor for another one."""

REWARD_RESTART_EXIT_CODE = 75
"""User code holds the process (or too many of its threads) and cannot be stopped: start another worker.

EX_TEMPFAIL of sysexits.h.
"""
