"""State of a trainer rank between batches: masters, optimizer, published bits, and checkpoints of them."""
