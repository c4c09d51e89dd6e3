"""Receiving versions, in vLLM's worker processes: fetching, decoding, and the replica of the published bits."""
