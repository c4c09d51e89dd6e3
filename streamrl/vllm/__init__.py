"""The vLLM engine of a run: what is added to the plain one (``engines.vllm``), its options from a recipe, its plugin in
each process, its statistics. Only these two folders and ``weights/vllm`` import vLLM."""
