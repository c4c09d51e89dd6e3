"""The controller: carries out what control decides. Trainer ranks, checkpoints.
Imports the kernel; what else it needs comes in by constructor from ``app``."""
