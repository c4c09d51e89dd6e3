"""Batches of a trainer rank: preparation of groups, packing into rows of tokens, gradients, passes without gradient."""
