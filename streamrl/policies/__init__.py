"""Round policies and group sizing beyond the kernel's: RollPacker, SortedRL, SAGC, ``auto``, deterministic order.
Pure: imports ``base``, ``recipe``, ``control`` and ``buffers``; ``round_policies`` names them all."""
