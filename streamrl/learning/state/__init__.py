"""What a rank holds between batches: masters, optimizer, published bits; and writing it to a checkpoint."""
