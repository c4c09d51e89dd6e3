"""What if the rounds were formed otherwise? A search over policies and constants, in virtual time.

First a grid over all kinds of rounds that the budget allows, then the neighbours of the best race, then submission in
advance; the best few and the recipe as it is are simulated once more with other lengths, and those figures decide. All
candidates see the same prompts and lengths, so that their differences are much smaller than their noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import msgspec
from msgspec.structs import replace

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.control.settings import ControlSettings
from streamrl.recipe.load import check_recipe
from streamrl.recipe.scheduling import DeferredPrompts, InFlight, LengthSorted, RoundKind, StalePolicy, TailBatching
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_key, toml_value
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engine_changes import engine_plan
from streamrl.simulate.lengths import LengthSource, ModelledLengths
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import simulate

ETAS = (1.125, 1.25, 1.5)
COHORTS = (2, 4)
LONG_ROUNDS = (2, 4)
CURRENT = "as it is"
CONFIRMED = 3
"""The best so many candidates are simulated again, with other lengths."""

_CHANGED = ("rollout", "tail_batching", "length_sorted")
_MOST_REFINEMENTS = 8
_FINEST_STEP = 1 / 32  # of the prompts of a batch


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What a recommendation keeps to: the oldest trained token in optimizer steps, and the mean trained length over the
    unbiased one."""

    max_staleness: int = 0
    min_length_share: float = 0.9

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or not 0 <= self.min_length_share <= 1:
            raise ValueError(
                f"max_staleness {self.max_staleness} and min_length_share {self.min_length_share:g}: "
                "at least 0, and between 0 and 1"
            )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted, as means over the simulations of a candidate.

    ``goodput``: trained tokens a second; ``groups_s``: trained groups a second; ``length_share``: mean trained length
    over the unbiased one; ``wasted_share``: generated tokens that no step trains; ``staleness`` and ``wait``: the
    largest, in optimizer steps; ``simulations``: how many.
    """

    goodput: float
    groups_s: float
    step_s: float
    length_share: float
    wasted_share: float
    rollout_bubble: float
    staleness: int
    wait: int
    simulations: int


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate. Without ``figures`` it was not simulated to its end, and ``problem`` says why; with both, it breaks
    the budget."""

    name: str
    recipe: Recipe
    figures: Figures | None
    problem: str = ""

    @property
    def goodput(self) -> float:
        """Negative infinity where it cannot be recommended."""
        return self.figures.goodput if self.figures is not None and not self.problem else -math.inf


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """``tried``: best first, those before the others that were confirmed. ``current``: the recipe as it is, which is
    what ``recommended`` may turn out to be."""

    recommended: Tried
    current: Tried
    tried: tuple[Tried, ...]

    @property
    def gain(self) -> float:
        """Goodput of the recommendation over that of the recipe as it is, less one."""
        now = self.current.figures.goodput if self.current.figures else 0.0
        return self.recommended.goodput / now - 1 if now else 0.0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What candidates are simulated in. ``settings``: what of a recipe decides. ``lengths``: those of a seed, which
    draws do not change (None: the model's own)."""

    model: ClusterModel
    settings: Callable[[Recipe], ControlSettings]
    steps: int
    warm_up: int
    seed: int = 0
    lengths: Callable[[int], LengthSource] | None = None


class Search:
    """One search. ``progress`` is called with what is simulated now and the numbers of simulations done and to do."""

    def __init__(
        self, world: World, budget: Budget, progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        self._world = world
        self._budget = budget
        self._progress = progress
        self._tried: dict[str, Tried] = {}
        self._reports: dict[str, list[SimulationReport]] = {}
        self._sources: dict[int, LengthSource] = {}
        self._done = 0
        self._ahead = 0

    def run(self, recipe: Recipe) -> Advice:
        """Search from ``recipe``. Raises ``StreamRLError`` where not even synchronous rounds can be simulated."""
        current = CURRENT
        others = {name: other for name, other in grid(recipe, self._budget).items() if other != recipe}
        candidates = {current: recipe, **others}
        self._ahead = len(candidates) + _MOST_REFINEMENTS + 2 * CONFIRMED + 1
        for name, candidate in candidates.items():
            self._try(name, candidate)
        self._refine_race(recipe)
        self._submit_in_advance()
        for name in {tried.name for tried in self._best(CONFIRMED)} | {current}:
            if self._reports.get(name):
                self._simulate(name, self._tried[name].recipe, self._world.seed + 1)
        confirmed = [tried for tried in self._best(len(self._tried)) if len(self._reports[tried.name]) > 1]
        if not confirmed:
            why = "; ".join(f"{tried.name}: {tried.problem}" for tried in self._tried.values())
            raise StreamRLError(f"no candidate keeps to the budget: {why}")
        now = self._tried[current]
        best = confirmed[0]
        # What differs in nothing but its name is no advice.
        if now.figures is not None and not now.problem and best.goodput <= now.goodput * 1.0001:
            best = now
        ranked = sorted(self._tried.values(), key=lambda tried: (tried in confirmed, tried.goodput), reverse=True)
        return Advice(recommended=best, current=now, tried=tuple(ranked))

    def _best(self, count: int) -> list[Tried]:
        able = [tried for tried in self._tried.values() if tried.goodput > -math.inf]
        return sorted(able, key=lambda tried: tried.goodput, reverse=True)[:count]

    def _refine_race(self, recipe: Recipe) -> None:
        """Climb from the best race to races of a few prompts more or fewer, in steps that halve."""
        races = [tried for tried in self._best(len(self._tried)) if _races_prompts(tried.recipe)]
        if not races:
            return
        best, prompts = races[0], recipe.rollout.prompts_per_batch
        step, left = max(prompts // 8, 1), _MOST_REFINEMENTS
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

    def _submit_in_advance(self) -> None:
        """Requests that wait in paused engines change what a race costs: the best few and synchronous rounds again."""
        again = {tried.name: tried for tried in self._best(CONFIRMED - 1)}
        again |= {t.name: t for t in self._tried.values() if t.recipe.rollout.rounds is RoundKind.SYNCHRONOUS}
        for name, tried in again.items():
            rollout = tried.recipe.rollout
            if tried.recipe.on_policy and not rollout.presubmit:
                submitted = replace(tried.recipe, rollout=replace(rollout, presubmit=True))
                self._try(f"{name}, presubmitted", submitted)

    def _try(self, name: str, recipe: Recipe) -> Tried:
        if name in self._tried:
            return self._tried[name]
        self._tried[name] = Tried(name=name, recipe=recipe, figures=None)
        try:
            check_recipe(recipe)
        except RecipeError as error:
            problem = "; ".join(error.problems)
            self._tried[name] = Tried(name=name, recipe=recipe, figures=None, problem=problem)
            return self._tried[name]
        self._simulate(name, recipe, self._world.seed)
        return self._tried[name]

    def _simulate(self, name: str, recipe: Recipe, seed: int) -> None:
        world = self._world
        self._progress(name, self._done, max(self._ahead - self._done, 1))
        self._done += 1
        try:
            report = simulate(
                world.settings(recipe),
                world.model,
                world.steps,
                lengths=self._lengths(seed),
                in_flight=recipe.rollout.in_flight,
                seed=seed,
                warm_up=world.warm_up,
                engines=engine_plan(recipe, world.model),
            )
        except StreamRLError as error:
            self._tried[name] = Tried(name=name, recipe=recipe, figures=None, problem=str(error))
            return
        self._reports.setdefault(name, []).append(report)
        figures = _figures(self._reports[name])
        self._tried[name] = Tried(name=name, recipe=recipe, figures=figures, problem=self._breaks(figures))

    def _lengths(self, seed: int) -> LengthSource:
        """One for all candidates: what is drawn changes nothing in it."""
        if seed not in self._sources:
            world = self._world
            made = world.lengths(seed) if world.lengths is not None else ModelledLengths(world.model.lengths, seed)
            self._sources[seed] = made
        return self._sources[seed]

    def _breaks(self, figures: Figures) -> str:
        if figures.staleness > self._budget.max_staleness:
            return f"tokens {figures.staleness} steps old, {self._budget.max_staleness} allowed"
        if figures.length_share < self._budget.min_length_share:
            return f"trains {figures.length_share:.2f} of the unbiased length, {self._budget.min_length_share:g} asked"
        return ""


def grid(recipe: Recipe, budget: Budget) -> dict[str, Recipe]:
    """Candidates by name. Whatever is not about forming rounds stays as it is in ``recipe``."""
    kept = recipe.tail_batching
    deferred = (
        TailBatching().deferred_prompts if kept.deferred_prompts is DeferredPrompts.RESUME else kept.deferred_prompts
    )
    plain = TailBatching(domain_column=kept.domain_column, domains=kept.domains, deferred_prompts=deferred)
    of_recipe = replace(plain, long_round_batches=kept.long_round_batches)
    found = {str(kind): _formed(recipe, kind, tail=of_recipe) for kind in (RoundKind.SYNCHRONOUS, RoundKind.AUTO)}
    races = [replace(plain, prompt_oversampling=eta) for eta in ETAS]
    races += [replace(plain, prompt_oversampling=eta, response_oversampling=eta) for eta in ETAS[:2]]
    races += [replace(plain, prompt_oversampling=ETAS[1], long_round_batches=batches) for batches in LONG_ROUNDS]
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


def _figures(reports: list[SimulationReport]) -> Figures:
    return Figures(
        goodput=fmean(report.goodput for report in reports),
        groups_s=fmean(report.groups_s for report in reports),
        step_s=fmean(report.step_s_mean for report in reports),
        length_share=fmean(report.length_ratio for report in reports),
        wasted_share=fmean(report.wasted_share for report in reports),
        rollout_bubble=fmean(report.rollout_bubble for report in reports),
        staleness=max(report.staleness_max for report in reports),
        wait=max(report.wait_max for report in reports),
        simulations=len(reports),
    )


def recipe_fragment(recommended: Recipe, current: Recipe) -> str:
    """TOML: the keys of the recommendation that differ from ``current``; empty where none does."""
    blocks = []
    for section in _CHANGED:
        before, after = getattr(current, section), getattr(recommended, section)
        keys = [name for name in after.__struct_fields__ if getattr(after, name) != getattr(before, name)]
        if keys:
            lines = [f"{toml_key(name)} = {toml_value(getattr(after, name))}" for name in keys]
            blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks)


def eta_of(number: int, prompts: int) -> float:
    """The factor that launches ``number`` prompts for ``prompts``: rounded up it would launch one more."""
    eta = round(number / prompts, 6)
    return eta if math.ceil(eta * prompts) <= number else round(eta - 1e-6, 6)
