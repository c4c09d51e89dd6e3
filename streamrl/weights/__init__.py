"""The weight path without torch: codec, state hash, manifest, publisher, fetch client, checkpoint replica.

Weights are handled as integers only: a bfloat16 or float16 element is a uint16 bit pattern, a float32
element a uint32 one. Nothing is ever compared or copied as a floating-point number, so ``-0.0`` and
every NaN payload survive.

What is listed here is public, and enough to feed any vLLM from any training loop (``docs/weights_outside.md``):

=============  =====================================================================================================
trainer        ``WeightPublisher``, ``ShardSpec``, ``Published``, ``announcement_of``, ``WeightAnnouncement``
vLLM           ``push`` (``stage``, ``commit``) into an ``AsyncLLM`` or a ``VllmServer``; how both are started:
               ``WEIGHT_BACKEND``, ``engine_environment``, ``SERVER_OPTIONS``, ``server_environment``. The plugin itself
               registers when streamrl is installed beside vLLM: entry point ``vllm.general_plugins``
receivers      ``fetch_version``, ``FetchedVersion``, ``KeptParts``, ``CheckpointReplica``, ``StagedVersion``,
               ``CheckpointBase``: to hold the weights of a publisher in a process that is no vLLM
codec          ``encode_patch``, ``encode_complete``, ``decode_patch``, ``EncodedPatch``, ``WeightPatch``
errors         ``WeightError``: a version is refused, nothing has changed
=============  ====================================================================================================="""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.base.errors import WeightError
    from streamrl.base.messages import WeightAnnouncement, announcement_of
    from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, decode_patch, encode_complete, encode_patch
    from streamrl.weights.engine_push import commit, push, stage
    from streamrl.weights.manifest import ShardSpec
    from streamrl.weights.publish.publisher import Published, WeightPublisher
    from streamrl.weights.pull.fetch import KeptParts, fetch_version
    from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
    from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, StagedVersion
    from streamrl.weights.vllm_server import VllmServer

__all__ = [
    "SERVER_OPTIONS",
    "WEIGHT_BACKEND",
    "CheckpointBase",
    "CheckpointReplica",
    "EncodedPatch",
    "FetchedVersion",
    "KeptParts",
    "Published",
    "ShardSpec",
    "StagedVersion",
    "VllmServer",
    "WeightAnnouncement",
    "WeightError",
    "WeightPatch",
    "WeightPublisher",
    "announcement_of",
    "commit",
    "decode_patch",
    "encode_complete",
    "encode_patch",
    "engine_environment",
    "fetch_version",
    "push",
    "server_environment",
    "stage",
]

ENGINE_VARIABLE = "STREAMRL_ENGINE"
"""Environment variable that must be "1" in a vLLM that is to have the backend."""

WEIGHT_BACKEND = "streamrl"
"""``WeightTransferConfig(backend=...)``."""

SERVER_OPTIONS = ("--weight-transfer-config", json.dumps({"backend": WEIGHT_BACKEND}))
"""What ``vllm serve MODEL`` needs on its command line."""

_HOMES = {
    "streamrl.weights.pull.loaded_checkpoint": ("CheckpointBase",),
    "streamrl.weights.codec.codec": ("EncodedPatch", "WeightPatch", "decode_patch", "encode_complete", "encode_patch"),
    "streamrl.weights.engine_push": ("commit", "push", "stage"),
    "streamrl.weights.pull.fetch": ("KeptParts", "fetch_version"),
    "streamrl.weights.manifest": ("ShardSpec",),
    "streamrl.weights.pull.replica": ("CheckpointReplica", "FetchedVersion", "StagedVersion"),
    "streamrl.weights.publish.publisher": ("Published", "WeightPublisher"),
    "streamrl.weights.vllm_server": ("VllmServer",),
    "streamrl.base.errors": ("WeightError",),
    "streamrl.base.messages": ("WeightAnnouncement", "announcement_of"),
}


def engine_environment() -> dict[str, str]:
    """Environment of the process that owns an engine, to be set before vllm is imported."""
    return {"VLLM_PLUGINS": "streamrl", ENGINE_VARIABLE: "1"}


def server_environment() -> dict[str, str]:
    """Environment variables for ``vllm serve``."""
    return {**engine_environment(), "VLLM_SERVER_DEV_MODE": "1"}


def __getattr__(name: str) -> Any:
    # Lazy: vLLM's processes import the names above, and the simulator runs without ZeroMQ.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'streamrl.weights' has no attribute {name!r}")
