"""Reads a recipe (``load_recipe``) and refuses a wrong one: rules between fields, keys of other systems,
``rollout.system``; and explains each key."""
