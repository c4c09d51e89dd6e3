"""Commands for what comes out of training: evaluate a model, export and push it, list and compare runs, and what only
these commands use."""
