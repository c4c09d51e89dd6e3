"""The reward ``judge``, for which a language model scores completions: one that the run serves (``rewards.served``), or
one at an address."""
