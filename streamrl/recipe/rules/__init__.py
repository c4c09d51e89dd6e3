"""Reading a recipe (``load``) and refusing one: rules between fields, keys of other systems, what ``rollout.system``
sets; and the text that explains each key."""
