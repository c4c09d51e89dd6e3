"""What is tried for hours: simulated faults, fuzzed decoders, hostile peers, killed processes, people's files."""
