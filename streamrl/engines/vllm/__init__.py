"""vLLM as an ``Engine``: sampling, and whole versions read from files. ``streamrl.vllm`` adds pushed deltas, sleep,
statistics and processes that are watched. vLLM is imported by ``start`` and in vLLM's own processes only."""
