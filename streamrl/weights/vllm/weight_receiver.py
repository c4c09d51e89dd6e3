"""vLLM's ``streamrl`` weight transfer backend, in every worker process of an engine.

vLLM makes a ``StreamrlWeightTransfer`` when it starts with ``WEIGHT_BACKEND``; ``engine_push.py`` calls the functions
``streamrl_*`` below by name, from the engine's process. A version is *staged* in a thread while the engine samples
(fetch, check, decode, locate), and *committed* between two steps of a paused engine. The functions do not raise for a
version that does not fit, but return the reason, so that all of it reaches the owner of the engine. Methods that vLLM
calls do raise, so that its update session ends."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import torch
from msgspec import msgpack
from msgspec.structs import asdict, replace
from torch.nn import Module
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from streamrl.base.errors import UNDECODABLE, WeightError
from streamrl.base.types import JsonObject
from streamrl.learning.gathered_bytes import gather_bytes
from streamrl.weights.distance import Location, this_host
from streamrl.weights.pull.loaded_checkpoint import constant_tensors
from streamrl.weights.pull.replica import CheckpointReplica, TensorSpecs
from streamrl.weights.pull.shared_replica import shared_replica
from streamrl.weights.requests import decode_announcement
from streamrl.weights.vllm.adapter import open_adapter, record_adapter_plan
from streamrl.weights.vllm.latent_attention import derive_again
from streamrl.weights.vllm.linear_layers import repack_linear_layers
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes
from streamrl.weights.vllm.live_weights_layers import LiveLayers
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, record_load_plan
from streamrl.weights.vllm.rebuilt_layers import rebuilt_layers
from streamrl.weights.vllm.weight_transaction import LiveModel, WeightTransaction

_PLAIN_FORMATS = ("auto", "hf", "safetensors")
RUN_VARIABLE = "STREAMRL_RUN_MARKER"
"""Environment variable that has the same value in all processes of a run on this machine."""


WorkerMessage = dict[str, list[Rectangle]] | str
"""Message between the workers of one engine: the checkpoint rectangles of a worker's routes by tensor, or an error."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is untyped
    """Empty message: the first announcement needs no preparation."""


