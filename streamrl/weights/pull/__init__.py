"""The engine's side before vLLM: fetching versions, the replica of the published bits on each host."""
