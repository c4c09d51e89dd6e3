"""How changed bits are coded: integers only, by exponent of the base. No socket, no torch."""