@dataclass
class CommitStaged(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Message that makes a worker apply the staged version, which must be ``policy_version``."""

    policy_version: int


class StreamrlWeightTransfer(WeightTransferEngine[NoInit, CommitStaged]):  # type: ignore[misc]
    """The transaction of one worker, on the model that vLLM loaded."""

    init_info_cls = NoInit
    update_info_cls = CommitStaged
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.transaction = WeightTransaction(
            self._repack,
            checkpoint=loaded_checkpoint(vllm_config),
            replica=replica_of(vllm_config),
            location=location_of(device),
            # Rebuilt layers are made from bits in CPU memory.
            open_device=None if rebuilt_layers(model) else partial(open_device, device),
        )
        _add_worker_methods()

    def record_live(self, tensors: TensorSpecs) -> LiveWeights:
        """Record the load plan of ``tensors`` in the loaded model. A collective call of all workers. Raises
        ``WeightError``."""
        plan: LoadPlan | None = None
        message: WorkerMessage
        try:
            if self.vllm_config.lora_config is None:
                constants = constant_tensors(loaded_checkpoint(self.vllm_config), tensors)
                plan = record_load_plan(self.model, tensors, constants)
            else:
                plan = record_adapter_plan(self.model, tensors)
            message = {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}
        except WeightError as error:  # raised below, after the other workers, which wait, have got it
            message = str(error)
        plans: list[dict[str, list[Rectangle]]] = []
        for worker_message in _gather_from_workers(message):
            if isinstance(worker_message, str):
                raise WeightError(worker_message)
            plans.append(worker_message)
        assert plan is not None
        counted = count_routes(plans, _worker_index(), tensors)
        agree = _agree if len(plans) > 1 else None
        layers = LiveLayers(plan, counted, loading_context=self._loading_context, agree=agree)
        return LiveWeights(plan, counted, layers=layers)

    @contextmanager
    def _loading_context(self) -> Iterator[None]:
        """Set the context that ``BaseModelLoader.load_model`` has around ``process_weights_after_loading``."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        dtype = self.vllm_config.model_config.dtype
        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(dtype), self.device:
            yield

    # ---- commit: between two steps of a paused engine ----------------------------------------------

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: each announcement has its sources."""

    def start_weight_update(self) -> None:
        """Do nothing: the version is staged already."""

    def receive_weights(self, update_info: CommitStaged) -> None:
        """Apply the staged version to the live parameters and verify it. Raises ``WeightError``; the version before is
        live again then, unless it could not be restored."""
        self.transaction.apply(update_info.policy_version)

    def finish_weight_update(self) -> None:
        """Make the applied version the one that this worker holds, and advance the replica."""
        self.transaction.finish()

    def shutdown(self) -> None:
        """Stop the thread, and release the memory that is shared with other workers."""
        self.transaction.close()
        self.transaction.replica.close()

    def _repack(self, live: LiveModel, writes: Sequence[Any]) -> None:
        assert isinstance(live, LiveWeights)
        changed = live.storages_of(writes)
        repack_linear_layers(self.model, changed)
        derive_again(self.model, changed, self.vllm_config.model_config.dtype)


def location_of(device: torch.device) -> Location:
    """Return the location of a worker that computes on ``device``."""
    if device.type != "cuda":
        return Location(this_host())
    return Location(this_host(), str(torch.cuda.get_device_properties(device).uuid))


def open_device(device: torch.device, handle: bytes) -> torch.Tensor:
    """Map the tensor (int16, flat) that ``torch_tensors.DeviceTensors`` has exported on this GPU. Raises
    ``WeightError``."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *msgpack.decode(handle))
    except (RuntimeError, TypeError, *UNDECODABLE) as error:
        raise WeightError(f"CUDA does not map the trainer's memory: {error}") from error
    return torch.empty(0, dtype=torch.int16, device=device).set_(storage)


def loaded_checkpoint(vllm_config: Any) -> Path | None:
    """Return the directory with the weights that vLLM has loaded; None where they are not the values of its files."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    directory = Path(str(model.model))
    # A layer that vLLM quantises while it loads comes from the values of the files; quantised files have other tensors.
    quantised = getattr(model.hf_config, "quantization_config", None) is not None
    plain = str(load.load_format) in _PLAIN_FORMATS and not quantised
    return directory if plain and directory.is_dir() else None


def replica_of(vllm_config: Any) -> CheckpointReplica:
    """Return the replica that the workers of this engine share, also with the engines of the same run that load the
    same model. Where no other worker shares it, or memory cannot be shared, returns a replica for this worker alone."""
    run = environ.get(RUN_VARIABLE, "")
    workers = vllm_config.parallel_config.world_size
    if not run and workers == 1:
        return CheckpointReplica()
    parent = Path(environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())
    return shared_replica(run or vllm_config.instance_id, str(vllm_config.model_config.model), parent)


def _worker_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gather_from_workers(message: WorkerMessage) -> list[WorkerMessage]:
    """Gather the messages of all workers of this engine, by rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [message]
    from vllm.distributed.parallel_state import get_world_group

    gathered = gather_bytes(msgpack.encode(message), torch.device("cpu"), get_world_group().cpu_group)
    messages: list[WorkerMessage] = [msgpack.decode(encoded, type=WorkerMessage) for encoded in gathered]
    return messages


def _agree(failure: str) -> None:
    """Exchange failures with the other workers; ``failure`` is empty without one. Raises ``WeightError`` where a worker
    failed."""
    for worker, reason in enumerate(_gather_from_workers(failure)):
        if reason:
            raise WeightError(failure or f"worker {worker}: {reason}")


# ---- methods of the worker, called by name through AsyncLLM.collective_rpc ------------------------------


def streamrl_begin_stage(worker: Any, announcement: str) -> None:
    """Start to fetch a version in a thread, in place of a version that is being fetched. ``announcement``: msgpack in
    base64, since arguments may be sent over HTTP."""
    decoded = decode_announcement(base64.b64decode(announcement, validate=True))
    worker.weight_transfer_engine.transaction.begin_stage(decoded)


def streamrl_stage_report(worker: Any) -> JsonObject:
    """Return the ``StageReport`` of this worker, as plain values."""
    return asdict(worker.weight_transfer_engine.transaction.stage_report())


def streamrl_finish_stage(worker: Any) -> JsonObject:
    """Take over the fetched version from the thread, with the first version record the load plan, and return the
    ``StageReport``, as plain values."""
    engine = worker.weight_transfer_engine
    return asdict(engine.transaction.finish_stage(engine.record_live))


def streamrl_apply(worker: Any, policy_version: str) -> JsonObject:
    """Start vLLM's update session and apply the staged version, in one call because requests wait for it.

    Returns the ``LiveReport`` of this worker, as plain values; its ``error`` is the reason why nothing was applied.
    ``policy_version``: a number as text, since arguments may be sent over HTTP."""
    failure = ""
    try:
        worker.start_weight_update()
        worker.update_weights({"policy_version": int(policy_version)})
    except Exception as error:  # noqa: BLE001 - reported to the owner, who rolls all workers back
        failure = f"{type(error).__name__}: {error}"
    report = worker.weight_transfer_engine.transaction.live_report()
    return asdict(report if report.error else replace(report, error=failure))


def streamrl_roll_back(worker: Any) -> None:
    """Undo a commit that failed on a worker of the engine, and end vLLM's update session."""
    worker.weight_transfer_engine.transaction.roll_back()
    worker._weight_update_active = False


def streamrl_forget_live(worker: Any) -> None:
    """Forget the live weights before vLLM drops the parameters of an engine that is put to sleep."""
    if worker.weight_transfer_engine is not None:
        reason = "its weights were dropped when it was put to sleep"
        worker.weight_transfer_engine.transaction.forget_live(reason)


def streamrl_open_adapter(worker: Any) -> None:
    """Put the adapter that requests carry into the slot of this worker."""
    open_adapter(worker)


def _add_worker_methods() -> None:
    """Add the functions above to vLLM's workers. vLLM's own update calls return nothing; these return versions, hashes
    and errors to the owner of the engine."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in (
        streamrl_begin_stage,
        streamrl_stage_report,
        streamrl_finish_stage,
        streamrl_apply,
        streamrl_roll_back,
        streamrl_forget_live,
        streamrl_open_adapter,
    ):
        setattr(WorkerBase, method.__name__, method)
