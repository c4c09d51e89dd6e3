"""Applying a version inside of a vLLM worker: load plan, live weights, transaction. Imports vLLM and torch; so does no
other folder of ``weights``, but ``publish.torch_tensors``."""
