"""vLLM as an ``Engine`` that samples and reads each version of the weights from a file. ``engines.vllm`` extends it to
the engine of a run. vLLM is imported by ``start`` and in vLLM's own processes only."""
