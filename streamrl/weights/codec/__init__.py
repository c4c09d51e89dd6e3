"""Codec of weight deltas: changed bit patterns, grouped by the exponent of the base. Pure numpy and numba."""
