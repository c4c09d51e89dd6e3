"""Retention of checkpoints: names them, moves ``latest``, and forgets those that need not be kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec

from streamrl.base.atomic_files import make_directory, stage_sidecar, write_durable, write_link
from streamrl.base.errors import UNDECODABLE, StreamRLError, WireError
from streamrl.base.types import Prompt, Record
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.wire import OneFrameCodec
from streamrl.control.model import Snapshot, prompts_needed
from streamrl.recipe.sections import HELD_OUT, Checkpoint
from streamrl.run.trainer_ranks import TrainerRanks

LATEST = "latest"
SCORES = "scores.json"
FORK_POINT = "control.msgpack"
"""File of a checkpoint with what another run needs of control to go on from it."""


class ForkPoint(Record, frozen=True):
    """All of control as it was at a checkpoint, with the prompts that it names."""

    control: Snapshot
    prompts: tuple[Prompt, ...]


def fork_point(control: Snapshot, store: TrajectoryStore) -> dict[str, bytes]:
    """The file by its name."""
    prompts = tuple(store.prompts[prompt_id] for prompt_id in sorted(prompts_needed(control.state)))
    return {FORK_POINT: OneFrameCodec[ForkPoint](ForkPoint).encode(ForkPoint(control=control, prompts=prompts))}


def read_fork_point(checkpoint: Path) -> ForkPoint | None:
    """Read the state of control in ``checkpoint``; None where it was written without. Raises ``StreamRLError`` for a
    file that this version cannot read."""
    path = checkpoint / FORK_POINT
    if not path.exists():
        return None
    try:
        return OneFrameCodec[ForkPoint](ForkPoint).decode(path.read_bytes())
    except WireError as error:
        raise StreamRLError(
            f"{path} cannot be read: {error}; use the streamrl that wrote it, or resume from another checkpoint"
        ) from error


def to_forget(
    written: Sequence[int], scores: Mapping[int, float], *, keep: int, keep_best: int, keep_every: int
) -> set[int]:
    """Versions of ``written`` (oldest first, each once) that none of the three rules keeps.

    Kept: the last ``keep`` (at least 1); the ``keep_best`` with the highest score, of equal ones the newest; multiples
    of ``keep_every`` (0: none)."""
    scored = [version for version in written if version in scores]
    best = sorted(scored, key=lambda version: (scores[version], version), reverse=True)[:keep_best]
    permanent = [version for version in written if keep_every and version % keep_every == 0]
    return set(written) - set(written[-keep:]) - set(best) - set(permanent)


class CheckpointKeeper:
    """The checkpoints of one run in ``directory``: ``step-N`` of version N, the link ``latest``, held-out scores.

    Goes on with what the directory already holds up to ``held``, the version that the ranks began from or hold now.
    Newer ones are of a future that was left, because they are damaged or somebody went back: they count for nothing,
    may be written anew, and go once a version is saved. ``limit``: held-out prompts of the scores that are compared
    (0: all), which are those of the set ``score``. ``changed`` is called with the versions that are kept, once all of
    them are durable."""

    def __init__(
        self,
        trainer: TrainerRanks,
        directory: Path,
        rules: Checkpoint,
        *,
        held: int,
        limit: int = 0,
        score: str = "",
        changed: Callable[[Sequence[int]], None] = lambda versions: None,
    ) -> None:
        self._trainer = trainer
        self._directory = directory
        self._rules = rules
        self._limit = limit
        self._prefix = f"eval/{score or HELD_OUT}/avg@"
        self._held = held
        there = _versions_in(directory)
        # Where the ranks hold one that was never saved, the newest of its past is what ``latest`` names.
        past = held if held in there else min(held, _latest_of(directory, there, otherwise=held))
        self._written = [version for version in there if version <= past]
        self._left = {version for version in there if version > past}
        self._scores = read_scores(directory / SCORES)
        self._saved: set[int] = set()
        self._changed = changed

    async def begin(self) -> None:
        """Have ``latest`` name what the ranks began from: a later life of the controller, whose ranks hold more by
        then, knows by it which checkpoints are of the future that was left."""
        if self._held in self._written and (self._directory / LATEST).resolve() != self._path(self._held).resolve():
            await anyio.to_thread.run_sync(write_link, self._directory / LATEST, self._path(self._held).name)
        self._changed(self._written)

    async def save(self, policy_version: int, beside: Mapping[str, bytes]) -> None:
        """Write ``step-N``, once a version, with the files ``beside`` in it; then move ``latest`` to it and remove what
        need not be kept. Raises ``StreamRLError`` where it cannot be written."""
        if policy_version in self._saved:
            return
        for leftover in self._directory.glob(".step-*.partial"):  # of a run that was killed while it wrote
            await self._forget(leftover)
        path = self._path(policy_version)
        least = int(self._rules.min_free_gib * (1 << 30))
        # Through the file system: what control keeps grows with the prompts that wait, a message must not.
        digests = await anyio.to_thread.run_sync(_leave, path, beside)
        await self._trainer.save_checkpoint(str(path), policy_version, least, digests)
        await anyio.to_thread.run_sync(write_link, self._directory / LATEST, path.name)
        self._saved.add(policy_version)
        self._written = [version for version in self._written if version != policy_version] + [policy_version]
        await self._prune()
        for version in sorted(self._left - {policy_version}):
            await self._forget(self._path(version))
        self._left.clear()

    async def scored(self, policy_version: int, figures: Mapping[str, float], limit: int) -> None:
        """Take the held-out score of a version, before or after it is saved, from the figures of an evaluation on
        ``limit`` prompts. One on other prompts says nothing of which is better: that at the end, on all, is of a
        version that is kept as the last one."""
        if limit != self._limit:
            return
        names = sorted(name for name in figures if name.startswith(self._prefix))
        score = figures[names[0]] if names else math.nan
        if not math.isnan(score):
            self._scores[policy_version] = score
            await self._prune()
            await anyio.to_thread.run_sync(_write_scores, self._directory / SCORES, msgspec.json.encode(self._scores))

    async def _prune(self) -> None:
        rules = self._rules
        forgotten = to_forget(
            self._written, self._scores, keep=rules.keep, keep_best=rules.keep_best, keep_every=rules.keep_every
        )
        self._written = [version for version in self._written if version not in forgotten]
        self._saved -= forgotten
        self._changed(self._written)
        self._scores = {v: s for v, s in self._scores.items() if v in self._written or v > self._newest}
        for version in sorted(forgotten):
            await self._forget(self._path(version))

    async def _forget(self, path: Path) -> None:
        await anyio.to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))

    @property
    def _newest(self) -> int:
        """Version of the newest checkpoint; anything that may still be saved is newer."""
        return self._written[-1] if self._written else -1

    def _path(self, policy_version: int) -> Path:
        return self._directory / f"step-{policy_version:06d}"


def _leave(path: Path, beside: Mapping[str, bytes]) -> dict[str, bytes]:
    try:
        return stage_sidecar(path, beside)
    except OSError as error:
        raise StreamRLError(
            f"checkpoint {str(path)!r}: what control keeps cannot be written ({error}): make room, or mend the disk"
        ) from error


def _versions_in(directory: Path) -> list[int]:
    """Versions that are there, lowest first."""
    numbers = [path.name.removeprefix("step-") for path in directory.glob("step-*") if path.is_dir()]
    return sorted(int(number) for number in numbers if number.isdecimal())


def _latest_of(directory: Path, there: Sequence[int], *, otherwise: int) -> int:
    """The version that ``latest`` names, where it is one of those that are there."""
    name = (directory / LATEST).resolve().name
    return next((version for version in there if f"step-{version:06d}" == name), otherwise)


def read_scores(path: Path) -> dict[int, float]:
    """Held-out scores by version; none where there is no such file. Raises ``StreamRLError`` for another file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, float]) if path.exists() else {}
    except UNDECODABLE as error:
        raise StreamRLError(
            f"{path} is not a list of scores ({error}): remove it, and the best are forgotten"
        ) from error


def _write_scores(path: Path, encoded: bytes) -> None:
    make_directory(path.parent)
    write_durable(path, encoded)
