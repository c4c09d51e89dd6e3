"""What a vLLM with streamrl's weight backend is started with, and what its workers can be asked for."""

from __future__ import annotations

import json

ENGINE_VARIABLE = "STREAMRL_ENGINE"
"""Environment variable that must be "1" in a vLLM that is to have the backend."""

WEIGHT_BACKEND = "streamrl"
"""``WeightTransferConfig(backend=...)``."""

SERVER_OPTIONS = ("--weight-transfer-config", json.dumps({"backend": WEIGHT_BACKEND}))
"""What ``vllm serve MODEL`` needs on its command line."""

TEXT_METHODS = {"streamrl_begin_stage": "streamrl_begin_stage_from_text"}
"""Worker methods that take bytes, and those that take the same in base64: ``vllm serve`` passes on text only."""


def engine_environment() -> dict[str, str]:
    """Environment of the process that owns an engine, to be set before vllm is imported."""
    return {"VLLM_PLUGINS": "streamrl", ENGINE_VARIABLE: "1"}


def server_environment() -> dict[str, str]:
    """What ``vllm serve`` needs in its environment."""
    return {**engine_environment(), "VLLM_SERVER_DEV_MODE": "1"}
