"""vLLM's ``AsyncLLM`` as an ``Engine`` that samples, scores, finds stop texts across pauses, and by default reads each
version of the weights from a file. ``engines.vllm`` extends it for a run. vLLM is imported by ``start`` and in vLLM's
own processes only."""
