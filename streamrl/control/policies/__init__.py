"""Round policies and group sizing beyond the plain ones: RollPacker, SortedRL, SAGC, ``auto``, deterministic order.
``round_policies`` names them all."""
