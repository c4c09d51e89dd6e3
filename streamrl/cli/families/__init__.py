"""``streamrl families``: what this checkout does with the model families that it knows."""
