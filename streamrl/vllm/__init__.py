"""vLLM's ``AsyncLLM`` as an ``Engine``: its options from a recipe, its plugin in each process, its statistics. The only
folder beside ``weights/vllm`` that imports vLLM."""
