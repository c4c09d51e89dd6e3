"""Schedules of the learning rate. Imports ``recipe.sections`` and no other rooms."""
