"""``streamrl try`` and ``streamrl reward test``: completions for rewards that are tried before a run, and reports."""
