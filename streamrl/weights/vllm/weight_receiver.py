"""The ``streamrl`` weight transfer backend: runs in every worker process of an engine.

A version is *staged* in a thread while the engine samples (fetch, check, decode, locate), and *committed* between two
steps of a paused engine. Worker methods never raise for a version that does not fit: they report, so that the reason
reaches the owner in one piece. Methods that vLLM calls do raise: its update session must end."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from streamrl.base.errors import WeightError
from streamrl.weights.pull.replica import CheckpointReplica, TensorSpec
from streamrl.weights.pull.shared_replica import shared_replica
from streamrl.weights.requests import decode_announcement
from streamrl.weights.vllm.adapter import open_adapter, record_adapter_plan
from streamrl.weights.vllm.linear_layers import repack_linear_layers
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes
from streamrl.weights.vllm.live_weights_layers import LiveLayers
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, record_load_plan
from streamrl.weights.vllm.weight_transaction import LiveModel, WeightTransaction

_PLAIN_FORMATS = ("auto", "hf", "safetensors")
RUN_VARIABLE = "STREAMRL_RUN_MARKER"
"""The environment variable that all processes of a run on this machine have in common."""


Gathered = dict[str, list[Rectangle]] | str
"""What workers of one engine tell each other: where their routes begin in the checkpoint, or what went wrong."""


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is untyped
    """Empty message: the first announcement needs no preparation."""


@dataclass
class CommitStaged(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Apply the staged version, which must be this one."""

    policy_version: int


class StreamrlWeightTransfer(WeightTransferEngine[NoInit, CommitStaged]):  # type: ignore[misc]
    """The transaction of one worker, on the model that vLLM loaded."""

    init_info_cls = NoInit
    update_info_cls = CommitStaged
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.transaction = WeightTransaction(
            self._repack, checkpoint=loaded_checkpoint(vllm_config), replica=replica_of(vllm_config)
        )
        _add_worker_methods()

    def record_live(self, tensors: Mapping[str, TensorSpec]) -> LiveWeights:
        """Locate ``tensors`` in the loaded model; a collective of all workers. Raises ``WeightError``."""
        plan: LoadPlan | None = None
        own: Gathered
        try:
            served = self.vllm_config.lora_config is not None
            plan = (record_adapter_plan if served else record_load_plan)(self.model, tensors)
            own = {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}
        except WeightError as error:  # told to the other workers first: they wait for this one
            own = str(error)
        plans: list[dict[str, list[Rectangle]]] = []
        for other in _gather_from_workers(own):
            if isinstance(other, str):
                raise WeightError(other)
            plans.append(other)
        assert plan is not None
        counted = count_routes(plans, _worker_index(), tensors)
        agreed = _agree if len(plans) > 1 else None
        layers = LiveLayers(plan, counted, as_when_loading=self._as_when_loading, agreed=agreed)
        return LiveWeights(plan, counted, layers=layers)

    @contextmanager
    def _as_when_loading(self) -> Iterator[None]:
        """Set the context that ``BaseModelLoader.load_model`` has around ``process_weights_after_loading``."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        dtype = self.vllm_config.model_config.dtype
        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(dtype), self.device:
            yield

    # ---- commit: between two steps of a paused engine ----------------------------------------------

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Do nothing: sources come with each announcement."""

    def start_weight_update(self) -> None:
        """Do nothing: the version is staged already."""

    def receive_weights(self, update_info: CommitStaged) -> None:
        """Apply the staged version to the live parameters and verify it there; undone when it does not hold."""
        self.transaction.apply(update_info.policy_version)

    def finish_weight_update(self) -> None:
        """The applied version becomes what this worker holds: the replica advances."""
        self.transaction.finish()

    def shutdown(self) -> None:
        """Stop the thread, and give back what is shared with other workers."""
        self.transaction.close()
        self.transaction.replica.close()

    def _repack(self, live: LiveModel, writes: Sequence[Any]) -> None:
        assert isinstance(live, LiveWeights)
        repack_linear_layers(self.model, live.storages_of(writes))


