"""Weight pushes as deltas: codec, state hash, manifest, publisher, fetch client, checkpoint replica, vLLM's receiver.

A trainer rank's process publishes a version. The process that owns an engine starts the push, and vLLM's worker
processes fetch and apply the version. Weights are handled as integers only: a bfloat16 or float16 element is a uint16
bit pattern, a float32 element a uint32 one. No element is compared or copied as a floating-point number, so ``-0.0``
and every NaN payload survive.

The names below are public, and enough to feed any vLLM from any training loop (``docs/take_out.md``). None of
them imports torch or vllm:

=============  =====================================================================================================
trainer        ``WeightPublisher``, ``ShardSpec``, ``Published``, ``announcement_of``, ``WeightAnnouncement``
vLLM           ``push`` (``stage``, ``commit``) into an ``AsyncLLM`` or a ``VllmServer``; to start either:
               ``WEIGHT_BACKEND``, ``engine_variables``, ``SERVER_OPTIONS``, ``server_variables``. vLLM finds the
               plugin by the entry point ``vllm.general_plugins`` where streamrl is installed beside it
receivers      ``fetch_version``, ``FetchedVersion``, ``KeptParts``, ``CheckpointReplica``, ``StagedVersion`` and
               ``CheckpointBase`` hold a publisher's weights in a process without vLLM
codec          ``encode_patch``, ``encode_complete``, ``decode_patch``, ``EncodedPatch``, ``WeightPatch``
errors         ``WeightError``: a version was refused, and the weights have not changed
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
    "engine_variables",
    "fetch_version",
    "push",
    "server_variables",
    "stage",
]

ENGINE_VARIABLE = "STREAMRL_ENGINE"
"""Environment variable that must be "1" in the processes of a vLLM that is to have the backend."""

WEIGHT_BACKEND = "streamrl"
"""The value of ``backend`` in vLLM's ``WeightTransferConfig``."""

SERVER_OPTIONS = ("--weight-transfer-config", json.dumps({"backend": WEIGHT_BACKEND}))
"""Options that ``vllm serve MODEL`` needs on its command line."""

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
"""Public names by the module that defines them."""


def engine_variables() -> dict[str, str]:
    """Environment variables for the process that owns an engine, to be set before vllm is imported."""
    return {"VLLM_PLUGINS": "streamrl", ENGINE_VARIABLE: "1"}


def server_variables() -> dict[str, str]:
    """Environment variables for ``vllm serve``."""
    return {**engine_variables(), "VLLM_SERVER_DEV_MODE": "1"}


def __getattr__(name: str) -> Any:
    # Imported when first used: vLLM's processes need only the constants above, and the simulator runs without ZeroMQ.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'streamrl.weights' has no attribute {name!r}")
