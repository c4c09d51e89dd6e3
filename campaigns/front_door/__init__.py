"""Files as people have them, each beside what transformers, vLLM and TRL make of it."""
