"""``streamrl runs``: the runs of a directory, or several runs side by side, read from their files alone in the
command's own process. ``streamrl train --json`` prints its run as a ``ListedRun`` too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Struct
from rich.table import Table

from streamrl.base.errors import InputError
from streamrl.base.types import Metrics, Texts, TextsByName
from streamrl.cli.command import Argument, Command, print_json
from streamrl.observe.run_files.run_reader import SCORE, RunFiles, RunStatus, run_files, runs_in, set_size
from streamrl.observe.terminal.console import wide_console
from streamrl.recipe.remote_names import hub_name
from streamrl.recipe.toml_text import toml_value

RUNS = Path("runs")
_COMPARED = ("reward/mean", "reward/zero_std_ratio", "completion/length_mean", "time/step_s", "perf/train_tok_s")


class ListedRun(Struct, frozen=True, kw_only=True):
    """``state``: ``streamrl show`` says of a stopped run whether it was drained or killed; ``started``: local time;
    ``metrics``: values of the last step; ``scores``: values of the last evaluation; ``sizes``: numbers
    of their prompts; ``recipe``: values as TOML by key; ``problem``: reason for which the recipe is not known."""

    run: str
    directory: str
    started: str
    state: RunStatus
    step: int
    steps: int
    model: str
    tags: Texts
    metrics: Metrics
    scores: Metrics
    sizes: dict[str, float | None]
    recipe: TextsByName
    problem: str = ""


class Runs(Command, frozen=True):
    """List the runs of a directory (default: runs); or compare several: the keys in which their recipes differ, and
    their last figures side by side."""

    places: Annotated[
        Texts, Argument("a directory of runs, or runs to compare", metavar="DIR|RUN", positional=True)
    ] = ()

    def run(self) -> int:
        """Print the list or the comparison. Raises ``StreamRLError`` for a place that is no run."""
        places = [path if (path := RUNS / name).is_dir() else Path(name) for name in self.places] or [RUNS]
        if len(places) == 1 and not (places[0] / "recipe.toml").is_file():
            runs = [listed_run(run.directory) for run in runs_in(places[0])]
        else:
            runs = [listed_run(run_files(place).directory) for place in places]
        if not runs:
            raise InputError(f"{places[0]} has no runs: name a directory that has some, such as runs")
        rows = None
        if len(places) > 1:
            rows = _differences(runs)
        if self.json:
            print_json({"runs": runs, "compared": rows} if rows else runs)
            return 0
        console = wide_console()
        columns = ["run", "started", "state", "step", "reward", "held-out", "model", "tags"]
        console.print(_table(columns, map(_cells, runs)))
        for run in runs:
            if run.problem:
                console.print(f"{run.run}: {run.problem}", soft_wrap=True)
        if rows:
            differences = ((name, *row) for name, row in rows.items())
            console.print("", _table(("", *(run.run for run in runs)), differences))
        return 0


def listed_run(directory: Path) -> ListedRun:
    """Return what is known of the run in ``directory``, also without a readable recipe."""
    run = RunFiles(directory)
    last = {line.kind: line for line in run.metric_lines()}
    recipe = run.recipe()
    problem = run.recipe_problem()
    step = last.get("step")
    evaluation = last.get("evaluation")
    model = ""
    tags = ()
    if not problem:
        model = hub_name(recipe["model.path"]) or Path(recipe["model.path"]).name
        tags = tuple(recipe.get("run.tags", ()))
    started = ""
    if started_at := run.started():
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started_at))
    metrics = {}
    if step:
        metrics = step.values
    scores = {}
    sizes = {}
    if evaluation:
        scores = {name: value for name, value in evaluation.values.items() if SCORE.fullmatch(name)}
        sizes = {name: set_size(name, evaluation.values) for name in scores}
    return ListedRun(
        run=run.run_id,
        directory=str(directory.resolve()),
        started=started,
        state=run.state(step),
        step=step.step if step else 0,
        steps=run.steps(step) or 0,
        model=model,
        tags=tags,
        metrics=metrics,
        scores=scores,
        sizes=sizes,
        recipe={name: toml_value(value) for name, value in recipe.items()},
        problem=problem,
    )


def _differences(runs: Sequence[ListedRun]) -> dict[str, list[str]]:
    """Return the rows that differ between ``runs``, by recipe key or name of the figure."""
    tables = [
        run.recipe
        | {"step": str(run.step)}
        | {name: _number(value) for name, value in run.metrics.items() if name in _COMPARED}
        | {_score_name(run, name, runs): _number(value) for name, value in run.scores.items()}
        for run in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name, "") for table in tables] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _score_name(run: ListedRun, name: str, runs: Sequence[ListedRun]) -> str:
    """Return the name of the row of a score: with size and source of its set where those of ``runs`` differ, since such
    scores are not comparable."""
    sets = {(other.sizes[name], _source(other, name)) for other in runs if name in other.sizes}
    if len(sets) == 1:
        return name
    return f"{name} ({run.sizes[name] or 0:g} prompts of {_source(run, name)})"


def _source(run: ListedRun, name: str) -> str:
    """Return the source of the held-out set of a score, as the recipe writes it; of several sets as of one."""
    held_out_set = name.split("/")[1]
    keys = ("evaluation.prompts", f"evaluation.prompts.{held_out_set}", f"evaluation.prompts.{held_out_set}.prompts")
    return "".join(run.recipe.get(key, "") for key in keys)


def _cells(run: ListedRun) -> Sequence[str]:
    reward = run.metrics.get("reward/mean")
    held_out = ""
    for name, value in list(run.scores.items())[:1]:
        held_out = _number(value)
        if size := run.sizes[name]:
            held_out += f" of {size:g}"
    step = f"{run.step}/{run.steps}"
    return (run.run, run.started, run.state, step, _number(reward), held_out, run.model, ", ".join(run.tags))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}"


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*row)
    return table
