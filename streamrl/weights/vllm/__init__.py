"""Applying versions in vLLM's worker processes: load plan, live weights, transaction. Elsewhere in ``weights`` only
``publish.torch_tensors`` imports torch, and no file imports vLLM."""
