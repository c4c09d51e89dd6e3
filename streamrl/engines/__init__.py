"""Inference engines: vLLM's, simulated ones, engines in processes of their own, and the pool that routes requests."""
