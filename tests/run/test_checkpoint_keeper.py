"""Which checkpoints a run keeps: the rule against its definition, and the keeper on a real directory."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import anyio
import pytest
from builders.files import SORT_RECIPE as DEMO
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.atomic_files import sidecar_folder, take_sidecar, write_link, write_sidecar
from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CheckpointSaved, SaveCheckpoint, TrainingOrder
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.wire import WireCodec, WireLimits
from streamrl.control.settings import control_settings
from streamrl.learning.state.durable_files import files_below, flush_and_digest, newest_checkpoint, write_digests
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Checkpoint
from streamrl.run.checkpoints import SCORES as SCORES_FILE
from streamrl.run.checkpoints import CheckpointKeeper, read_scores, to_forget
from streamrl.run.trainer_ranks import TrainerRanks

VERSIONS = st.lists(st.integers(0, 40), unique=True, max_size=12)
SCORES = st.dictionaries(st.integers(0, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=12)
GIB = 1 << 30


@given(VERSIONS, SCORES, st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_a_version_is_forgotten_when_enough_are_newer_and_better(
    written: list[int], scores: dict[int, float], keep: int, keep_best: int, keep_every: int
) -> None:
    forgotten = to_forget(written, scores, keep=keep, keep_best=keep_best, keep_every=keep_every)
    assert forgotten <= set(written)
    for position, version in enumerate(written):
        newer = len(written) - position - 1
        better = sum((scores[o], o) > (scores[version], version) for o in written if o in scores and version in scores)
        lasts = newer < keep
        is_best = version in scores and better < keep_best
        is_permanent = keep_every > 0 and version % keep_every == 0
        assert (version in forgotten) != (lasts or is_best or is_permanent)


class Ranks:
    """Writes directories as ranks would; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    async def save_checkpoint(self, order: SaveCheckpoint) -> None:
        directory = Path(order.directory)
        self.asked.append((directory.name, order.policy_version, order.min_free_bytes))
        write_anew(directory)
        take_sidecar(directory, directory, order.sidecar_digests)


