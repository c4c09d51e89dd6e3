"""What is tried for hours: simulated faults, fuzzed decoders, hostile peers, families of models, people's files."""
