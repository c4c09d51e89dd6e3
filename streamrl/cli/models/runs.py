"""``streamrl runs``: the runs of a directory, or several side by side, read from their files alone."""

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
from streamrl.observe.follow.run_files import SCORE, RunFiles, RunStatus, runs_in
from streamrl.recipe.rules.hub_names import hub_name
from streamrl.recipe.toml_text import toml_value

RUNS = Path("runs")
_COMPARED = ("reward/mean", "reward/zero_std_ratio", "completion/length_mean", "time/step_s", "perf/train_tok_s")


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: of one that was stopped ``streamrl show`` says whether it was drained or killed; ``started``: in local
    time; ``metrics``: of the last step; ``scores``: of the last evaluation; ``recipe``: its values as TOML, by path."""

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
        """Print it. Raises ``StreamRLError`` for what is no run."""
        places = [path if (path := RUNS / name).is_dir() else Path(name) for name in self.places] or [RUNS]
        if len(places) == 1 and not (places[0] / "recipe.toml").is_file():
            found = [listed_run(run.directory) for run in runs_in(places[0])]
        else:
            found = list(map(listed_run, places))
        if not found:
            raise StreamRLError(f"{places[0]} has no runs: name a directory that has some, such as runs")
        rows = _differences(found) if len(places) > 1 else {}
        if self.json:
            print_json({"runs": found, "compared": rows} if rows else found)
            return 0
        console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
        console.print(
            _table(["run", "started", "state", "step", "reward", "held-out", "model", "tags"], map(_cells, found))
        )
        if rows:
            console.print("", _table(("", *(one.run for one in found)), ((name, *row) for name, row in rows.items())))
        return 0


def listed_run(directory: Path) -> ListedRun:
    """The run in ``directory``. Raises ``StreamRLError`` where it is none, or where its recipe cannot be read."""
    run = RunFiles(directory)
    last = {line.kind: line for line in run.metric_lines()}
    recipe = run.recipe()
    if not {"run.steps", "model.path"} <= recipe.keys():
        raise StreamRLError(
            f"{directory} is not the directory of a run (its recipe.toml cannot be read): name one, such as runs/latest"
        )
    step = last.get("step")
    scored = last.get("evaluation")
    model = recipe["model.path"]
    started = run.started()
    return ListedRun(
        run=run.run_id,
        directory=str(directory.resolve()),
        started=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if started else "",
        state=run.state(step),
        step=step.step if step else 0,
        steps=run.steps(step) or 0,
        model=hub_name(model) or Path(model).name,
        tags=tuple(recipe.get("run.tags", ())),
        metrics=step.values if step else {},
        scores={name: value for name, value in (scored.values if scored else {}).items() if SCORE.fullmatch(name)},
        recipe={name: toml_value(value) for name, value in recipe.items()},
    )


def _differences(runs: Sequence[ListedRun]) -> dict[str, list[str]]:
    """Rows that are not equal in all of ``runs``, by key of the recipe and name of the figure, in their order."""
    tables = [
        one.recipe
        | {"step": str(one.step)}
        | {name: _number(value) for name, value in one.metrics.items() if name in _COMPARED}
        | {name: _number(value) for name, value in one.scores.items()}
        for one in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name, "") for table in tables] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _cells(one: ListedRun) -> Sequence[str]:
    reward = one.metrics.get("reward/mean")
    held_out = next(iter(one.scores.values()), None)
    step = f"{one.step}/{one.steps}"
    return (one.run, one.started, one.state, step, _number(reward), _number(held_out), one.model, ", ".join(one.tags))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table
