"""Round policies and group sizers beyond the plain ones: RollPacker, SortedRL, SAGC, ``auto``,
deterministic order. ``round_policies`` makes all of them by name."""
