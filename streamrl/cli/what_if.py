"""``streamrl what-if``: the kind of rounds with the highest goodput under a budget of staleness and bias. Run by
``main`` in the command's own process, which simulates every candidate itself; no engine or trainer is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from msgspec import to_builtins
from rich.table import Table

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonObject
from streamrl.cli.command import Argument, Overrides, print_json, recipe_file
from streamrl.cli.simulate import DEFAULT_FLEET, InVirtualTime, Row, hosts_sentence, results_table
from streamrl.observe.terminal.console import wide_console
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.simulate.fleet import FleetModel, differences
from streamrl.simulate.recording import TRACE_FILE
from streamrl.simulate.what_if import Advice, Budget, Search, TriedRecipe, World, recipe_fragment

STEPS = 90
"""Whole cycles of races at 1.125, 1.25 and 1.5 (9, 5 and 3 rounds): a part of a cycle would bias the figures of a race.
"""

SHOWN = 20
"""Candidates in the table, the best first."""

_COLUMNS = {
    "tok/s": "{figures.goodput:.0f}",
    "speed": "{speed:.2f}",
    "groups/s": "{figures.groups_s:.3g}",
    "step s": "{figures.step_s:.3g}",
    "push": "{figures.push_share:.0%}",
    "length": "{figures.length_share:.2f}",
    "wasted": "{figures.wasted_share:.0%}",
    "bubble": "{figures.rollout_bubble:.2f}",
    "sampling s": "{figures.sampling_s:.3g}",
    "environment s": "{figures.environment_s:.3g}",
    "stale": "{figures.staleness}",
    "wait": "{figures.wait}",
    "steps/grad": "{steps_a_gradient}",
}
"""Format of each column of figures; its cell is empty for a candidate without figures."""


class WhatIf(InVirtualTime, frozen=True, kw_only=True):
    """Search policies of rounds and their constants in virtual time, and print the recommended recipe."""

    subject: Annotated[
        Path, Argument("the directory of a recorded run, or a recipe", metavar="RUN|RECIPE", positional=True)
    ]
    overrides: Overrides = ()
    max_staleness: Annotated[
        int | None, Argument("oldest trained token, in steps (default: that of the recipe)", metavar="S")
    ] = None
    min_length_share: Annotated[
        float, Argument("mean trained length over the unbiased one, at least (default 0.9)", metavar="X")
    ] = 0.9
    steps: Annotated[int, Argument(f"steps that count, a candidate (default {STEPS})", metavar="N")] = STEPS

    def run(self) -> int:
        """Search, and print the recommended recipe with its figures (or JSON). Raises ``StreamRLError``."""
        of_trace = self.subject.name == TRACE_FILE
        recipe = load_recipe(recipe_file(self.subject.parent if of_trace else self.subject), self.overrides)
        stale = recipe.rollout.max_staleness if self.max_staleness is None else self.max_staleness
        share = self.min_length_share
        if stale < 0 or not 0 <= share <= 1:
            raise RecipeError(f"--max-staleness {stale} --min-length-share {share:g}: at least 0, and between 0 and 1")
        budget = Budget(max_staleness=stale, min_length_share=share)
        trace = self.subject if of_trace or (self.subject / TRACE_FILE).is_file() else None
        name, world, notes = self.world(trace)
        if trace is None and not self.fleet:
            notes.append(f"no recorded run and no --fleet: the built-in fleet {DEFAULT_FLEET!r} is used")
        notes += differences(recipe, world.model, world.lengths(self.seed).cap)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        advice = _search(world, budget, recipe)
        if self.json:
            print_json(_as_json(advice, name, budget, notes, world))
        else:
            _print_advice(advice, name, world.model, budget, self)
        return 0


def _search(world: World, budget: Budget, recipe: Recipe) -> Advice:
    with StdoutReporter(sys.stderr) as screen:

        def progress(name: str, finished_count: int, pending_count: int) -> None:
            screen.progress(f"simulating {name}", finished_count, finished_count + pending_count)

        return Search(world, budget, progress).run(recipe)


def _print_advice(advice: Advice, fleet: str, model: FleetModel, budget: Budget, question: WhatIf) -> None:
    wide = wide_console()
    heading = (
        f"simulated on fleet {fleet}, {question.steps} steps a candidate; budget: tokens at most "
        f"{budget.max_staleness} steps old, trained length at least {budget.min_length_share:g} of the unbiased one"
    )
    if hosts := hosts_sentence(model):
        heading += f"; {hosts}"
    print(heading)
    candidates = list(advice.tried[:SHOWN])
    if advice.current not in candidates:
        candidates.append(advice.current)
    wide.print(advice_table(candidates, advice))
    for candidate in advice.tried:
        if candidate.problem and candidate not in candidates:
            wide.print(f"left out: {candidate.name}: {candidate.problem}")
    fragment = recipe_fragment(advice.recommended.recipe, advice.current.recipe)
    if not fragment:
        print("\nthe recipe as it is is the best of these; nothing to change")
        return
    gain = advice.recommended.unknown or f"{advice.gain:+.1%} trained tokens a second (predicted)"
    print(f"\n# recommended: {advice.recommended.name}, {gain}")
    if (shared := advice.recommended.steps_a_gradient) > 1:
        print(f"# a long round is {shared} optimizer steps along one gradient")
    print(fragment)


def advice_table(candidates: list[TriedRecipe], advice: Advice) -> Table:
    """One row a candidate; speeds are relative to the unchanged recipe. "steps/grad": steps along one gradient;
    "push": share of a step."""
    current = advice.current.figures
    columns = dict(_COLUMNS)
    if current is None:
        columns["speed"] = ""
    if current is None or not current.environment_s:
        del columns["sampling s"], columns["environment s"]

    def row(candidate: TriedRecipe) -> Row:
        yield "rounds", candidate.name
        figures = candidate.figures
        for column, form in columns.items():
            cell = ""
            if figures is not None:
                speed = figures.goodput / current.goodput if current else None
                cell = form.format(figures=figures, speed=speed, steps_a_gradient=candidate.steps_a_gradient)
            yield column, cell
        notes = []
        if candidate is advice.recommended:
            notes.append("recommended")
        if candidate.problem:
            notes.append(candidate.problem)
        if candidate.unknown:
            notes.append("cannot know")
        yield "", "; ".join(notes)

    return results_table("", map(row, candidates))


def _as_json(advice: Advice, fleet: str, budget: Budget, notes: list[str], world: World) -> JsonObject:
    def row(candidate: TriedRecipe) -> JsonObject:
        return {
            "name": candidate.name,
            "figures": to_builtins(candidate.figures),
            "problem": candidate.problem,
            "unknown": candidate.unknown,
            "steps_a_gradient": candidate.steps_a_gradient,
            "recipe": recipe_fragment(candidate.recipe, advice.current.recipe),
        }

    return {
        "fleet": fleet,
        "budget": to_builtins(budget),
        "notes": notes,
        "mismatch": world.agreement.mismatch if world.agreement else None,
        "recommended": row(advice.recommended),
        "gain": None if advice.recommended.unknown else advice.gain,
        "current": row(advice.current),
        "tried": [row(candidate) for candidate in advice.tried],
    }
