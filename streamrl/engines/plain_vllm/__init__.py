"""vLLM as an ``Engine``: sampling, and whole versions read from files. ``engines.vllm`` adds what a run needs. vLLM is
imported by ``start`` and in vLLM's own processes only."""
