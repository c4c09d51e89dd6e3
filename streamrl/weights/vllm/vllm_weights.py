"""The owner's side of a weight push into a vLLM engine, which anybody may use: see ``streamrl.weights``."""

from __future__ import annotations

from streamrl.weights.engine_push import announcement_of, commit, push, stage
from streamrl.weights.vllm_names import WEIGHT_BACKEND, engine_environment

__all__ = ["WEIGHT_BACKEND", "announcement_of", "commit", "engine_environment", "push", "stage"]