def loaded_checkpoint(vllm_config: Any) -> Path | None:
    """The directory that vLLM loaded the weights from as they are; None where it did something else."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    directory = Path(str(model.model))
    # Quantised while it is loaded, a layer still comes of the files' values; quantised files hold other tensors.
    quantised = getattr(model.hf_config, "quantization_config", None) is not None
    plain = str(load.load_format) in _PLAIN_FORMATS and not quantised
    return directory if plain and directory.is_dir() else None


def replica_of(vllm_config: Any) -> CheckpointReplica:
    """One that is shared: by the workers of this engine, and by the engines of a run that load the same model. Where
    no other worker shares it, or memory cannot be shared, one of this worker's own."""
    run = os.environ.get(RUN_VARIABLE, "")
    workers = vllm_config.parallel_config.world_size
    if not run and workers == 1:
        return CheckpointReplica()
    parent = Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())
    return shared_replica(run or vllm_config.instance_id, str(vllm_config.model_config.model), parent)


def _worker_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gather_from_workers(own: Gathered) -> list[Gathered]:
    """Gather the bytes of every worker of this engine, by rank. Tensors travel, never objects: torch would pickle
    those."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [own]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    mine = msgspec.msgpack.encode(own)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    torch.distributed.all_gather(
        gathered, torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8), group=group
    )
    found = zip(gathered, lengths, strict=True)
    return [msgspec.msgpack.decode(part.numpy()[: int(length)].tobytes(), type=Gathered) for part, length in found]


def _agree(failed: str) -> None:
    """Tell the other workers what failed here, if anything did. Raises ``WeightError`` where one of them failed."""
    for worker, reason in enumerate(_gather_from_workers(failed)):
        if reason:
            raise WeightError(failed or f"worker {worker}: {reason}")


# ---- methods of the worker, called by name through AsyncLLM.collective_rpc ------------------------------


def streamrl_begin_stage(worker: Any, announcement: str) -> None:
    """Start fetching in a thread. A version that is being fetched is given up for the new one. ``announcement``: in
    base64, since arguments may travel over HTTP."""
    decoded = decode_announcement(base64.b64decode(announcement, validate=True))
    worker.weight_transfer_engine.transaction.begin_stage(decoded)


def streamrl_stage_report(worker: Any) -> dict[str, Any]:
    """``StageReport`` of this worker, as plain values."""
    return msgspec.structs.asdict(worker.weight_transfer_engine.transaction.stage_report())


def streamrl_finish_stage(worker: Any) -> dict[str, Any]:
    """``StageReport`` after taking over what was fetched, as plain values; with the first version, where it goes in the
    model is recorded."""
    engine = worker.weight_transfer_engine
    return msgspec.structs.asdict(engine.transaction.finish_stage(engine.record_live))


def streamrl_apply(worker: Any, policy_version: str) -> dict[str, Any]:
    """Open vLLM's update session and apply the staged version: one call, because requests wait for it.

    ``LiveReport`` of this worker, as plain values; its ``error`` says why nothing was applied. ``policy_version`` is
    text, as all arguments that may travel over HTTP."""
    failure = ""
    try:
        worker.start_weight_update()
        worker.update_weights({"policy_version": int(policy_version)})
    except Exception as error:  # noqa: BLE001 - reported to the owner, who rolls all workers back
        failure = f"{type(error).__name__}: {error}"
    report = worker.weight_transfer_engine.transaction.live_report()
    return msgspec.structs.asdict(report if report.error else msgspec.structs.replace(report, error=failure))


def streamrl_roll_back(worker: Any) -> None:
    """Undo a commit that failed on another worker, and leave vLLM's update session."""
    worker.weight_transfer_engine.transaction.roll_back()
    worker._weight_update_active = False


def streamrl_forget_live(worker: Any) -> None:
    """The engine is about to sleep without its weights: vLLM drops parameters of which the replica knows nothing."""
    if worker.weight_transfer_engine is not None:
        why = "its weights were dropped when it was put to sleep"
        worker.weight_transfer_engine.transaction.forget_live(why)


def streamrl_open_adapter(worker: Any) -> None:
    """Put the adapter that requests carry into the slot of this worker."""
    open_adapter(worker)


def _add_worker_methods() -> None:
    """vLLM's own update calls return nothing; these let the owner learn versions, hashes and reasons."""
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
