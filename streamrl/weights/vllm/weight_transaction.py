"""The transaction of one push in one worker: stage while it samples, then apply, verify, commit or undo.

No vllm, no torch: what is live is behind ``LiveModel``. A worker holds its replica's version bit for bit, or it is
*tainted*: then it stages anchors only, and a committed anchor makes it whole again without a restart. One that missed
versions gets a single delta over them; one that was restarted gets a single delta on the checkpoint that it loaded,
after every live element was compared with that checkpoint's files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from streamrl.base.errors import StreamRLError, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.manifest import CHECKPOINT_VERSION
from streamrl.weights.pull.fetch import KeptParts, fetch_version
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, StagedVersion, TensorSpec

AUDIT_INTERVAL = 50
"""After so many commits every live element is compared with the replica, while the next version arrives."""


class LiveModel(Protocol):
    """The part of ``live_weights.LiveWeights`` that a transaction needs. ``state_hash``: of what this worker counts."""

    state_hash: int

    def prepare(self, staged: StagedVersion, replica: CheckpointReplica) -> list[Any]: ...

    def apply(self, writes: Sequence[Any], *, anchor: bool) -> int: ...

    def undo(self, writes: Sequence[Any], replica: CheckpointReplica) -> None: ...

    def audit(self, replica: CheckpointReplica) -> int: ...


class StageReport(msgspec.Struct, frozen=True):
    """Progress of staging on one worker. ``error`` is empty when nothing is wrong."""

    fetched: bool
    error: str = ""
    payload_bytes: int = 0


class LiveReport(msgspec.Struct, frozen=True):
    """State of one worker's live weights: version (None before the first commit) and its part of the state hash.
    Between ``apply`` and ``finish`` that is the applied version. ``expected_hash`` is what the parts of all workers
    must add up to. ``error`` is why the last commit failed."""

    policy_version: int | None
    state_hash: int
    expected_hash: int
    error: str = ""


class WeightTransaction:
    """Replica, staged version and live weights of one worker. Methods are called from one thread, the worker's.

    ``repack``: brings what the engine derives from its parameters (packed kernels) in line with written ones.
    ``checkpoint``: the directory that the live weights were loaded from, where that is known. ``replica``: one that is
    shared with other workers (``SharedReplica``); None: one of its own."""

    def __init__(
        self,
        repack: Callable[[LiveModel, Sequence[Any]], None],
        *,
        audit_interval: int = AUDIT_INTERVAL,
        checkpoint: Path | None = None,
        replica: CheckpointReplica | None = None,
    ) -> None:
        self.replica = replica or CheckpointReplica()
        self.live: LiveModel | None = None
        self.tainted = ""
        self._repack = repack
        self._checkpoint = None if checkpoint is None else CheckpointBase(checkpoint)
        self._audit_interval = audit_interval
        self._commits_since_audit = 0
        self._kept = KeptParts()
        self._staging: Future[_Staged] | None = None
        self._stop = threading.Event()
        self._staged: _Staged | None = None
        self._applied: tuple[StagedVersion, int] | None = None
        self._error = ""

    # ---- staging: while the engine samples ---------------------------------------------------------

    def begin_stage(self, announcement: WeightAnnouncement) -> None:
        """Start fetching in a thread. A version that is being fetched is given up; its verified parts are kept. The new
        thread, and not the engine, waits for the thread before it, which may be reading a checkpoint."""
        if self._applied is not None:
            self.roll_back()
        self._staged = None
        self._error = ""
        self._stop.set()
        self._stop = threading.Event()
        work = partial(self._stage, announcement, self.live, self._stop, self._staging)
        self._staging = Future()
        # A daemon, not a pool's: a process that ends does not wait for a source that is silent.
        threading.Thread(target=_settle, args=(self._staging, work), name="weight staging", daemon=True).start()

    def forget_live(self, why: str) -> None:
        """The live weights are lost, ``why`` says how: nothing but an anchor makes this worker whole again."""
        self.close()
        self._forget_staged()
        self.tainted = why

    def _stage(
        self,
        announcement: WeightAnnouncement,
        live: LiveModel | None,
        stop: threading.Event,
        given_up: Future[_Staged] | None,
    ) -> _Staged:
        _reset_cpu_affinity()
        if given_up is not None:
            wait([given_up])
        with self.replica.staging(announcement, stop):
            if self._holds(announcement):
                return _Staged(_replay(self.replica), [])
            self._refuse_for_tainted(announcement)
            self._audit_when_due(live)
            checkpoint = self._reset_before_first_commit()

            def fetch(held: CheckpointReplica) -> FetchedVersion:
                return fetch_version(announcement, held=held, checkpoint=checkpoint, kept=self._kept, stop=stop)

            staged = self.replica.stage_announced(announcement, fetch, on_checkpoint=checkpoint is not None)
            self._kept.forget()
            return _Staged(staged, [] if live is None else live.prepare(staged, self.replica))

    def stage_report(self) -> StageReport:
        """Report the progress of the staging thread."""
        if self._staging is None:
            return self._without_thread()
        if not self._staging.done():
            return StageReport(fetched=False)
        if error := self._staging.exception():
            return StageReport(fetched=True, error=_reason(error))
        return StageReport(fetched=True, payload_bytes=self._staging.result().version.payload_bytes)

    def finish_stage(self, record_live: Callable[[Mapping[str, TensorSpec]], LiveModel]) -> StageReport:
        """Take over what the thread fetched. ``record_live`` finds out, with the first anchor, where tensors go; it is
        called on every worker, also on one that fetched nothing: the others wait for its answer."""
        if self._staging is None:
            return self._without_thread()
        wait([self._staging])
        report = self.stage_report()
        self._error = ""
        staged = None if report.error else self._staging.result()
        self._staging = None
        try:
            if self.live is None:
                self.live = record_live(staged.version.tensors if staged else {})
                if staged is not None:
                    staged = msgspec.structs.replace(staged, writes=self.live.prepare(staged.version, self.replica))
            if staged is not None and staged.version.base_version == CHECKPOINT_VERSION:
                self._verify_checkpoint(self.live)
        except WeightError as error:
            self._error = str(error)
            return StageReport(fetched=True, error=self._error)
        self._staged = staged
        return report

    def _without_thread(self) -> StageReport:
        """The report to a caller who asks for a version that another call has taken over already."""
        if self._staged is None:
            return StageReport(fetched=True, error=self._error or "nothing is being staged")
        return StageReport(fetched=True, payload_bytes=self._staged.version.payload_bytes)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._stop.set()
        if self._staging is not None:
            wait([self._staging])
            self._staging = None

    def _holds(self, announced: WeightAnnouncement) -> bool:
        held = (self.replica.policy_version, self.replica.state_hash)
        return not self.tainted and held == (announced.policy_version, announced.state_hash)

    def _refuse_for_tainted(self, announced: WeightAnnouncement) -> None:
        if self.tainted and announced.base_version is not None:
            raise WeightError(
                f"version {announced.policy_version} is a delta, and the live weights of this engine are not what it "
                f"should hold ({self.tainted}): publish an anchor"
            )

    def _reset_before_first_commit(self) -> CheckpointBase | None:
        """Forget what was staged before the first commit, and return the checkpoint on which a first delta may be
        made."""
        if self.replica.policy_version not in (None, CHECKPOINT_VERSION):
            return None
        self.replica.clear()
        return None if self.tainted else self._checkpoint

    def _verify_checkpoint(self, live: LiveModel) -> None:
        """Check before the first commit that the live weights are those of the files on which the first delta is
        made."""
        try:
            live.state_hash = live.audit(self.replica)
        except WeightError as error:
            self._checkpoint = None
            self.replica.clear()
            raise WeightError(
                f"the live weights are not those of the checkpoint they were loaded from ({error}): publish an anchor"
            ) from error

    def _audit_when_due(self, live: LiveModel | None) -> None:
        """Audit in the thread, while the engine samples: live weights only change in a commit, which waits for it."""
        if (
            live is None
            or not self.replica.at_hand
            or not self._audit_interval
            or self._commits_since_audit < self._audit_interval
            or self.tainted
        ):
            return
        try:
            found = live.audit(self.replica)
            if found != live.state_hash:
                raise WeightError(f"an audit finds state hash {found:#018x} live; expected {live.state_hash:#018x}")
        except WeightError as error:
            self.tainted = str(error)
            raise
        self._commits_since_audit = 0

    # ---- commit: between two steps of a paused engine ----------------------------------------------

    def apply(self, policy_version: int) -> None:
        """Write the staged version to the live parameters and verify it there; undone when it does not hold."""
        try:
            self._apply(policy_version)
        except Exception as error:
            self._error = _reason(error)
            self.roll_back()
            raise

    def finish(self) -> None:
        """The applied version becomes what this worker holds: the replica advances."""
        if self._applied is None or self.live is None or self._staged is None:
            raise WeightError("finish_weight_update without an applied version: commit a staged version first")
        version, part = self._applied
        self.replica.advance(version)  # its bits follow while the next version is staged: now requests wait
        self.live.state_hash = part
        self.tainted = ""
        self._commits_since_audit += 1
        self._forget_staged()

    def roll_back(self) -> None:
        """Undo an applied or half-applied version from the replica. Where that fails the worker is tainted."""
        staged = self._staged
        live = self.live
        self._forget_staged()
        if live is None or staged is None or not staged.writes or not self.tainted:
            return  # nothing was written
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
            version, part = self._applied
            return LiveReport(version.policy_version, part, version.state_hash, self._error)
        held = self.replica.policy_version
        if self.live is None or held in (None, CHECKPOINT_VERSION):
            return LiveReport(None, 0, 0, error)
        return LiveReport(held, self.live.state_hash, self.replica.state_hash, error)

    def _apply(self, policy_version: int) -> None:
        staged = self._staged
        live = self.live
        if staged is None or live is None or staged.version.policy_version != policy_version:
            held = None if staged is None else staged.version.policy_version
            raise WeightError(f"version {policy_version} cannot be committed: staged is {held}; stage it first")
        version = staged.version
        if version.base_version not in (None, self.replica.policy_version):
            raise WeightError(
                f"version {policy_version} was staged on version {version.base_version}; "
                f"this engine holds {self.replica.policy_version}: stage it again"
            )
        if self.tainted and not version.is_anchor:
            raise WeightError(f"version {policy_version} is a delta, and this engine needs an anchor: {self.tainted}")
        self._staged = msgspec.structs.replace(staged, was_tainted=bool(self.tainted))
        self.tainted = self.tainted or f"version {policy_version} is half applied"
        part = live.apply(staged.writes, anchor=version.is_anchor)
        self._repack(live, staged.writes)
        self._applied = (version, part)

    def _forget_staged(self) -> None:
        self._staged = None
        self._applied = None


def _settle(staging: Future[_Staged], work: Callable[[], _Staged]) -> None:
    try:
        staging.set_result(work())
    except BaseException as raised:  # noqa: BLE001 - the waiting thread raises it
        staging.set_exception(raised)


class _Staged(msgspec.Struct, frozen=True, eq=False):
    """A version that fits, and what it writes. ``was_tainted``: the live weights were not the replica's before it."""

    version: StagedVersion
    writes: list[Any]
    was_tainted: bool = False


def _replay(replica: CheckpointReplica) -> StagedVersion:
    """The version that is held, as a delta on itself that changes nothing."""
    version = replica.policy_version
    assert version is not None
    return StagedVersion(version, version, replica.state_hash, replica.tensors, {}, 0, replica.run_id)


def _reason(error: BaseException) -> str:
    return f"{error}" if isinstance(error, StreamRLError) else f"{type(error).__name__}: {error}"


def _reset_cpu_affinity() -> None:
    """vLLM binds a CPU worker to cores, and a thread inherits that: run where the parent process may run."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
