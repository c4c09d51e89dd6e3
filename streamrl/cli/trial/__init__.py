"""``streamrl reward test``: completions for a reward that is tried alone, and its report."""
