"""What is tried for hours: simulated faults, fuzzed decoders, hostile peers and rewards, families of models."""
