"""Codec of changed bits: integers only, by exponent of the base. No socket, no torch."""
