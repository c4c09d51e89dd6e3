"""The ``streamrl`` weight transfer backend: runs in every worker process of an engine.

A version is *staged* in a thread while the engine samples (fetch, check, decode, locate), and *committed*
between two steps of a paused engine. Worker methods never raise for a version that does not fit: they report,
so that the reason reaches the owner in one piece; only a failed commit raises, because vLLM must see it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from streamrl.comm.weights.fetch import fetch_version
from streamrl.comm.weights.mirror import CheckpointMirror, StagedVersion
from streamrl.engines.live_weights import LiveWeights, RouteWrite, count_routes
from streamrl.engines.load_plan import LoadPlan, record_load_plan
from streamrl.engines.vllm_plugin import repack_linear_layers
from streamrl.errors import StreamRLError, WeightError
from streamrl.messages import WeightAnnouncement


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]  # vllm is untyped
    """Nothing has to be said before the first announcement."""


@dataclass
class CommitStaged(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Apply the staged version, which must be this one."""

    policy_version: int


class StageReport(msgspec.Struct, frozen=True):
    """How far staging is on one worker. ``error`` is empty when nothing is wrong."""

    fetched: bool
    error: str = ""
    payload_bytes: int = 0


class LiveReport(msgspec.Struct, frozen=True):
    """What one worker holds live: version (None before the first commit) and its part of the state hash.

    Between ``update_weights`` and ``finish_weight_update`` that is the applied version. ``expected_hash`` is what
    the parts of all workers must add up to. ``error`` is why the last commit failed.
    """

    policy_version: int | None
    state_hash: int
    expected_hash: int
    error: str = ""


class StreamrlWeightTransfer(WeightTransferEngine[NoInit, CommitStaged]):  # type: ignore[misc]
    """Mirror, load plan and live weights of one worker."""

    init_info_cls = NoInit
    update_info_cls = CommitStaged
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._mirror = CheckpointMirror()
        self._live: LiveWeights | None = None
        self._fetching: _StagingThread | None = None
        self._staged: StagedVersion | None = None
        self._writes: list[RouteWrite] = []
        self._applied: tuple[StagedVersion, int] | None = None
        self._error = ""
        _add_worker_methods()

    # ---- staging: while the engine samples ---------------------------------------------------------

    def begin_stage(self, encoded_announcement: bytes) -> None:
        """Start fetching in a thread. A version that is being fetched is given up for the new one."""
        announcement = msgspec.msgpack.decode(encoded_announcement, type=WeightAnnouncement)
        self._give_up_fetching()
        self._staged, self._writes, self._error = None, [], ""
        live = self._live

        def stage(stop: threading.Event) -> tuple[StagedVersion, list[RouteWrite]]:
            staged = self._mirror.stage(fetch_version(announcement, stop=stop))
            return staged, [] if live is None else live.prepare(staged, self._mirror)

        self._fetching = _StagingThread(stage)

    def stage_report(self) -> StageReport:
        """How far the thread is."""
        if self._fetching is None:
            return StageReport(fetched=True, error=self._error or "nothing is being staged")
        return self._fetching.report()

    def finish_stage(self, plans_of_all_workers: Callable[[Any], list[Any]]) -> StageReport:
        """Take over what the thread fetched; with the first anchor, record the load plan.

        ``plans_of_all_workers``: gathers one object from every worker (a collective: all are called at once).
        """
        if self._fetching is None:
            return StageReport(fetched=True, error="nothing is being staged")
        report, self._error = self._fetching.report(), ""
        staged, writes = self._fetching.take()
        self._fetching = None
        try:
            if self._live is None:
                self._live = self._record_live(staged.tensors if staged else {}, plans_of_all_workers)
                writes = self._live.prepare(staged, self._mirror) if staged else []
        except WeightError as error:
            self._error = str(error)
            return StageReport(fetched=True, error=self._error)
        self._staged, self._writes = staged, writes
        return report

    def _record_live(self, tensors: Any, plans_of_all_workers: Callable[[Any], list[Any]]) -> LiveWeights:
        plan: LoadPlan | None = None
        own: Any
        try:
            plan = record_load_plan(self.model, tensors)
            own = {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}
        except WeightError as error:  # told to the other workers first: they wait for this one
            own = str(error)
        plans = plans_of_all_workers(own)
        for other in plans:
            if isinstance(other, str):
                raise WeightError(other)
        assert plan is not None
        return LiveWeights(plan, count_routes(plans, _worker_index(), tensors))

    # ---- commit: between two steps of a paused engine ----------------------------------------------

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do: sources come with each announcement."""

    def start_weight_update(self) -> None:
        """Nothing to do: the version is staged already."""

    def receive_weights(self, update_info: CommitStaged) -> None:
        """Apply the staged version to the live parameters and verify it there; undone when it does not hold."""
        try:
            self._apply(update_info.policy_version)
        except Exception as error:
            self._error = f"{error}" if isinstance(error, StreamRLError) else f"{type(error).__name__}: {error}"
            self.roll_back()
            raise

    def finish_weight_update(self) -> None:
        """The applied version becomes what this worker holds: the mirror advances."""
        if self._applied is None or self._live is None:
            raise WeightError("finish_weight_update without an applied version: commit a staged version first")
        staged, self._live.state_hash = self._applied
        self._mirror.advance(staged)
        self._forget_staged()

    def roll_back(self) -> None:
        """Undo an applied or half-applied version from the mirror. Without a first anchor nothing can be undone."""
        if self._live is not None and self._writes:
            if self._mirror.policy_version is None:
                self._error += "; the live weights are undefined until an anchor is committed"
            else:
                self._live.undo(self._writes, self._mirror)
                self._repack(self._live)
        self._forget_staged()

    def live_report(self) -> LiveReport:
        """What this worker holds."""
        if self._applied is not None:
            staged, part = self._applied
            return LiveReport(staged.policy_version, part, staged.state_hash, self._error)
        part = 0 if self._live is None else self._live.state_hash
        return LiveReport(self._mirror.policy_version, part, self._mirror.state_hash, self._error)

    def shutdown(self) -> None:
        """Stop the thread."""
        self._give_up_fetching()

    def _apply(self, policy_version: int) -> None:
        staged, live = self._staged, self._live
        if staged is None or live is None or staged.policy_version != policy_version:
            held = None if staged is None else staged.policy_version
            raise WeightError(f"version {policy_version} cannot be committed: staged is {held}; stage it first")
        if staged.base_version not in (None, self._mirror.policy_version):
            raise WeightError(
                f"version {policy_version} was staged on version {staged.base_version}; "
                f"this engine holds {self._mirror.policy_version}: stage it again"
            )
        part = live.apply(self._writes, anchor=staged.is_anchor)
        self._repack(live)
        self._applied = (staged, part)

    def _repack(self, live: LiveWeights) -> None:
        repack_linear_layers(self.model, live.storages_of(self._writes))

    def _forget_staged(self) -> None:
        self._staged, self._writes, self._applied = None, [], None

    def _give_up_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.stop()
            self._fetching = None


class _StagingThread:
    """Fetches and decodes one version off the worker's main thread, which goes on sampling."""

    def __init__(self, stage: Callable[[threading.Event], tuple[StagedVersion, list[RouteWrite]]]) -> None:
        self._stage = stage
        self._stop = threading.Event()
        self._staged: StagedVersion | None = None
        self._writes: list[RouteWrite] = []
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="weight staging", daemon=True)
        self._thread.start()

    def report(self) -> StageReport:
        if self._thread.is_alive():
            return StageReport(fetched=False)
        size = 0 if self._staged is None else self._staged.payload_bytes
        return StageReport(fetched=True, error=self._error, payload_bytes=size)

    def take(self) -> tuple[StagedVersion | None, list[RouteWrite]]:
        self._thread.join()
        return self._staged, self._writes

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            _leave_the_cores_of_the_model()
            self._staged, self._writes = self._stage(self._stop)
        except Exception as error:  # noqa: BLE001 - reported to the owner by report()
            self._error = f"{error}" if isinstance(error, WeightError) else f"{type(error).__name__}: {error}"


