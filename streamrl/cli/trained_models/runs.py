"""``streamrl runs``: the runs of a directory, or several runs side by side, read from their files alone in the
command's own process. ``streamrl train --json`` prints its run as a ``ListedRun`` too."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.base.errors import StreamRLError
from streamrl.cli.command import Argument, Command, print_json
from streamrl.observe.run_files.run_reader import SCORE, RunFiles, RunStatus, runs_in
from streamrl.recipe.remote_names import hub_name
from streamrl.recipe.toml_text import toml_value

RUNS = Path("runs")
_COMPARED = ("reward/mean", "reward/zero_std_ratio", "completion/length_mean", "time/step_s", "perf/train_tok_s")


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: ``streamrl show`` says of a stopped run whether it was drained or killed; ``started``: local time;
    ``metrics``: values of the last step; ``scores``: values of the last evaluation; ``recipe``: values as TOML by
    key."""

    run: str
    directory: str
    started: str
    state: RunStatus
    step: int
    steps: int
    model: str
    tags: tuple[str, ...]
    metrics: dict[str, float]
    scores: dict[str, float]
    recipe: dict[str, str]


class Runs(Command, frozen=True):
    """List the runs of a directory (default: runs); or compare several: the keys in which their recipes differ, and
    their last figures side by side."""

    places: Annotated[
        tuple[str, ...], Argument("a directory of runs, or runs to compare", metavar="DIR|RUN", positional=True)
    ] = ()

    def run(self) -> int:
        """Print the list or the comparison. Raises ``StreamRLError`` for a place that is no run."""
        places = [path if (path := RUNS / name).is_dir() else Path(name) for name in self.places] or [RUNS]
        if len(places) == 1 and not (places[0] / "recipe.toml").is_file():
            runs = [listed_run(run.directory) for run in runs_in(places[0])]
        else:
            runs = list(map(listed_run, places))
        if not runs:
            raise StreamRLError(f"{places[0]} has no runs: name a directory that has some, such as runs")
        rows = None
        if len(places) > 1:
            rows = _differences(runs)
        if self.json:
            print_json({"runs": runs, "compared": rows} if rows else runs)
            return 0
        console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
        columns = ["run", "started", "state", "step", "reward", "held-out", "model", "tags"]
        console.print(_table(columns, map(_cells, runs)))
        if rows:
            differences = ((name, *row) for name, row in rows.items())
            console.print("", _table(("", *(run.run for run in runs)), differences))
        return 0


def listed_run(directory: Path) -> ListedRun:
    """Return the run in ``directory``. Raises ``StreamRLError`` for a directory without a readable recipe of a run."""
    run = RunFiles(directory)
    last = {line.kind: line for line in run.metric_lines()}
    recipe = run.recipe()
    if not {"run.steps", "model.path"} <= recipe.keys():
        raise StreamRLError(
            f"{directory} is not the directory of a run (its recipe.toml cannot be read): name one, such as runs/latest"
        )
    step = last.get("step")
    evaluation = last.get("evaluation")
    model = recipe["model.path"]
    started = ""
    if started_at := run.started():
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_at))
    metrics: dict[str, float] = {}
    if step:
        metrics = step.values
    scores: dict[str, float] = {}
    if evaluation:
        scores = {name: value for name, value in evaluation.values.items() if SCORE.fullmatch(name)}
    return ListedRun(
        run=run.run_id,
        directory=str(directory.resolve()),
        started=started,
        state=run.state(step),
        step=step.step if step else 0,
        steps=run.steps(step) or 0,
        model=hub_name(model) or Path(model).name,
        tags=tuple(recipe.get("run.tags", ())),
        metrics=metrics,
        scores=scores,
        recipe={name: toml_value(value) for name, value in recipe.items()},
    )


def _differences(runs: Sequence[ListedRun]) -> dict[str, list[str]]:
    """Return the rows that differ between ``runs``, by recipe key or name of the figure."""
    tables = [
        run.recipe
        | {"step": str(run.step)}
        | {name: _number(value) for name, value in run.metrics.items() if name in _COMPARED}
        | {name: _number(value) for name, value in run.scores.items()}
        for run in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name, "") for table in tables] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _cells(run: ListedRun) -> Sequence[str]:
    reward = run.metrics.get("reward/mean")
    held_out = next(iter(run.scores.values()), None)
    step = f"{run.step}/{run.steps}"
    return (run.run, run.started, run.state, step, _number(reward), _number(held_out), run.model, ", ".join(run.tags))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table
