"""The checkpoints of a run: their names, the link ``latest``, and the removal of those that no rule keeps.

The controller process saves through ``CheckpointKeeper``; the trainer ranks write the model itself. ``read_fork_point``
is called at the start of a run that begins from another run's checkpoint."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from anyio import to_thread
from msgspec import json

from streamrl.base.atomic_files import make_directory, write_durable, write_link, write_sidecar
from streamrl.base.errors import UNDECODABLE, StreamRLError, WireError
from streamrl.base.messages import SaveCheckpoint
from streamrl.base.types import MetricsMapping, Prompt, Record
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.wire import OneFrameCodec
from streamrl.control.run_state import Snapshot, prompts_needed
from streamrl.recipe.sections import HELD_OUT, Checkpoint
from streamrl.run.trainer_ranks import TrainerRanks

LATEST = "latest"
SCORES = "scores.json"
FORK_POINT = "control.msgpack"
"""File of a checkpoint with the state of control, from which another run can go on."""


class ForkPoint(Record, frozen=True):
    """The state of control at a checkpoint, with the prompts that it names."""

    control: Snapshot
    prompts: tuple[Prompt, ...]


def fork_point(control: Snapshot, store: TrajectoryStore) -> dict[str, bytes]:
    """Return the content of the file ``FORK_POINT`` by its name."""
    prompts = tuple(store.prompts[prompt_id] for prompt_id in sorted(prompts_needed(control.state)))
    return {FORK_POINT: OneFrameCodec[ForkPoint](ForkPoint).encode(ForkPoint(control=control, prompts=prompts))}


def read_fork_point(checkpoint: Path) -> ForkPoint | None:
    """Read the state of control in ``checkpoint``; None where the checkpoint has none. Raises ``StreamRLError`` for a
    file that this version of streamrl cannot read."""
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
    """Return the versions of ``written`` (oldest first, each once) that no rule keeps. Three rules keep versions: the
    last ``keep`` (at least 1); the ``keep_best`` with the highest score, newer ones first where scores are equal; and
    multiples of ``keep_every`` (0: no version)."""
    scored = [version for version in written if version in scores]
    best = sorted(scored, key=lambda version: (scores[version], version), reverse=True)[:keep_best]
    permanent = [version for version in written if keep_every and version % keep_every == 0]
    return set(written) - set(written[-keep:]) - set(best) - set(permanent)


class CheckpointKeeper:
    """The checkpoints of one run in ``directory``: ``step-N`` of version N, the link ``latest``, held-out scores.

    The directory may have checkpoints of earlier lives of the run. Those up to ``held_version`` belong to this run.
    Newer ones are abandoned: the run went on from an older version, because they are damaged or a user chose to. They
    are ignored, may be overwritten, and are removed once a version is saved.

    ``held_version``: version that the ranks began from or hold now;
    ``limit``: number of held-out prompts of the scores that are compared (0: all prompts);
    ``score``: name of the held-out set of these scores;
    ``changed``: function that is called with the kept versions, once all of them are durable."""

    def __init__(
        self,
        trainer: TrainerRanks,
        directory: Path,
        rules: Checkpoint,
        *,
        held_version: int,
        limit: int = 0,
        score: str = "",
        changed: Callable[[Sequence[int]], None] = lambda versions: None,
    ) -> None:
        self._trainer = trainer
        self._directory = directory
        self._rules = rules
        self._limit = limit
        self._prefix = f"eval/{score or HELD_OUT}/avg@"
        self._held_version = held_version
        stored = _versions_in(directory)
        # Where the version of the ranks was never saved, ``latest`` names the newest checkpoint before it.
        newest = held_version
        if held_version not in stored:
            newest = min(held_version, _latest_of(directory, stored, otherwise=held_version))
        self._written = [version for version in stored if version <= newest]
        self._abandoned = {version for version in stored if version > newest}
        self._scores = read_scores(directory / SCORES)
        self._saved: set[int] = set()
        self._changed = changed

    async def begin(self) -> None:
        """Move ``latest`` to the version that the ranks began from. A later life of the controller, whose ranks hold a
        newer version by then, sees by it which checkpoints are abandoned."""
        path = self._path(self._held_version)
        latest = self._directory / LATEST
        if self._held_version in self._written and latest.resolve() != path.resolve():
            await to_thread.run_sync(write_link, latest, path.name)
        self._changed(self._written)

    async def save(self, policy_version: int, sidecar_files: Mapping[str, bytes]) -> None:
        """Write ``step-N`` with ``sidecar_files`` in it, once for each version; then move ``latest`` to it and remove
        checkpoints that no rule keeps. Raises ``StreamRLError`` where it cannot be written."""
        if policy_version in self._saved:
            return
        for leftover in self._directory.glob(".step-*.partial"):  # a run was killed while it wrote them
            await self._forget(leftover)
        path = self._path(policy_version)
        # The files reach the ranks through the file system: the state of control grows with the number of waiting
        # prompts, and a message has a limit.
        digests = await to_thread.run_sync(_stage, path, sidecar_files)
        order = SaveCheckpoint(
            directory=str(path),
            policy_version=policy_version,
            min_free_bytes=int(self._rules.min_free_gib * (1 << 30)),
            sidecar_digests=digests,
        )
        await self._trainer.save_checkpoint(order)
        await to_thread.run_sync(write_link, self._directory / LATEST, path.name)
        self._saved.add(policy_version)
        self._written = [version for version in self._written if version != policy_version] + [policy_version]
        await self._prune()
        for version in sorted(self._abandoned - {policy_version}):
            await self._forget(self._path(version))
        self._abandoned.clear()

    async def scored(self, policy_version: int, figures: MetricsMapping, limit: int) -> None:
        """Note the held-out score of a version, before or after it is saved. ``figures``: figures of an evaluation on
        ``limit`` prompts. Scores on another number of prompts are ignored, because they cannot be compared. The one at
        the end of a run, on all prompts, is not needed: its version is kept as the last one."""
        if limit != self._limit:
            return
        names = sorted(name for name in figures if name.startswith(self._prefix))
        score = figures[names[0]] if names else math.nan
        if not math.isnan(score):
            self._scores[policy_version] = score
            await self._prune()
            await to_thread.run_sync(_write_scores, self._directory / SCORES, json.encode(self._scores))

    async def _prune(self) -> None:
        rules = self._rules
        forgotten = to_forget(
            self._written, self._scores, keep=rules.keep, keep_best=rules.keep_best, keep_every=rules.keep_every
        )
        self._written = [version for version in self._written if version not in forgotten]
        self._saved -= forgotten
        self._changed(self._written)
        # A version newer than the newest checkpoint may still be saved.
        newest = self._written[-1] if self._written else -1
        self._scores = {
            version: score for version, score in self._scores.items() if version in self._written or version > newest
        }
        for version in sorted(forgotten):
            await self._forget(self._path(version))

    async def _forget(self, path: Path) -> None:
        await to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))

    def _path(self, policy_version: int) -> Path:
        return self._directory / f"step-{policy_version:06d}"


def _stage(path: Path, sidecar_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Write ``sidecar_files`` where the ranks pick them up, and return their digests."""
    try:
        return write_sidecar(path, sidecar_files)
    except OSError as error:
        raise StreamRLError(
            f"checkpoint {str(path)!r}: what control keeps cannot be written ({error}): make room, or mend the disk"
        ) from error


def _versions_in(directory: Path) -> list[int]:
    """Return the versions of all checkpoints in ``directory``, lowest first."""
    numbers = [path.name.removeprefix("step-") for path in directory.glob("step-*") if path.is_dir()]
    return sorted(int(number) for number in numbers if number.isdecimal())


def _latest_of(directory: Path, versions: Sequence[int], *, otherwise: int) -> int:
    """Return the version that ``latest`` names; ``otherwise`` where that is none of ``versions``."""
    name = (directory / LATEST).resolve().name
    return next((version for version in versions if f"step-{version:06d}" == name), otherwise)


def read_scores(path: Path) -> dict[int, float]:
    """Read the held-out scores by version; empty where there is no file. Raises ``StreamRLError`` for another file."""
    if not path.exists():
        return {}
    try:
        return json.decode(path.read_bytes(), type=dict[int, float])
    except UNDECODABLE as error:
        raise StreamRLError(
            f"{path} is not a list of scores ({error}): remove it, and the best are forgotten"
        ) from error


def _write_scores(path: Path, encoded: bytes) -> None:
    make_directory(path.parent)
    write_durable(path, encoded)
