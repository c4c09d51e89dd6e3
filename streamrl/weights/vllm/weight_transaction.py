"""The transaction of one push in one vLLM worker: stage while the engine samples, then apply, verify, and commit or
undo.

``weight_receiver.py`` has one in each vLLM worker's process, ``simulated_engine.py`` one in the process of a simulated
engine. No vllm, no torch: live weights are behind ``LiveModel``. A worker holds the version of its replica bit for bit,
or it is *tainted*: then it stages anchors only, and is no longer tainted after it has committed one. A worker that
missed versions gets a single delta over them. A worker that has restarted gets a single delta on the checkpoint that it
loaded, after every live element was compared with the files of this checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from logging import getLogger
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.distance import NOWHERE, Location, Mover, mover_of
from streamrl.weights.manifest import CHECKPOINT_VERSION
from streamrl.weights.pull.fetch import KeptParts, fetch_version
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.memory_fetch import device_version, fetch_nearest
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, StagedVersion, TensorSpecs
from streamrl.weights.pull.trainer_memory import TrainerMemory

_logger = getLogger(__name__)
AUDIT_INTERVAL = 50
"""Number of commits after which every live element is compared with the replica, while the next version arrives."""


class LiveModel(Protocol):
    """The methods of ``live_weights.LiveWeights`` that a transaction calls. ``state_hash``: part of the state hash that
    this worker counts."""

    state_hash: int

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[Any]: ...

    def apply(self, writes: Sequence[Any], *, anchor: bool) -> int: ...

    def undo(self, writes: Sequence[Any], replica: CheckpointReplica) -> None: ...

    def audit(self, replica: CheckpointReplica) -> int: ...


class StageReport(Struct, frozen=True):
    """Progress of staging on one worker. ``fetched``: whether the thread has ended, with success or with ``error``
    (empty: no error). ``payload_bytes``: fetched bytes. ``mover``: way of the version (``distance.Mover``; empty:
    another worker of the machine had it)."""

    fetched: bool
    error: str = ""
    payload_bytes: int = 0
    mover: str = ""


class LiveReport(Struct, frozen=True):
    """State of one worker's live weights: those of the applied version between ``apply`` and ``finish``.
    ``policy_version``: version (None before the first commit). ``state_hash``: part of the state hash that this worker
    counts. ``expected_hash``: state hash to which the parts of all workers must add up. ``error``: reason why the last
    commit failed, or why the worker is tainted (empty: neither)."""

    policy_version: int | None
    state_hash: int
    expected_hash: int
    error: str = ""


class WeightTransaction:
    """Replica, staged version and live weights of one worker. Methods are called from one thread, the worker's.

    ``repack``: function that updates what the engine derives from parameters (packed kernels) after writes.
    ``audit_interval``: number of commits between audits (0: no audits). ``checkpoint``: directory from which the live
    weights were loaded, where it is known. ``replica``: replica that is shared with other workers (``SharedReplica``);
    None: a new one for this worker alone. ``tainted``: reason why the live weights are not those of the replica; empty
    where they are. ``location``: location of this worker, by which a version takes the shortest way.
    ``open_device``: see ``memory_fetch.device_version`` (None: this worker has no GPU)."""

    def __init__(
        self,
        repack: Callable[[LiveModel, Sequence[Any]], None],
        *,
        audit_interval: int = AUDIT_INTERVAL,
        checkpoint: Path | None = None,
        replica: CheckpointReplica | None = None,
        location: Location = NOWHERE,
        open_device: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.replica = replica or CheckpointReplica()
        self.live: LiveModel | None = None
        self.tainted = ""
        self._repack = repack
        self._location = location
        self._open_device = open_device
        self._checkpoint = None if checkpoint is None else CheckpointBase(checkpoint)
        self._audit_interval = audit_interval
        self._commits_since_audit = 0
        self._parts = KeptParts()
        self._staging: Future[_Staged] | None = None
        self._stop = Event()
        self._staged: _Staged | None = None
        self._applied: tuple[StagedVersion, int] | None = None
        self._error = ""

    # ---- staging: while the engine samples ---------------------------------------------------------

    def begin_stage(self, announcement: WeightAnnouncement) -> None:
        """Start to fetch a version in a thread. A fetch that is under way is stopped; its verified pieces are kept. The
        new thread, not the caller, waits for the stopped thread, which may be reading a checkpoint."""
        if self._applied is not None:
            self.roll_back()
        self._staged = None
        self._error = ""
        self._stop.set()
        self._stop = Event()
        work = partial(self._stage, announcement, self.live, self._stop, self._staging)
        self._staging = Future()
        # A daemon thread, not one of a pool: a process that ends does not wait for a silent source.
        threading.Thread(target=_settle, args=(self._staging, work), name="weight staging", daemon=True).start()

    def forget_live(self, reason: str) -> None:
        """Note that the live weights are lost for ``reason``: the worker is tainted until it commits an anchor."""
        self.close()
        self._forget_staged()
        self.tainted = reason

    def _stage(
        self, announcement: WeightAnnouncement, live: LiveModel | None, stop: Event, stopped: Future[_Staged] | None
    ) -> _Staged:
        """Fetch, check and decode a version, in the thread. ``stopped``: the thread before, to wait for."""
        _reset_cpu_affinity()
        if stopped is not None:
            wait([stopped])
        with self.replica.staging(announcement, stop):
            if self._holds(announcement):
                return _Staged(_empty_delta(self.replica), [])
            self._refuse_for_tainted(announcement)
            self._audit_when_due(live)
            from_device = self._stage_on_device(announcement, live)
            if from_device is not None:
                return from_device
            checkpoint = self._reset_before_first_commit()

            movers: list[Mover] = []

            def fetch(replica: CheckpointReplica) -> FetchedVersion:
                encoded = partial(
                    fetch_version, announcement, held=replica, checkpoint=checkpoint, kept=self._parts, stop=stop
                )
                version, mover = fetch_nearest(announcement, self._location, replica, checkpoint, encoded)
                movers.append(mover)
                return version

            staged = self.replica.stage_announced(announcement, fetch, on_checkpoint=checkpoint is not None)
            self._parts.forget()
            writes: list[Any] = []
            if live is not None:
                writes = live.prepare(staged, self.replica)
            return _Staged(staged, writes, mover="".join(movers))

    def _stage_on_device(self, announcement: WeightAnnouncement, live: LiveModel | None) -> _Staged | None:
        """Stage a version that a rank has on this worker's GPU. Returns None, and says so in the log, where that is
        impossible."""
        if self._open_device is None or mover_of(announcement, self._location) is not Mover.DEVICE:
            return None
        base_version = self.replica.policy_version
        if live is None or announcement.base_version is None or base_version == CHECKPOINT_VERSION:
            base_version = None
        try:
            version, memory = device_version(announcement, self._open_device, base_version)
            writes: list[Any] = []
            if live is not None:
                writes = live.prepare(version, self.replica)
        except Exception as error:  # noqa: BLE001 - whatever fails there, there is another way
            _logger.warning("version %s is not taken from the GPU: %s", announcement.policy_version, _reason(error))
            return None
        return _Staged(version, writes, mover=Mover.DEVICE, memory=memory)

    def stage_report(self) -> StageReport:
        """Report the progress of the staging thread."""
        if self._staging is None:
            return self._without_thread()
        if not self._staging.done():
            return StageReport(fetched=False)
        if error := self._staging.exception():
            return StageReport(fetched=True, error=_reason(error))
        return _report_of(self._staging.result())

    def finish_stage(self, record_live: Callable[[TensorSpecs], LiveModel]) -> StageReport:
        """Take over the version that the thread has fetched. ``record_live``: records the load plan of the published
        tensors; called once, with the first version, on every worker, also on one that failed to fetch it: it is a
        collective call."""
        if self._staging is None:
            return self._without_thread()
        wait([self._staging])
        report = self.stage_report()
        self._error = ""
        staged = None if report.error else self._staging.result()
        self._staging = None
        tensors: TensorSpecs = {}
        if staged is not None:
            tensors = staged.version.tensors
        try:
            if self.live is None:
                self.live = record_live(tensors)
                if staged is not None:
                    staged = replace(staged, writes=self.live.prepare(staged.version, self.replica))
            if staged is not None and staged.version.base_version == CHECKPOINT_VERSION:
                self._verify_checkpoint(self.live)
        except WeightError as error:
            self._error = str(error)
            return StageReport(fetched=True, error=self._error)
        self._staged = staged
        return report

    def _without_thread(self) -> StageReport:
        """Return the report where an earlier call has taken over the staged version, or none was staged."""
        if self._staged is None:
            return StageReport(fetched=True, error=self._error or "nothing is being staged")
        return _report_of(self._staged)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        if self._staging is not None:
            wait([self._staging])
            self._staging = None

    def _holds(self, announced: WeightAnnouncement) -> bool:
        """Return whether the live weights are the announced version already."""
        replica_identity = (self.replica.policy_version, self.replica.state_hash)
        return not self.tainted and replica_identity == (announced.policy_version, announced.state_hash)

    def _refuse_for_tainted(self, announced: WeightAnnouncement) -> None:
        """Raise ``WeightError`` for a delta where this worker is tainted."""
        if self.tainted and announced.base_version is not None:
            raise WeightError(
                f"version {announced.policy_version} is a delta, and the live weights of this engine are not what it "
                f"should hold ({self.tainted}): publish an anchor"
            )

    def _reset_before_first_commit(self) -> CheckpointBase | None:
        """Return the checkpoint, as base of a first delta, and clear the replica, which an earlier staging may have
        advanced to the checkpoint. After the first commit, do nothing and return None."""
        if self.replica.policy_version not in (None, CHECKPOINT_VERSION):
            return None
        self.replica.clear()
        return None if self.tainted else self._checkpoint

    def _verify_checkpoint(self, live: LiveModel) -> None:
        """Check before the first commit that the live weights are those of the checkpoint on which the first delta is
        made. Raises ``WeightError``."""
        try:
            live.state_hash = live.audit(self.replica)
        except WeightError as error:
            self._checkpoint = None
            self.replica.clear()
            raise WeightError(
                f"the live weights are not those of the checkpoint they were loaded from ({error}): publish an anchor"
            ) from error

    def _audit_when_due(self, live: LiveModel | None) -> None:
        """Audit the live weights after every ``audit_interval`` commits, in the thread, while the engine samples. They
        change in a commit only, which waits for the thread. Raises ``WeightError``; the worker is tainted then."""
        if (
            live is None
            or not self.replica.at_hand
            or not self._audit_interval
            or self._commits_since_audit < self._audit_interval
            or self.tainted
        ):
            return
        try:
            live_hash = live.audit(self.replica)
            if live_hash != live.state_hash:
                raise WeightError(f"an audit finds state hash {live_hash:#018x} live; expected {live.state_hash:#018x}")
        except WeightError as error:
            self.tainted = str(error)
            raise
        self._commits_since_audit = 0

    # ---- commit: between two steps of a paused engine ----------------------------------------------

    def apply(self, policy_version: int) -> None:
        """Write the staged version to the live parameters and verify it. Raises an error after a failure, which was
        then undone where possible."""
        try:
            self._apply(policy_version)
        except Exception as error:
            self._error = _reason(error)
            if self._staged is not None and self._staged.memory is not None:
                _logger.warning("no further version is taken from the GPU: %s", self._error)
                self._open_device = None
            self.roll_back()
            raise

    def finish(self) -> None:
        """Make the applied version the one that this worker holds, and advance the replica."""
        if self._applied is None or self.live is None or self._staged is None:
            raise WeightError("finish_weight_update without an applied version: commit a staged version first")
        version, part_hash = self._applied
        self.replica.advance(version)  # writes no bits, since requests wait; they follow with the next staging
        self.live.state_hash = part_hash
        self.tainted = ""
        self._commits_since_audit += 1
        self._forget_staged()

    def roll_back(self) -> None:
        """Restore the weights before an applied or half-applied version from the replica. The worker stays tainted
        where this fails."""
        staged = self._staged
        live = self.live
        self._forget_staged()
        if live is None or staged is None or not staged.writes or not self.tainted:
            return  # live weights were not written
        if self.replica.policy_version is None:
            self._error += "; the live weights are undefined until an anchor is committed"
            return
        try:
            live.undo(staged.writes, self.replica)
        except WeightError as error:
            self._error += f"; it could not be undone ({error}): publish an anchor"
            return
        self._repack(live, staged.writes)
        if not staged.was_tainted:
            self.tainted = ""

    def live_report(self) -> LiveReport:
        """Report the version that this worker holds."""
        error = self._error or self.tainted
        if self._applied is not None:
            applied, part_hash = self._applied
            return LiveReport(applied.policy_version, part_hash, applied.state_hash, self._error)
        version = self.replica.policy_version
        if self.live is None or version in (None, CHECKPOINT_VERSION):
            return LiveReport(None, 0, 0, error)
        return LiveReport(version, self.live.state_hash, self.replica.state_hash, error)

    def _apply(self, policy_version: int) -> None:
        staged = self._staged
        live = self.live
        if staged is None or live is None or staged.version.policy_version != policy_version:
            staged_version = None if staged is None else staged.version.policy_version
            raise WeightError(
                f"version {policy_version} cannot be committed: staged is {staged_version}; stage it first"
            )
        version = staged.version
        if version.base_version not in (None, self.replica.policy_version):
            raise WeightError(
                f"version {policy_version} was staged on version {version.base_version}; "
                f"this engine holds {self.replica.policy_version}: stage it again"
            )
        if self.tainted and not version.is_anchor:
            raise WeightError(f"version {policy_version} is a delta, and this engine needs an anchor: {self.tainted}")
        self._staged = replace(staged, was_tainted=bool(self.tainted))
        self.tainted = self.tainted or f"version {policy_version} is half applied"
        part_hash = live.apply(staged.writes, anchor=version.is_anchor)
        if staged.memory is not None:  # complete writes have read it
            staged.memory.check(policy_version)
        self._repack(live, staged.writes)
        self._applied = (version, part_hash)

    def _forget_staged(self) -> None:
        self._staged = None
        self._applied = None


def _settle(staging: Future[_Staged], work: Callable[[], _Staged]) -> None:
    """Call ``work`` and put its result or its exception into ``staging``; the target of the thread."""
    try:
        staging.set_result(work())
    except BaseException as raised:  # noqa: BLE001 - the waiting thread raises it
        staging.set_exception(raised)


class _Staged(Struct, frozen=True, eq=False):
    """A staged version. ``writes``: result of ``LiveModel.prepare``. ``was_tainted``: whether the worker was tainted
    before the version was applied. ``mover``: see ``StageReport``. ``memory``: memory of the trainer from which
    the commit reads (None: from none)."""

    version: StagedVersion
    writes: list[Any]
    was_tainted: bool = False
    mover: str = ""
    memory: TrainerMemory | None = None


def _report_of(staged: _Staged) -> StageReport:
    return StageReport(fetched=True, payload_bytes=staged.version.payload_bytes, mover=staged.mover)


def _empty_delta(replica: CheckpointReplica) -> StagedVersion:
    """Return the held version as a delta on itself, without changes."""
    version = replica.policy_version
    assert version is not None
    return StagedVersion(version, version, replica.state_hash, replica.tensors, {}, 0, replica.run_id)


def _reason(error: BaseException) -> str:
    return f"{error}" if isinstance(error, StreamRLError) else f"{type(error).__name__}: {error}"


def _reset_cpu_affinity() -> None:
    """Let this thread use all cores of the parent process. It would inherit the cores to which vLLM binds a CPU
    worker."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
