"""The record of a run: the state of control and, where the recipe has one, the journal with the run's earlier lives.

``run_controller`` opens it in the controller's process; ``pipeline`` calls ``refuse_lost_journal`` before a resume."""

from __future__ import annotations

from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.control.machine import Control, fork
from streamrl.control.policies.deterministic import check_order
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import Snapshot
from streamrl.control.settings import ControlSettings
from streamrl.launch.run_directory import NOT_RESUMED
from streamrl.learning.state.durable_files import newest_checkpoint, surviving_directory
from streamrl.recipe.sections import JournalKind, Recipe
from streamrl.recipe.topology import JOURNAL_DIRECTORY
from streamrl.run.checkpoints import read_fork_point
from streamrl.run.controller import RunRecord
from streamrl.run.journal.journal_file import JournalFile
from streamrl.run.journal.log_errors import JournalRefused, another_run
from streamrl.run.journal.recover import RecoveredRun, recovered_run
from streamrl.run.journal.run_journal import RunJournal

METRICS = "metrics.jsonl"


class JournalledRun(RunRecord, frozen=True, kw_only=True):
    """The record of a run. ``file``: file of its journal, or None; ``recovered``: state from an earlier life, or
    None."""

    journal: RunJournal
    file: JournalFile | None = None
    recovered: RecoveredRun | None = None

    async def run(self) -> None:
        """Write the journal until cancelled. Raises ``JournalFailed``."""
        if self.file is not None:
            await self.file.run()

    async def aclose(self) -> None:
        """Write waiting records, and close the files. Raises ``JournalFailed``."""
        if self.file is not None:
            await self.file.close()


def open_record(recipe: Recipe, settings: ControlSettings, run_directory: Path, start_version: int) -> JournalledRun:
    """Open the record of a new or resumed run. ``start_version``: version of the weights on the trainer ranks.
    Blocking. Raises ``StreamRLError`` where the journal is damaged, in use, of another run, or missing in a run with
    checkpoints."""
    file, recovered = _open_journal(recipe, settings, run_directory, start_version)
    store = TrajectoryStore() if recovered is None else recovered.store
    store.imitates_observations = recipe.environment.learn_observations > 0
    journal = RunJournal(file, store, recovered)
    if recovered is not None:
        return JournalledRun(
            control=recovered.control, store=store, journal=journal, resumed=True, file=file, recovered=recovered
        )
    resumed = recipe.checkpoint.resume_from
    point = read_fork_point(surviving_directory(Path(resumed))) if resumed else None
    control = make_control(settings, fork(point.control, settings) if point else None)
    if point is None:
        control.state.prompts.drawn = start_version * recipe.rollout.prompts_per_batch
    else:
        store.add_prompts(point.prompts)
    return JournalledRun(control=control, store=store, journal=journal, file=file)


def _open_journal(
    recipe: Recipe, settings: ControlSettings, run_directory: Path, start_version: int
) -> tuple[JournalFile | None, RecoveredRun | None]:
    if recipe.run.journal is JournalKind.NONE:
        return None, None
    file = JournalFile(run_directory / JOURNAL_DIRECTORY, fsync=recipe.run.journal is JournalKind.FSYNC)

    def restore(snapshot: Snapshot) -> Control:
        check_order(snapshot, deterministic=settings.deterministic)
        return make_control(settings, snapshot)

    try:
        recovered = recovered_run(file.initial_content, restore, start_version)
        if recovered is None and _has_checkpoints(run_directory):  # a power cut may lose a journal without fsync
            raise JournalRefused(_without_journal(run_directory))
    except BaseException:
        file.release()
        raise
    return file, recovered


def refuse_lost_journal(run_directory: Path) -> None:
    """Raise ``RecipeError`` where a run that has begun has no journal any more: ranks would begin from a checkpoint and
    control from the start, and the logs would be overwritten. Blocking."""
    metrics = run_directory / METRICS
    began = (metrics.exists() and metrics.stat().st_size > 0) or _has_checkpoints(run_directory)
    if began and not any((run_directory / JOURNAL_DIRECTORY).glob("*.journal")):
        raise RecipeError(_without_journal(run_directory), outcome=NOT_RESUMED)


def _has_checkpoints(run_directory: Path) -> bool:
    return any((run_directory / "checkpoints").glob("step-*"))


def _without_journal(run_directory: Path) -> str:
    newest = newest_checkpoint(run_directory)
    place = "its newest checkpoint" if newest is not None else "the beginning: no checkpoint of it is whole"
    return (
        f"{run_directory / JOURNAL_DIRECTORY} holds nothing of this run, which cannot go on without: bring it back, or "
        f"begin another run from {place}: {another_run(run_directory, newest)}"
    )
