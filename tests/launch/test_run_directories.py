"""The directory of a run: who makes it, who holds it, and what must be in it so that the run can go on."""

from __future__ import annotations

import shlex
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
from builders.files import SORT_RECIPE as DEMO

from streamrl.base.errors import RecipeError
from streamrl.control.settings import control_settings
from streamrl.launch.pipeline import Pipeline, _make_run_directory
from streamrl.launch.run_directory import lock_run, write_inputs
from streamrl.launch.run_record import METRICS, open_record, refuse_lost_journal
from streamrl.learning.state.durable_files import flush_and_digest, write_digests
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.run.journal.journal_file import JournalFile
from streamrl.run.journal.log_errors import JournalRefused

AT_ONCE = 8


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(DEMO, [f"run.directory={tmp_path / 'the runs'}"])


@pytest.fixture
def run(recipe: Recipe) -> Path:
    directory = Path(recipe.run.directory) / "sort-1"
    directory.mkdir(parents=True)
    write_inputs(directory, recipe)
    (directory / "recipe.toml").write_text(dump_recipe(recipe))
    return directory


def save(run: Path, version: int, *, damaged: bool = False) -> Path:
    checkpoint = run / "checkpoints" / f"step-{version:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.msgpack").write_bytes(b"state")
    write_digests(checkpoint, [flush_and_digest(checkpoint, ["trainer.msgpack"])])
    if damaged:
        (checkpoint / "trainer.msgpack").write_bytes(b"torn")
    return checkpoint


def test_simultaneous_runs_have_a_directory_each(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that begin at the same moment have one directory each."""
    monkeypatch.setattr("streamrl.launch.pipeline.time.strftime", lambda _: "20261122-031500")
    parent, together = Path(recipe.run.directory), threading.Barrier(AT_ONCE)

    def begin(_: int) -> Path:
        together.wait()
        return _make_run_directory(recipe, None)

    for _ in range(5):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            made = list(pool.map(begin, range(AT_ONCE)))
        first = parent / "sort-20261122-031500"
        assert sorted(made) == sorted([first, *(first.with_name(f"{first.name}-{n}") for n in range(2, AT_ONCE + 1))])
        assert all((directory / "recipe.toml").is_file() for directory in made)
        assert (parent / "latest").resolve() in made
        assert sorted(parent.iterdir()) == sorted([*made, parent / "latest"]), "nothing half-written"
        shutil.rmtree(parent)


async def test_a_run_that_was_refused_is_not_held(run: Path) -> None:
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace("steps = ", "steps = 1", 1))
    for _ in range(2):  # in one process, as in a notebook
        with pytest.raises(RecipeError, match="steps was"):
            async with Pipeline.of_run(run):
                raise AssertionError("it was entered")
    lock = lock_run(run)
    with pytest.raises(RecipeError, match="runs already"):
        async with Pipeline.of_run(run, despite_changes=True):
            raise AssertionError("it was entered")
    with pytest.raises(RecipeError, match="runs already"):
        lock_run(run)
    lock.close()


def test_a_run_without_a_journal_is_not_begun_again(run: Path) -> None:
    """A run without its journal is not begun over its own files."""
    refuse_lost_journal(run)  # it was killed before it had begun: nothing is lost
    (run / METRICS).write_text("what happened\n")
    checkpoints = run / "checkpoints"
    for saved, damaged, newest in ((None, False, None), (2, False, 2), (10, False, 10), (30, True, 10)):
        if saved is not None:
            save(run, saved, damaged=damaged)
        with pytest.raises(RecipeError, match="journal holds nothing of this run") as refused:
            refuse_lost_journal(run)
        assert refused.value.outcome == "the run was not resumed"
        begin = ["streamrl", "train", str(run / "recipe.toml")]
        if newest is not None:
            begin += ["--set", f"checkpoint.resume_from={checkpoints / f'step-{newest:06d}'}"]
        [problem] = refused.value.problems
        assert shlex.split(problem)[-len(begin) :] == begin
    (run / "journal").mkdir()
    (run / "journal" / "000001.journal").touch()
    refuse_lost_journal(run)  # whether it can be read is for the controller to say


async def test_control_does_not_begin_anew_beside_checkpoints(recipe: Recipe, run: Path) -> None:
    """The segment with the base may be gone after a power cut, where nothing is flushed."""
    checkpoint, settings = save(run, 10), control_settings(recipe)
    (run / METRICS).write_text("what happened\n")
    await (await anyio.to_thread.run_sync(JournalFile, run / "journal")).close()
    with pytest.raises(JournalRefused, match=f"checkpoint.resume_from={checkpoint}"):
        open_record(recipe, settings, run, 10)
    assert (run / METRICS).read_text() == "what happened\n"
