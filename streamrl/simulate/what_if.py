"""Search over round policies and their constants in virtual time. ``streamrl what-if`` runs it in its own process.

It simulates a grid over all kinds of rounds that the budget allows, then races near the best one, then the best
candidates with submission in advance. The best few and the recipe as it is are simulated once more with other lengths,
and the means of both simulations decide. All candidates have the same prompts and lengths, so that their differences
vary much less than their figures."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, inf
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.recipe.field_types import ADVANCED, keys_of
from streamrl.recipe.rules.load_recipe import check_recipe
from streamrl.recipe.scheduling import (
    AdmissionKind,
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
from streamrl.simulate.fleet import FleetModel
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
"""Smallest gain of goodput for which another recipe than the current one is recommended."""

CONFIRMED = 3
"""Number of best candidates that are simulated again with other lengths."""

_SEARCHED_SECTIONS = ("rollout", "tail_batching", "length_sorted", "engines")
_MOST_REFINEMENTS = 8
_FINEST_STEP = 1 / 32  # share of the prompts of a batch


class Budget(Struct, frozen=True, kw_only=True):
    """Limits of a recommendation. ``max_staleness``: staleness of the oldest trained token; ``min_length_share``: mean
    trained length over the unbiased mean."""

    max_staleness: int = 0
    min_length_share: float = 0.9


class Figures(Struct, frozen=True, kw_only=True):
    """Predictions for a candidate: means over its simulations. Times are scaled by the record, where there is one.

    ``goodput``: trained tokens a second;
    ``groups_s``: trained groups a second;
    ``step_s``: seconds of a step;
    ``length_share``: mean trained length over the unbiased mean;
    ``wasted_share``: share of generated tokens that no step trains;
    ``rollout_bubble``: free share of the slots in the rollout;
    ``sampling_s``, ``environment_s``: seconds of a trained trajectory outside of its environment and in it;
    ``staleness``, ``wait``: largest values, in optimizer steps;
    ``simulations``: number of simulations;
    ``push_s``: seconds of a push;
    ``push_share``: share of a step that the push takes."""

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


class TriedRecipe(Struct, frozen=True, kw_only=True):
    """A candidate and its result. ``figures``: predictions, None where the simulation failed; ``problem``: error of the
    simulation, or the limit of the budget that the candidate exceeds; ``unknown``: message that the record says too
    little about its times."""

    name: str
    recipe: Recipe
    figures: Figures | None
    problem: str = ""
    unknown: str = ""

    @property
    def steps_a_gradient(self) -> int:
        """Optimizer steps along one gradient: the batches of a long round."""
        races = self.recipe.rollout.rounds in (RoundKind.TAIL_BATCHING, RoundKind.AUTO)
        return self.recipe.tail_batching.long_round_batches if races else 1

    @property
    def goodput(self) -> float:
        """Predicted goodput; negative infinity for a candidate that cannot be recommended."""
        if self.figures is None or self.problem:
            return -inf
        return self.figures.goodput


class Advice(Struct, frozen=True, kw_only=True):
    """Result of a search. ``recommended``: recommended candidate, which may be ``current``; ``current``: the recipe as
    it is; ``tried``: all candidates, confirmed ones first, each part with the best first."""

    recommended: TriedRecipe
    current: TriedRecipe
    tried: tuple[TriedRecipe, ...]

    @property
    def gain(self) -> float:
        """Goodput of the recommendation over the goodput of the current recipe, less one."""
        current_goodput = self.current.figures.goodput if self.current.figures else 0.0
        return self.recommended.goodput / current_goodput - 1 if current_goodput else 0.0


class World(Struct, frozen=True, kw_only=True):
    """Conditions for the simulation of candidates.

    ``model``: fleet;
    ``lengths``: function from a seed to a source of lengths, which draws do not change;
    ``steps``, ``warm_up``: steps that count and steps before them;
    ``seed``: seed of the first simulations;
    ``agreement``: comparison with a recorded run, where there is one."""

    model: FleetModel
    lengths: Callable[[int], LengthSource]
    steps: int
    warm_up: int
    seed: int = 0
    agreement: Agreement | None = None


class Search:
    """One search. ``progress``: function to call before each simulation, with the name of the candidate and the numbers
    of simulations done and still to do."""

    def __init__(
        self, world: World, budget: Budget, progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        self._world = world
        self._budget = budget
        self._progress = progress
        self._results: dict[str, TriedRecipe] = {}
        self._reports: dict[str, list[SimulationReport]] = {}
        self._simulations = 0
        self._expected_simulations = 0

    def run(self, recipe: Recipe) -> Advice:
        """Search from ``recipe``. Raises ``StreamRLError`` where not even synchronous rounds can be simulated."""
        candidates = {CURRENT: recipe}
        candidates |= {name: candidate for name, candidate in grid(recipe, self._budget).items() if candidate != recipe}
        self._expected_simulations = len(candidates) + _MOST_REFINEMENTS + len(variants(recipe)) + 2 * CONFIRMED + 1
        for name, candidate in candidates.items():
            self._try(name, candidate)
        self._refine_race(recipe)
        self._vary_best()
        for name in dict.fromkeys([*(result.name for result in self._best(CONFIRMED)), CURRENT]):  # in one order
            if self._reports.get(name):
                self._simulate(name, self._results[name].recipe, self._world.seed + 1)
        confirmed = [result for result in self._best(len(self._results)) if len(self._reports[result.name]) > 1]
        if not confirmed:
            problems = "; ".join(f"{result.name}: {result.problem}" for result in self._results.values())
            raise StreamRLError(f"no candidate keeps to the budget: {problems}")
        current = self._results[CURRENT]
        best = confirmed[0]
        # Other groups get other prompts, so that a small difference is chance.
        if current.figures is not None and not current.problem and best.goodput <= current.goodput * (1 + LEAST_GAIN):
            best = current
        ranked = sorted(self._results.values(), key=lambda result: (result in confirmed, result.goodput), reverse=True)
        return Advice(recommended=best, current=current, tried=tuple(ranked))

    def _best(self, count: int) -> list[TriedRecipe]:
        """The best candidates that can be recommended, at most ``count``."""
        possible = [result for result in self._results.values() if result.goodput > -inf]
        return sorted(possible, key=lambda result: result.goodput, reverse=True)[:count]

    def _refine_race(self, recipe: Recipe) -> None:
        """Climb from the best race to races of a few prompts more or fewer, in steps that halve."""
        races = [result for result in self._best(len(self._results)) if _races_prompts(result.recipe)]
        if not races:
            return
        best = races[0]
        prompts = recipe.rollout.prompts_per_batch
        step = max(prompts // 8, 1)
        remaining = _MOST_REFINEMENTS
        while step >= max(prompts * _FINEST_STEP, 1) and remaining > 0:
            launched = ceil(best.recipe.tail_batching.prompt_oversampling * prompts)
            next_best = best
            for number in (launched - step, launched + step):
                if number <= prompts or remaining <= 0:
                    continue
                remaining -= 1
                tail = replace(best.recipe.tail_batching, prompt_oversampling=eta_of(number, prompts))
                result = self._try(_race_name(tail), replace(best.recipe, tail_batching=tail))
                if result.goodput > next_best.goodput:
                    next_best = result
            if next_best is best:
                step //= 2
            best = next_best

    def _vary_best(self) -> None:
        """Try variants. The best few candidates and synchronous rounds are tried with submission in advance, which
        changes the cost of a race; the best candidate also with other groups and engines."""
        bases = {result.name: result for result in self._best(CONFIRMED - 1)}
        for result in self._results.values():
            if result.recipe.rollout.rounds is RoundKind.SYNCHRONOUS:
                bases[result.name] = result
        best_names = [result.name for result in self._best(1)]
        for name, base in bases.items():
            for variant, recipe in variants(base.recipe).items():
                if name in best_names or variant == PRESUBMITTED:
                    self._try(f"{name}, {variant}", recipe)

    def _try(self, name: str, recipe: Recipe) -> TriedRecipe:
        """Simulate ``recipe``, unless there is a result of this name already. Returns the result."""
        if name not in self._results:
            self._simulate(name, recipe, self._world.seed)
        return self._results[name]

    def _simulate(self, name: str, recipe: Recipe, seed: int) -> None:
        """Check ``recipe`` and simulate it with the lengths of ``seed``. Its result is made of all its simulations."""
        world = self._world
        try:
            check_recipe(recipe)
            self._progress(name, self._simulations, max(self._expected_simulations - self._simulations, 1))
            self._simulations += 1
            lengths = world.lengths(seed)
            report = simulate_recipe(recipe, world.model, world.steps, lengths, seed=seed, warm_up=world.warm_up)
        except StreamRLError as error:
            problem = "; ".join(str(error).splitlines())
            self._results[name] = TriedRecipe(name=name, recipe=recipe, figures=None, problem=problem)
            return
        self._reports.setdefault(name, []).append(report)
        figures = _figures(self._reports[name], world.agreement)
        unknown = ""
        if world.agreement:
            unknown = world.agreement.unknown(report, recipe)
        problem = self._budget_problem(figures)
        self._results[name] = TriedRecipe(name=name, recipe=recipe, figures=figures, problem=problem, unknown=unknown)

    def _budget_problem(self, figures: Figures) -> str:
        """Message about the limit of the budget that ``figures`` exceed; empty where they keep to it."""
        if figures.staleness > self._budget.max_staleness:
            return f"tokens {figures.staleness} steps old, {self._budget.max_staleness} allowed"
        if figures.length_share < self._budget.min_length_share:
            return f"trains {figures.length_share:.2f} of the unbiased length, {self._budget.min_length_share:g} asked"
        return ""


def grid(recipe: Recipe, budget: Budget) -> dict[str, Recipe]:
    """Candidates by name: ``recipe`` with other rounds. All its other settings stay."""
    current = recipe.tail_batching
    deferred = current.deferred_prompts
    if deferred is DeferredPrompts.RESUME:
        deferred = TailBatching().deferred_prompts
    plain = TailBatching(deferred_prompts=deferred)
    long_rounds = replace(plain, long_round_batches=current.long_round_batches)
    candidates = {
        str(kind): _with_rounds(recipe, kind, tail=long_rounds) for kind in (RoundKind.SYNCHRONOUS, RoundKind.AUTO)
    }
    races = [replace(plain, prompt_oversampling=eta) for eta in OVERSAMPLING]
    races += [replace(plain, prompt_oversampling=eta, response_oversampling=eta) for eta in OVERSAMPLING[:2]]
    races += [
        replace(plain, prompt_oversampling=OVERSAMPLING[1], long_round_batches=batches) for batches in LONG_ROUNDS
    ]
    if budget.max_staleness > 0:
        races.append(replace(plain, deferred_prompts=DeferredPrompts.RESUME))
    for tail in races:
        staleness = budget.max_staleness if tail.deferred_prompts is DeferredPrompts.RESUME else 0
        candidates[_race_name(tail)] = _with_rounds(recipe, RoundKind.TAIL_BATCHING, staleness, tail=tail)
    for cohort in COHORTS:
        ordered = LengthSorted(cohort_batches=cohort)
        candidates[f"length_sorted {cohort}"] = _with_rounds(recipe, RoundKind.LENGTH_SORTED, ordered=ordered)
        if cohort - 1 <= budget.max_staleness:
            partial = replace(ordered, partial=True)
            name = f"length_sorted {cohort} partial"
            candidates[name] = _with_rounds(recipe, RoundKind.LENGTH_SORTED, budget.max_staleness, ordered=partial)
    if budget.max_staleness:
        for staleness in sorted({1, budget.max_staleness}):
            candidates[f"continuous {staleness}"] = _with_rounds(recipe, RoundKind.CONTINUOUS, staleness)
    return candidates | {f"{CURRENT}, {name}": variant for name, variant in variants(recipe).items()}


def variants(recipe: Recipe) -> dict[str, Recipe]:
    """Variants of ``recipe`` with the same rounds, by name: submitted in advance; with other group sizes and as many
    samples a batch; with admission by KV caches; with engines freed late in a round; with another set of half as many,
    twice as large engines."""
    rollout = recipe.rollout
    engines = recipe.engines
    recipes = {}
    if recipe.on_policy and not rollout.presubmit:
        recipes[PRESUBMITTED] = replace(recipe, rollout=replace(rollout, presubmit=True))
    if recipe.group_sizing.kind is SizingKind.FIXED and rollout.group_size > 1:
        samples = rollout.prompts_per_batch * rollout.group_size
        for size in SIZES:
            if size != rollout.group_size and samples % size == 0:
                resized = replace(rollout, group_size=size, prompts_per_batch=samples // size)
                recipes[f"groups of {size}"] = replace(recipe, rollout=resized)
    if rollout.rounds is RoundKind.CONTINUOUS and rollout.admission is AdmissionKind.SLOTS:
        recipes["admission by KV"] = replace(recipe, rollout=replace(rollout, admission=AdmissionKind.KV))
    if recipe.on_policy and engines.count > 1:
        if engines.release is ReleaseKind.NEVER:
            recipes["engines freed"] = replace(recipe, engines=replace(engines, release=ReleaseKind.DRAIN))
        if not engines.sets and engines.count % 2 == 0:
            half = EngineShape(count=engines.count // 2, tensor_parallel_size=2 * engines.tensor_parallel_size)
            recipes["sets of engines"] = replace(recipe, engines=replace(engines, sets=(half,)))
    return recipes


def _with_rounds(
    recipe: Recipe,
    rounds: RoundKind,
    max_staleness: int = 0,
    *,
    tail: TailBatching | None = None,
    ordered: LengthSorted | None = None,
) -> Recipe:
    """``recipe`` with other rounds."""
    on_policy = max_staleness == 0
    rollout = replace(
        recipe.rollout,
        rounds=rounds,
        policy="",
        max_staleness=max_staleness,
        presubmit=recipe.rollout.presubmit and on_policy,
        in_flight=recipe.rollout.in_flight if rounds is RoundKind.CONTINUOUS else InFlight.KEEP,
        when_stale=StalePolicy.WAIT if on_policy else recipe.rollout.when_stale,
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
    name = f"tail_batching {tail.prompt_oversampling:.4g}"
    if tail.response_oversampling > 1:
        name += f"/{tail.response_oversampling:g}"
    if tail.long_round_batches > 1:
        name += f" long {tail.long_round_batches}"
    if tail.deferred_prompts is not DeferredPrompts.REPLAY:
        name += f" {tail.deferred_prompts}"
    return name


def _figures(reports: list[SimulationReport], agreement: Agreement | None) -> Figures:
    """Means of ``reports``, with times scaled by ``agreement``."""
    scaled = [(report, agreement.slower(report) if agreement else 1.0) for report in reports]
    return Figures(
        goodput=fmean(report.goodput / factor for report, factor in scaled),
        groups_s=fmean(report.groups_s / factor for report, factor in scaled),
        step_s=fmean(report.step_s_mean * factor for report, factor in scaled),
        length_share=fmean(report.length_ratio for report in reports),
        wasted_share=fmean(report.wasted_share for report in reports),
        rollout_bubble=fmean(report.rollout_bubble for report in reports),
        sampling_s=fmean(report.sampling_s * factor for report, factor in scaled),
        environment_s=fmean(report.environment_s for report in reports),
        staleness=max(report.staleness_max for report in reports),
        wait=max(report.wait_max for report in reports),
        simulations=len(reports),
        push_s=fmean(report.push_s * factor for report, factor in scaled),
        push_share=fmean(report.push_share for report in reports),
    )


def recipe_fragment(recommended: Recipe, current: Recipe) -> str:
    """TOML text with the keys of ``recommended`` that differ from ``current``; empty where none differs."""
    blocks = []
    for section in _SEARCHED_SECTIONS:
        before = getattr(current, section)
        after = getattr(recommended, section)
        section_type: type[Struct] = type(after)
        keys_in_section = keys_of(section_type).values()
        changed = [key for key in keys_in_section if getattr(after, key.name) != getattr(before, key.name)]
        for table, advanced in ((section, False), (f"{section}.{ADVANCED}", True)):
            keys = [key.name for key in changed if key.advanced is advanced]
            if keys:
                lines = [f"{toml_key(name)} = {toml_value(getattr(after, name))}" for name in keys]
                blocks.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(blocks)


def eta_of(number: int, prompts: int) -> float:
    """Factor of oversampling that launches exactly ``number`` prompts for a batch of ``prompts``. A factor that was
    rounded up would launch one more."""
    eta = round(number / prompts, 6)
    return eta if ceil(eta * prompts) <= number else round(eta - 1e-6, 6)
