"""The vLLM engine of a run: ``VllmEngine`` (``engines.async_llm``) with pushed deltas, sleep, statistics and watched
processes; its options, computed from a recipe; the plugin that runs in each of its processes. Only these two folders
and ``weights.vllm`` import vLLM."""
