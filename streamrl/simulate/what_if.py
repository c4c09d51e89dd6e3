"""Search over round policies and constants, in virtual time.

First a grid over all kinds of rounds that the budget allows, then the neighbours of the best race, then submission in
advance; the best few and the recipe as it is are simulated once more with other lengths, and those figures decide. All
candidates see the same prompts and lengths, so that their differences are much smaller than their noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import msgspec
from msgspec.structs import replace

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.recipe.fields import ADVANCED, keys_of
from streamrl.recipe.rules.load import check_recipe
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    InFlight,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)
from streamrl.recipe.sections import EngineShape, Recipe, ReleaseKind
from streamrl.recipe.toml_text import toml_key, toml_value
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.lengths import LengthSource
from streamrl.simulate.recording import Agreement
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import simulate_recipe

OVERSAMPLING = (1.125, 1.25, 1.5)
COHORTS = (2, 4)
LONG_ROUNDS = (2, 4)
SIZES = (4, 8, 16)
CURRENT = "as it is"
PRESUBMITTED = "presubmitted"
LEAST_GAIN = 0.03
"""Of a recommendation that changes anything."""

CONFIRMED = 3
"""The best so many candidates are simulated again, with other lengths."""

_CHANGED = ("rollout", "tail_batching", "length_sorted", "engines")
_MOST_REFINEMENTS = 8
_FINEST_STEP = 1 / 32  # of the prompts of a batch


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a recommendation: the oldest trained token in optimizer steps, and the mean trained length over the
    unbiased one."""

    max_staleness: int = 0
    min_length_share: float = 0.9


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted, as means over the simulations of a candidate; times as those of the record, where there is one.

    ``goodput``: trained tokens a second; ``groups_s``: trained groups a second; ``length_share``: mean trained length
    over the unbiased one; ``wasted_share``: generated tokens that no step trains; ``staleness`` and ``wait``: the
    largest, in optimizer steps; ``simulations``: how many. ``push_s``: of a step, ``push_share`` of its time."""

    goodput: float
    groups_s: float
    step_s: float
    length_share: float
    wasted_share: float
    rollout_bubble: float
    sampling_s: float
    environment_s: float
    staleness: int
    wait: int
    simulations: int
    push_s: float
    push_share: float


class TriedRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate. Without ``figures`` it was not simulated to its end, and ``problem`` says why; with both, it breaks
    the budget. ``unknown``: why its times cannot be known."""

    name: str
    recipe: Recipe
    figures: Figures | None
    problem: str = ""
    unknown: str = ""

    @property
    def steps_a_gradient(self) -> int:
        """Optimizer steps that follow one gradient: the batches of a long round."""
        races = self.recipe.rollout.rounds in (RoundKind.TAIL_BATCHING, RoundKind.AUTO)
        return self.recipe.tail_batching.long_round_batches if races else 1

    @property
    def goodput(self) -> float:
        """Negative infinity where it cannot be recommended."""
        return self.figures.goodput if self.figures is not None and not self.problem else -math.inf


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """``tried``: best first, those before the others that were confirmed. ``current``: the recipe as it is, which is
    what ``recommended`` may turn out to be."""

    recommended: TriedRecipe
    current: TriedRecipe
    tried: tuple[TriedRecipe, ...]

    @property
    def gain(self) -> float:
        """Goodput of the recommendation over that of the recipe as it is, less one."""
        now = self.current.figures.goodput if self.current.figures else 0.0
        return self.recommended.goodput / now - 1 if now else 0.0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Surroundings in which candidates are simulated. ``lengths``: those of a seed, which draws do not change.
    ``agreement``: with the run that was recorded, where one was."""

    model: ClusterModel
    lengths: Callable[[int], LengthSource]
    steps: int
    warm_up: int
    seed: int = 0
    agreement: Agreement | None = None


class Search:
    """One search. ``progress`` is called with what is simulated now and the numbers of simulations done and to do."""

    def __init__(
        self, world: World, budget: Budget, progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        self._world = world
        self._budget = budget
        self._progress = progress
        self._tried: dict[str, TriedRecipe] = {}
        self._reports: dict[str, list[SimulationReport]] = {}
        self._done = 0
        self._ahead = 0

    def run(self, recipe: Recipe) -> Advice:
        """Search from ``recipe``. Raises ``StreamRLError`` where not even synchronous rounds can be simulated."""
        current = CURRENT
        others = {name: other for name, other in grid(recipe, self._budget).items() if other != recipe}
        candidates = {current: recipe, **others}
        self._ahead = len(candidates) + _MOST_REFINEMENTS + len(variants(recipe)) + 2 * CONFIRMED + 1
        for name, candidate in candidates.items():
            self._try(name, candidate)
        self._refine_race(recipe)
        self._vary_best()
        for name in {tried.name for tried in self._best(CONFIRMED)} | {current}:
            if self._reports.get(name):
                self._simulate(name, self._tried[name].recipe, self._world.seed + 1)
        confirmed = [tried for tried in self._best(len(self._tried)) if len(self._reports[tried.name]) > 1]
        if not confirmed:
            why = "; ".join(f"{tried.name}: {tried.problem}" for tried in self._tried.values())
            raise StreamRLError(f"no candidate keeps to the budget: {why}")
        now = self._tried[current]
        best = confirmed[0]
        # Other groups get other prompts: a small difference is chance.
        if now.figures is not None and not now.problem and best.goodput <= now.goodput * (1 + LEAST_GAIN):
            best = now
        ranked = sorted(self._tried.values(), key=lambda tried: (tried in confirmed, tried.goodput), reverse=True)
        return Advice(recommended=best, current=now, tried=tuple(ranked))

    def _best(self, count: int) -> list[TriedRecipe]:
        able = [tried for tried in self._tried.values() if tried.goodput > -math.inf]
        return sorted(able, key=lambda tried: tried.goodput, reverse=True)[:count]

    def _refine_race(self, recipe: Recipe) -> None:
        """Climb from the best race to races of a few prompts more or fewer, in steps that halve."""
        races = [tried for tried in self._best(len(self._tried)) if _races_prompts(tried.recipe)]
        if not races:
            return
        best = races[0]
        prompts = recipe.rollout.prompts_per_batch
        step = max(prompts // 8, 1)
        left = _MOST_REFINEMENTS
        while step >= max(prompts * _FINEST_STEP, 1) and left > 0:
            launched = math.ceil(best.recipe.tail_batching.prompt_oversampling * prompts)
            found = best
            for number in (launched - step, launched + step):
                if number <= prompts or left <= 0:
                    continue
                left -= 1
                tail = replace(best.recipe.tail_batching, prompt_oversampling=eta_of(number, prompts))
                tried = self._try(_race_name(tail), replace(best.recipe, tail_batching=tail))
                found = max(found, tried, key=lambda one: one.goodput)
            if found is best:
                step //= 2
            best = found

    def _vary_best(self) -> None:
        """Requests that wait in paused engines change what a race costs: the best few and synchronous rounds again; the
        best of them with other groups and engines, too."""
        again = {tried.name: tried for tried in self._best(CONFIRMED - 1)}
        again |= {t.name: t for t in self._tried.values() if t.recipe.rollout.rounds is RoundKind.SYNCHRONOUS}
        best = [tried.name for tried in self._best(1)]
        for name, tried in again.items():
            for variant, recipe in variants(tried.recipe).items():
                if name in best or variant == PRESUBMITTED:
                    self._try(f"{name}, {variant}", recipe)

    def _try(self, name: str, recipe: Recipe) -> TriedRecipe:
        if name not in self._tried:
            try:
                check_recipe(recipe)
            except RecipeError as error:
                problem = "; ".join(error.problems)
                self._tried[name] = TriedRecipe(name=name, recipe=recipe, figures=None, problem=problem)
            else:
                self._simulate(name, recipe, self._world.seed)
        return self._tried[name]

    def _simulate(self, name: str, recipe: Recipe, seed: int) -> None:
        world = self._world
        self._progress(name, self._done, max(self._ahead - self._done, 1))
        self._done += 1
        try:
            lengths = world.lengths(seed)
            report = simulate_recipe(recipe, world.model, world.steps, lengths, seed=seed, warm_up=world.warm_up)
        except StreamRLError as error:
            self._tried[name] = TriedRecipe(name=name, recipe=recipe, figures=None, problem=str(error))
            return
        self._reports.setdefault(name, []).append(report)
        figures = _figures(self._reports[name], world.agreement)
        unknown = world.agreement.unknown(report, recipe) if world.agreement else ""
        problem = self._breaks(figures)
        self._tried[name] = TriedRecipe(name=name, recipe=recipe, figures=figures, problem=problem, unknown=unknown)

    def _breaks(self, figures: Figures) -> str:
        if figures.staleness > self._budget.max_staleness:
            return f"tokens {figures.staleness} steps old, {self._budget.max_staleness} allowed"
        if figures.length_share < self._budget.min_length_share:
            return f"trains {figures.length_share:.2f} of the unbiased length, {self._budget.min_length_share:g} asked"
        return ""


def grid(recipe: Recipe, budget: Budget) -> dict[str, Recipe]:
    """Candidates by name. All other settings of ``recipe`` stay."""
    kept = recipe.tail_batching
    deferred = (
        TailBatching().deferred_prompts if kept.deferred_prompts is DeferredPrompts.RESUME else kept.deferred_prompts
    )
    plain = TailBatching(domain_column=kept.domain_column, domains=kept.domains, deferred_prompts=deferred)
    of_recipe = replace(plain, long_round_batches=kept.long_round_batches)
    found = {str(kind): _formed(recipe, kind, tail=of_recipe) for kind in (RoundKind.SYNCHRONOUS, RoundKind.AUTO)}
    races = [replace(plain, prompt_oversampling=eta) for eta in OVERSAMPLING]
    races += [replace(plain, prompt_oversampling=eta, response_oversampling=eta) for eta in OVERSAMPLING[:2]]
    races += [
        replace(plain, prompt_oversampling=OVERSAMPLING[1], long_round_batches=batches) for batches in LONG_ROUNDS
    ]
    if budget.max_staleness > 0:
        races.append(replace(plain, deferred_prompts=DeferredPrompts.RESUME))
    for tail in races:
        stale = budget.max_staleness if tail.deferred_prompts is DeferredPrompts.RESUME else 0
        found[_race_name(tail)] = _formed(recipe, RoundKind.TAIL_BATCHING, stale, tail=tail)
    for cohort in COHORTS:
        ordered = LengthSorted(cohort_batches=cohort)
        found[f"length_sorted {cohort}"] = _formed(recipe, RoundKind.LENGTH_SORTED, ordered=ordered)
        if cohort - 1 <= budget.max_staleness:
            partial = replace(ordered, partial=True)
            name = f"length_sorted {cohort} partial"
            found[name] = _formed(recipe, RoundKind.LENGTH_SORTED, budget.max_staleness, ordered=partial)
    for stale in sorted({1, budget.max_staleness} if budget.max_staleness else ()):
        found[f"continuous {stale}"] = _formed(recipe, RoundKind.CONTINUOUS, stale)
    return found | {f"{CURRENT}, {name}": other for name, other in variants(recipe).items()}


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """The same rounds, by name: submitted in advance; of other groups, as many samples a batch; several engines freed
    late in a round, or with another set of half as many, twice as large."""
    rollout = recipe.rollout
    engines = recipe.engines
    found = {}
    if recipe.on_policy and not rollout.presubmit:
        found[PRESUBMITTED] = replace(recipe, rollout=replace(rollout, presubmit=True))
    if recipe.group_sizing.kind is SizingKind.FIXED and rollout.group_size > 1:
        samples = rollout.prompts_per_batch * rollout.group_size
        for size in SIZES:
            if size != rollout.group_size and samples % size == 0:
                other = replace(rollout, group_size=size, prompts_per_batch=samples // size)
                found[f"groups of {size}"] = replace(recipe, rollout=other)
    if recipe.on_policy and engines.count > 1:
        if engines.release is ReleaseKind.NEVER:
            found["engines freed"] = replace(recipe, engines=replace(engines, release=ReleaseKind.DRAIN))
        if not engines.sets and engines.count % 2 == 0:
            half = EngineShape(count=engines.count // 2, tensor_parallel_size=2 * engines.tensor_parallel_size)
            found["sets of engines"] = replace(recipe, engines=replace(engines, sets=(half,)))
    return found


def _formed(
    recipe: Recipe,
    rounds: RoundKind,
    max_staleness: int = 0,
    *,
    tail: TailBatching | None = None,
    ordered: LengthSorted | None = None,
) -> Recipe:
    strict = max_staleness == 0
    rollout = replace(
        recipe.rollout,
        rounds=rounds,
        policy="",
        max_staleness=max_staleness,
        presubmit=recipe.rollout.presubmit and strict,
        in_flight=recipe.rollout.in_flight if rounds is RoundKind.CONTINUOUS else InFlight.KEEP,
        when_stale=StalePolicy.WAIT if strict else recipe.rollout.when_stale,
    )
    return replace(
        recipe, rollout=rollout, tail_batching=tail or TailBatching(), length_sorted=ordered or LengthSorted()
    )


def _races_prompts(recipe: Recipe) -> bool:
    tail = recipe.tail_batching
    return (
        recipe.rollout.rounds is RoundKind.TAIL_BATCHING
        and tail.prompt_oversampling > 1
        and tail.response_oversampling == 1
    )


def _race_name(tail: TailBatching) -> str:
    both = f"/{tail.response_oversampling:g}" if tail.response_oversampling > 1 else ""
    long = f" long {tail.long_round_batches}" if tail.long_round_batches > 1 else ""
    deferred = "" if tail.deferred_prompts is DeferredPrompts.REPLAY else f" {tail.deferred_prompts}"
    return f"tail_batching {tail.prompt_oversampling:.4g}{both}{long}{deferred}"


def _figures(reports: list[SimulationReport], agreement: Agreement | None) -> Figures:
    slower = [agreement.slower(report) if agreement else 1.0 for report in reports]
    return Figures(
        goodput=fmean(report.goodput / by for report, by in zip(reports, slower, strict=True)),
        groups_s=fmean(report.groups_s / by for report, by in zip(reports, slower, strict=True)),
        step_s=fmean(report.step_s_mean * by for report, by in zip(reports, slower, strict=True)),
        length_share=fmean(report.length_ratio for report in reports),
        wasted_share=fmean(report.wasted_share for report in reports),
        rollout_bubble=fmean(report.rollout_bubble for report in reports),
        sampling_s=fmean(report.sampling_s * by for report, by in zip(reports, slower, strict=True)),
        environment_s=fmean(report.environment_s for report in reports),
        staleness=max(report.staleness_max for report in reports),
        wait=max(report.wait_max for report in reports),
        simulations=len(reports),
        push_s=fmean(report.push_s * by for report, by in zip(reports, slower, strict=True)),
        push_share=fmean(report.push_share for report in reports),
    )


def recipe_fragment(recommended: Recipe, current: Recipe) -> str:
    """TOML: the keys of the recommendation that differ from ``current``; empty where none does."""
    blocks = []
    for section in _CHANGED:
        before = getattr(current, section)
        after = getattr(recommended, section)
        known: type[msgspec.Struct] = type(after)
        changed = [key for key in keys_of(known).values() if getattr(after, key.name) != getattr(before, key.name)]
        for table, advanced in ((section, False), (f"{section}.{ADVANCED}", True)):
            keys = [key.name for key in changed if key.advanced is advanced]
            if keys:
                lines = [f"{toml_key(name)} = {toml_value(getattr(after, name))}" for name in keys]
                blocks.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(blocks)


def eta_of(number: int, prompts: int) -> float:
    """The factor that launches ``number`` prompts for ``prompts``: rounded up it would launch one more."""
    eta = round(number / prompts, 6)
    return eta if math.ceil(eta * prompts) <= number else round(eta - 1e-6, 6)
