"""``streamrl what-if``: which rounds would bring most, under a budget of staleness and bias."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrl.base.errors import RecipeError
from streamrl.cli.command import Argument, AsJson, Command, Overrides, print_json, recipe_file
from streamrl.cli.simulate import DEFAULT_CLUSTER, Cluster, Seed, WarmUp, refuse_impossible_numbers, results_table
from streamrl.control.settings import control_settings
from streamrl.recipe.load import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.cluster import differences, load_cluster
from streamrl.simulate.lengths import LengthSource, ModelledLengths, RecordedLengths, capped
from streamrl.simulate.recording import TRACE_FILE, load_recording
from streamrl.simulate.what_if import Advice, Budget, Search, Tried, World, recipe_fragment

STEPS = 90
"""Whole cycles of races at 1.125, 1.25 and 1.5 (9, 5 and 3 rounds): a part of one would flatter a race, or wrong it."""

SHOWN = 6
PLAIN_PROGRESS_S = 10.0


class WhatIf(Command, frozen=True):
    """Search policies of rounds and their constants in virtual time, and print the recommended recipe."""

    subject: Annotated[
        Path, Argument("the directory of a recorded run, or a recipe", metavar="RUN|RECIPE", positional=True)
    ]
    overrides: Overrides = ()
    cluster: Cluster = ""
    max_staleness: Annotated[
        int | None, Argument("oldest trained token, in steps (default: that of the recipe)", metavar="S")
    ] = None
    min_length_share: Annotated[
        float, Argument("mean trained length over the unbiased one, at least (default 0.9)", metavar="X")
    ] = 0.9
    steps: Annotated[int, Argument(f"steps that count, a candidate (default {STEPS})", metavar="N")] = STEPS
    warm_up: WarmUp = 10
    seed: Seed = 0
    json: AsJson = False

    def run(self) -> int:
        """Search, and print the recommended recipe with its figures (or JSON). Raises ``StreamRLError``."""
        of_trace = self.subject.name == TRACE_FILE
        recipe = load_recipe(recipe_file(self.subject.parent if of_trace else self.subject), self.overrides)
        refuse_impossible_numbers(self.steps, self.warm_up, self.seed)
        stale = recipe.rollout.max_staleness if self.max_staleness is None else self.max_staleness
        try:
            budget = Budget(max_staleness=stale, min_length_share=self.min_length_share)
        except ValueError as error:
            raise RecipeError([str(error)]) from None
        name, world, warning = _world(self, recipe)
        if warning:
            print(f"note: {warning}", file=sys.stderr)
        advice = _search(world, budget, recipe)
        if self.json:
            print_json(_as_json(advice, name, budget, warning))
        else:
            _print_advice(advice, name, budget, self)
        return 0


def _world(question: WhatIf, recipe: Recipe) -> tuple[str, World, str]:
    """Name of the cluster, what to simulate in, and what makes the answer doubtful."""
    subject, cluster = question.subject, question.cluster
    recorded = (subject / TRACE_FILE).is_file() if subject.is_dir() else subject.name == TRACE_FILE
    run = None
    warning = ""
    if recorded:
        run = load_recording(subject)
        model = load_cluster(cluster) if cluster else calibrate(run, recipe).model
        cluster = cluster or f"of run {run.header.run_id}"
        if any(not line.finish_reason for line in run.trajectories):
            warning = (
                "the run stopped some completions before their end; they are taken to be as long as others that were "
                "longer: a record of synchronous rounds answers better"
            )
    else:
        warning = (
            "" if cluster else f"no recorded run and no --cluster: the built-in cluster {DEFAULT_CLUSTER!r} is used"
        )
        cluster = cluster or DEFAULT_CLUSTER
        model = load_cluster(cluster)

    def drawn(seed: int) -> LengthSource:
        return ModelledLengths(model.lengths, seed) if run is None else RecordedLengths(run, seed=seed)

    cap = model.lengths.cap if run is None else run.header.max_tokens
    warning = "; ".join(filter(None, (warning, *differences(recipe, model, cap))))
    world = World(
        model=model,
        settings=control_settings,
        steps=question.steps,
        warm_up=question.warm_up,
        seed=question.seed,
        lengths=lambda seed: capped(drawn(seed), recipe.sampling.max_tokens),
    )
    return cluster, world, warning


def _search(world: World, budget: Budget, recipe: Recipe) -> Advice:
    """With a bar on a terminal, otherwise with a line every few seconds, on standard error."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    last = time.monotonic()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("searching", total=None)

        def progress(name: str, done: int, ahead: int) -> None:
            nonlocal last
            bar.update(task, description=f"simulating {name}", completed=done, total=done + ahead)
            if not console.is_terminal and time.monotonic() - last >= PLAIN_PROGRESS_S:
                last = time.monotonic()
                print(f"{done} candidates simulated, now {name}", file=sys.stderr, flush=True)

        return Search(world, budget, progress).run(recipe)


def _print_advice(advice: Advice, cluster: str, budget: Budget, question: WhatIf) -> None:
    wide = Console(width=None if sys.stdout.isatty() else 150)
    print(
        f"simulated on cluster {cluster}, {question.steps} steps a candidate; budget: tokens at most "
        f"{budget.max_staleness} steps old, trained length at least {budget.min_length_share:g} of the unbiased one"
    )
    shown = list(advice.tried[:SHOWN])
    if advice.current not in shown:
        shown.append(advice.current)
    wide.print(advice_table(shown, advice))
    left_out = [tried for tried in advice.tried if tried.problem and tried not in shown]
    for tried in left_out:
        wide.print(f"left out: {tried.name}: {tried.problem}", markup=False, highlight=False)
    fragment = recipe_fragment(advice.recommended.recipe, advice.current.recipe)
    if not fragment:
        print("\nthe recipe as it is is the best of these; nothing to change")
        return
    print(f"\n# recommended: {advice.recommended.name}, {advice.gain:+.1%} trained tokens a second (predicted)")
    print(fragment)


def advice_table(shown: list[Tried], advice: Advice) -> Table:
    """One row a candidate; speeds are against the recipe as it is."""
    names = ("goodput tok/s", "speed", "groups/s", "step s", "length", "wasted", "bubble", "staleness", "wait", "")
    table = results_table("", ("rounds", *names))
    now = advice.current.figures
    for tried in shown:
        figures = tried.figures
        mark = "recommended" if tried is advice.recommended else tried.problem
        if figures is None:
            table.add_row(tried.name, *("",) * 9, mark)
            continue
        table.add_row(
            tried.name,
            f"{figures.goodput:.0f}",
            f"{figures.goodput / now.goodput:.2f}" if now else "",
            f"{figures.groups_s:.3g}",
            f"{figures.step_s:.3g}",
            f"{figures.length_share:.2f}",
            f"{figures.wasted_share:.0%}",
            f"{figures.rollout_bubble:.2f}",
            str(figures.staleness),
            str(figures.wait),
            mark,
        )
    return table


def _as_json(advice: Advice, cluster: str, budget: Budget, warning: str) -> dict[str, Any]:
    def row(tried: Tried) -> dict[str, Any]:
        fragment = recipe_fragment(tried.recipe, advice.current.recipe)
        figures = msgspec.to_builtins(tried.figures)
        return {"name": tried.name, "figures": figures, "problem": tried.problem, "recipe": fragment}

    return {
        "cluster": cluster,
        "budget": msgspec.to_builtins(budget),
        "note": warning,
        "recommended": row(advice.recommended),
        "gain": advice.gain,
        "current": row(advice.current),
        "tried": [row(tried) for tried in advice.tried],
    }
