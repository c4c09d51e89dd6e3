"""Schedules of the learning rate. Imports ``recipe.sections`` and nothing of other rooms."""
