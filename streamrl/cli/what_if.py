"""``streamrl what-if``: which rounds would bring most, under a budget of staleness and bias."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.base.errors import RecipeError
from streamrl.cli.command import Argument, Overrides, print_json, recipe_file
from streamrl.cli.simulate import DEFAULT_CLUSTER, InVirtualTime, Row, hosts_sentence, results_table
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.simulate.cluster import ClusterModel, differences
from streamrl.simulate.recording import TRACE_FILE
from streamrl.simulate.what_if import Advice, Budget, Search, TriedRecipe, World, recipe_fragment

STEPS = 90
"""Whole cycles of races at 1.125, 1.25 and 1.5 (9, 5 and 3 rounds): a part of one would flatter a race, or wrong it."""

SHOWN = 20


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
        if trace is None and not self.cluster:
            notes.append(f"no recorded run and no --cluster: the built-in cluster {DEFAULT_CLUSTER!r} is used")
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
        return Search(
            world, budget, lambda name, done, ahead: screen.progress(f"simulating {name}", done, done + ahead)
        ).run(recipe)


def _print_advice(advice: Advice, cluster: str, model: ClusterModel, budget: Budget, question: WhatIf) -> None:
    wide = Console(width=None if sys.stdout.isatty() else 150)
    print(
        f"simulated on cluster {cluster}, {question.steps} steps a candidate; budget: tokens at most "
        f"{budget.max_staleness} steps old, trained length at least {budget.min_length_share:g} of the unbiased one"
        + (f"; {hosts}" if (hosts := hosts_sentence(model)) else "")
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
    gain = advice.recommended.unknown or f"{advice.gain:+.1%} trained tokens a second (predicted)"
    print(f"\n# recommended: {advice.recommended.name}, {gain}")
    if (shared := advice.recommended.steps_a_gradient) > 1:
        print(f"# a long round is {shared} optimizer steps along one gradient")
    print(fragment)


def advice_table(shown: list[TriedRecipe], advice: Advice) -> Table:
    """One row a candidate; speeds are against the recipe as it is. "steps/grad": steps along one gradient;
    "push": share of a step."""
    now = advice.current.figures

    def row(tried: TriedRecipe) -> Row:
        figures = tried.figures
        recommended = "recommended" if tried is advice.recommended else ""
        yield "rounds", tried.name
        yield "tok/s", f"{figures.goodput:.0f}" if figures else ""
        yield "speed", f"{figures.goodput / now.goodput:.2f}" if figures and now else ""
        yield "groups/s", f"{figures.groups_s:.3g}" if figures else ""
        yield "step s", f"{figures.step_s:.3g}" if figures else ""
        yield "push", f"{figures.push_share:.0%}" if figures else ""
        yield "length", f"{figures.length_share:.2f}" if figures else ""
        yield "wasted", f"{figures.wasted_share:.0%}" if figures else ""
        yield "bubble", f"{figures.rollout_bubble:.2f}" if figures else ""
        if now and now.environment_s:
            yield "sampling s", f"{figures.sampling_s:.3g}" if figures else ""
            yield "environment s", f"{figures.environment_s:.3g}" if figures else ""
        yield "stale", str(figures.staleness) if figures else ""
        yield "wait", str(figures.wait) if figures else ""
        yield "steps/grad", str(tried.steps_a_gradient) if figures else ""
        yield "", "; ".join(filter(None, (recommended, tried.problem, tried.unknown and "cannot know")))

    return results_table("", map(row, shown))


def _as_json(advice: Advice, cluster: str, budget: Budget, notes: list[str], world: World) -> dict[str, Any]:
    def row(tried: TriedRecipe) -> dict[str, Any]:
        fragment = recipe_fragment(tried.recipe, advice.current.recipe)
        figures = msgspec.to_builtins(tried.figures)
        fields = {"name": tried.name, "figures": figures, "problem": tried.problem, "unknown": tried.unknown}
        return fields | {"steps_a_gradient": tried.steps_a_gradient, "recipe": fragment}

    return {
        "cluster": cluster,
        "budget": msgspec.to_builtins(budget),
        "notes": notes,
        "mismatch": world.agreement.mismatch if world.agreement else None,
        "recommended": row(advice.recommended),
        "gain": None if advice.recommended.unknown else advice.gain,
        "current": row(advice.current),
        "tried": [row(tried) for tried in advice.tried],
    }
