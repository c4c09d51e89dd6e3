"""``streamrl objective``: a loss of the user's own, tried before a run."""
