"""Model families, and tiny random checkpoints of them that are laid out as the published ones.

Each ``*.toml`` has the tables of families of one kind, ``shared.toml`` the parts that they have in common. ``streamrl
families`` and tests make the checkpoints, to see what trainer and engines do with a family."""
