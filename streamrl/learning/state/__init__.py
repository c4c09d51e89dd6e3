"""State of a rank between batches: masters, optimizer, published bits; and its checkpoints."""