def _leave_the_cores_of_the_model() -> None:
    """vLLM binds a CPU worker to cores, and a thread inherits that: run where the parent process may run."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def _worker_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _gather_from_workers(own: Any) -> list[Any]:
    """One object from every worker of this engine, by rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [own]
    from vllm.distributed.parallel_state import get_world_group

    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, own, group=get_world_group().cpu_group)
    return gathered


# ---- methods of the worker, called by name through AsyncLLM.collective_rpc ------------------------------


def streamrl_begin_stage(worker: Any, encoded_announcement: bytes) -> None:
    """Start staging on this worker."""
    worker.weight_transfer_engine.begin_stage(encoded_announcement)


def streamrl_stage_report(worker: Any) -> dict[str, Any]:
    """``StageReport`` of this worker, as plain values."""
    return msgspec.structs.asdict(worker.weight_transfer_engine.stage_report())


def streamrl_finish_stage(worker: Any) -> dict[str, Any]:
    """``StageReport`` after taking over what was fetched, as plain values."""
    return msgspec.structs.asdict(worker.weight_transfer_engine.finish_stage(_gather_from_workers))


def streamrl_live_report(worker: Any) -> dict[str, Any]:
    """``LiveReport`` of this worker, as plain values."""
    return msgspec.structs.asdict(worker.weight_transfer_engine.live_report())


def streamrl_roll_back(worker: Any) -> None:
    """Undo a commit that failed on another worker, and leave vLLM's update session."""
    worker.weight_transfer_engine.roll_back()
    worker._weight_update_active = False


def _add_worker_methods() -> None:
    """vLLM's own update calls return nothing; these let the owner learn versions, hashes and reasons."""
    from vllm.v1.worker.worker_base import WorkerBase

    for method in (
        streamrl_begin_stage,
        streamrl_stage_report,
        streamrl_finish_stage,
        streamrl_live_report,
        streamrl_roll_back,
    ):
        setattr(WorkerBase, method.__name__, method)
