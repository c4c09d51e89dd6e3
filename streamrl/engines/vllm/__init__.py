"""The vLLM engine of a run: the plain one (``engines.plain_vllm``) with pushed deltas, sleep, statistics and watched
processes; its options, computed from a recipe; the plugin that runs in each of its processes. Only these two folders
and ``weights.vllm`` import vLLM."""
