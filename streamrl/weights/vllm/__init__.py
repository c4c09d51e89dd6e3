"""Applying a version inside of a vLLM worker: load plan, live weights, transaction. Imports vLLM and torch."""
