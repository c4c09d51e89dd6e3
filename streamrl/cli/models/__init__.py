"""Commands for what comes out of training: evaluate a model, export and push it, list and compare runs. Imports the
trial of rewards, which starts engines, and ``launch.models``."""
