"""The controller, which carries out what control decides; trainer ranks, checkpoints, what a step says of itself. All
else that the controller needs comes in by constructor (``parts``) from ``launch``."""