def write_anew(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def keeper_of(
    directory: Path, ranks: Ranks | None = None, limit: int = 0, held: int = 0, **rules: float
) -> CheckpointKeeper:
    class Keeper(CheckpointKeeper):
        async def _forget(self, path: Path) -> None:
            assert (directory / "latest").resolve() != path
            shutil.rmtree(path)

    return Keeper(
        ranks or Ranks(),  # type: ignore[arg-type]
        directory,
        Checkpoint(**rules),  # type: ignore[arg-type]
        limit=limit,
        held_version=held,
    )


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def test_last_best_and_permanent_checkpoints_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        ranks = Ranks()
        keeper = keeper_of(tmp_path / "c", ranks, keep=1, keep_best=1, keep_every=10, min_free_gib=0.5)
        scores = {2: 0.1, 4: 0.9, 6: 0.5, 8: math.nan, 10: 0.3, 12: 0.2}
        for version in range(2, 14, 2):
            if version == 6:  # its evaluation ended before it was saved
                await keeper.scored(6, {"eval/held_out/avg@4": 0.5, "eval/held_out/pass@4": 1.0}, 0)
            await keeper.save(version, {})
            assert (tmp_path / "c" / "latest").readlink() == Path(f"step-{version:06d}")
            if version != 6:
                figures = {"eval/held_out/pass@1": 2.0, "eval/held_out/avg@1": scores[version]}
                await keeper.scored(version, figures, 0)
        assert steps_in(tmp_path / "c") == [4, 10, 12]
        await keeper.save(12, {})
        assert [version for _, version, _ in ranks.asked] == [2, 4, 6, 8, 10, 12]  # each once
        assert ranks.asked[0] == ("step-000002", 2, GIB // 2)

        # A later life of the run in the same directory knows the best of the earlier one.
        later = keeper_of(tmp_path / "c", held=12, keep=1, keep_best=1)
        await later.save(14, {})
        await later.scored(14, {"eval/held_out/avg@1": 0.8}, 0)
        assert steps_in(tmp_path / "c") == [4, 14]
        await later.save(16, {})
        await later.scored(16, {"eval/held_out/avg@1": 0.95}, 0)
        assert steps_in(tmp_path / "c") == [16]

    anyio.run(scenario)


def test_scores_on_other_prompts_are_no_rivals(tmp_path: Path) -> None:
    """On the first 8 prompts while it trains, on all at the end: the latter are harder, or easier."""

    async def scenario(last: float, kept: list[int]) -> None:
        directory = tmp_path / str(last)
        keeper = keeper_of(directory, limit=8, keep=1, keep_best=1)
        for version, score in ((1, 0.4), (2, 0.6), (3, 0.5)):
            await keeper.save(version, {})
            await keeper.scored(version, {"eval/held_out/avg@1": score}, 8)
        await keeper.save(4, {})
        await keeper.scored(4, {"eval/held_out/avg@1": last}, 0)
        await keeper.scored(2, {"eval/held_out/avg@1": 0.0}, 0)  # a version may be evaluated on both
        assert steps_in(directory) == kept
        await keeper.save(5, {})  # a run that is made longer
        assert steps_in(directory) == [2, 5]

    for last in (0.9, 0.1):
        anyio.run(scenario, last, [2, 4])


def test_a_keeper_knows_of_no_more_versions_than_there_are(tmp_path: Path) -> None:
    async def scenario() -> None:
        keeper = keeper_of(tmp_path, keep=2, keep_best=1)
        for version in range(1, 30):
            await keeper.scored(version, {"eval/held_out/avg@1": -float(version)}, 0)
            await keeper.save(version, {})
        assert steps_in(tmp_path) == [1, 28, 29] == sorted(keeper._saved)
        assert read_scores(tmp_path / SCORES_FILE).keys() <= {1, 27, 28, 29}

    anyio.run(scenario)


def test_a_run_that_goes_back_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    """A run that goes back keeps its new checkpoints and not those of the future that it left. Resumed from version 4
    where 8 was the last: what is written now is newest, whatever its number."""
    for name in ("step-000004", "step-000006", "step-000008", ".step-000010.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000006" / "old").touch()
    (tmp_path / "latest").symlink_to("step-000004")
    ranks = Ranks()

    async def scenario() -> None:
        keeper = keeper_of(tmp_path, ranks, held=4, keep=2)
        await keeper.begin()
        await keeper.save(6, {})
        assert not (tmp_path / "step-000006" / "old").exists()  # the abandoned version was written again
        assert steps_in(tmp_path) == [4, 6]
        await keeper.save(7, {})
        assert steps_in(tmp_path) == [6, 7]

    anyio.run(scenario)
    assert not (tmp_path / ".step-000010.partial").exists()
    assert (tmp_path / "latest").resolve().name == "step-000007"


def written_by(directory: Path, *versions: int) -> None:
    """Whole checkpoints of an earlier life, listed with digests."""
    for version in versions:
        step = directory / f"step-{version:06d}"
        step.mkdir(parents=True)
        (step / "weights").write_bytes(bytes([version]) * 100)
        write_digests(step, [flush_and_digest(step, files_below(step))])
        write_link(directory / "latest", step.name)


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("lives", [1, 2])
def test_a_damaged_checkpoint_does_not_count_as_one_that_is_kept(tmp_path: Path, rewritten: bool, lives: int) -> None:
    """Version 20 was damaged, and the ranks began from 10 again. ``lives``: the controller dies once more, alone, when
    they are at 25 already."""
    directory = tmp_path / "checkpoints"
    written_by(directory, 10, 20)
    (directory / "step-000020" / "weights").write_bytes(b"rot")
    begun = newest_checkpoint(tmp_path)
    assert begun is not None and begun.name == "step-000010"

    class WritesDigests(Ranks):
        async def save_checkpoint(self, order: SaveCheckpoint) -> None:
            directory = Path(order.directory)
            assert steps_in(directory.parent) == [10, 20], "nothing goes before the next one is there"
            write_anew(directory)
            (directory / "weights").write_bytes(b"new")
            write_digests(directory, [flush_and_digest(directory, ["weights"])])

    async def scenario(version: int) -> None:
        for held in (10, 25)[:lives]:
            keeper = keeper_of(directory, WritesDigests(), held=held, keep=2, keep_best=1, keep_every=20)
            await keeper.begin()
            await keeper.scored(20, {"eval/held_out/avg@1": 1.0}, 0)
            assert steps_in(directory) == [10, 20] and (directory / "latest").readlink() == Path("step-000010")
        await keeper.save(version, {})

    version = 20 if rewritten else 30
    anyio.run(scenario, version)
    assert steps_in(directory) == [10, version]
    for damaged in (version, 10):
        assert newest_checkpoint(tmp_path) == directory / f"step-{damaged:06d}"
        (directory / f"step-{damaged:06d}" / "weights").write_bytes(b"rot")


def test_uncommitted_rank_state_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    """State that ranks hold beyond the last checkpoint leaves that checkpoint the last one. The controller died
    alone."""
    written_by(tmp_path, 2, 4)

    async def scenario() -> None:
        keeper = keeper_of(tmp_path, held=5, keep=2)
        await keeper.begin()
        assert (tmp_path / "latest").readlink() == Path("step-000004")
        await keeper.save(6, {})
        assert steps_in(tmp_path) == [4, 6]

    anyio.run(scenario)


def test_a_failed_save_moves_and_removes_nothing(tmp_path: Path) -> None:
    class FullDisk(Ranks):
        async def save_checkpoint(self, order: SaveCheckpoint) -> None:
            raise OSError("disk full")

    async def scenario() -> None:
        await keeper_of(tmp_path, keep=1).save(1, {})
        with pytest.raises(OSError, match="disk full"):
            await keeper_of(tmp_path, FullDisk(), held=1, keep=1).save(2, {})

    anyio.run(scenario)
    assert steps_in(tmp_path) == [1]
    assert (tmp_path / "latest").readlink() == Path("step-000001")


async def test_large_control_state_reaches_a_checkpoint(tmp_path: Path) -> None:
    """The state of control reaches a checkpoint, whatever its size. Waiting prompts of more bytes than a message may
    have; and what was left by a kill goes."""
    waiting = b"prompts " * (WireLimits().body_bytes // 8 + 1)
    left = tmp_path / ".step-000002.beside.partial"
    left.mkdir()
    (left / "control.msgpack").write_bytes(b"of an earlier life")
    orders, ordered = memory_stream(4)
    answers, events = memory_stream(4)
    ranks = TrainerRanks([(orders, events)])

    async def rank() -> None:
        order = await ordered.receive()
        assert isinstance(order, SaveCheckpoint)
        WireCodec[TrainingOrder](TrainingOrder).encode(order)
        write_anew(Path(order.directory))
        take_sidecar(Path(order.directory), Path(order.directory), order.sidecar_digests)
        await answers.send(CheckpointSaved(rank=0, directory=order.directory, policy_version=3, seconds=0.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ranks.run)
        tasks.start_soon(rank)
        await keeper_of(tmp_path, ranks).save(3, {"control.msgpack": waiting, "rewards.msgpack": b"small"})
        tasks.cancel_scope.cancel()
    assert (tmp_path / "step-000003" / "control.msgpack").read_bytes() == waiting
    assert (tmp_path / "step-000003" / "rewards.msgpack").read_bytes() == b"small"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-000003"]


def test_sidecars_are_files_of_the_controller(tmp_path: Path) -> None:
    """The files beside a checkpoint are those that the controller wrote."""
    directory, into = tmp_path / "step-000003", tmp_path / ".step-000003.partial"
    into.mkdir()
    digests = write_sidecar(directory, {"control.msgpack": b"kept"})
    (sidecar_folder(directory) / "control.msgpack").write_bytes(b"torn")
    with pytest.raises(StreamRLError, match=r"control\.msgpack differs from what the controller wrote"):
        take_sidecar(directory, into, digests)
    write_sidecar(directory, {"rewards.msgpack": b"what another call left does not stay"})
    with pytest.raises(StreamRLError, match="is not there, where the controller wrote it"):
        take_sidecar(directory, into, digests)
    assert list(into.iterdir()) == []


def test_a_disk_that_cannot_take_what_control_keeps_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()  # as root may write anywhere, no permission forbids it

    async def scenario() -> None:
        with pytest.raises(StreamRLError, match=r"what control keeps cannot be written .*make room"):
            await keeper_of(tmp_path / "checkpoints").save(1, {"control.msgpack": b"kept"})

    anyio.run(scenario)


@pytest.mark.parametrize(
    ("changes", "every"),
    [
        ([], 100),
        (["run.advanced.restarts=0"], 100),  # a journal is compacted at checkpoints, whichever process is started again
        (["run.journal='none'"], 0),
        (["run.advanced.restarts=0", "checkpoint.every=7"], 7),
    ],
)
def test_a_journal_never_grows_for_the_whole_run(changes: list[str], every: int) -> None:
    assert control_settings(load_recipe(DEMO, ["checkpoint.every=0", *changes])).checkpoint_every == every
