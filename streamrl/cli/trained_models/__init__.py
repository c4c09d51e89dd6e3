"""Commands for trained models and their runs: evaluate a model, export and push it, list and compare runs, with the
helpers of these commands."""
