"""Group sizers: straggler-aware (SAGC, arXiv 2606.02218), or random with the recipe's shares.

``round_policies`` makes the sizer of a run; control reads its ``size`` when it launches, and reports the groups of a
step to ``observe``, with the number of batches that the step trained (several in a long round)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace

from streamrl.base.seeds import derive_seed
from streamrl.control.policies import sagc
from streamrl.control.round_policy import FixedSize, GroupSizer, PolicyState, SizingDecision
from streamrl.control.run_state import GroupLengths
from streamrl.recipe.scheduling import SMALLEST_SIZE, GroupSizing, SizingKind

SURE = 2.0
"""Standard deviations by which a risk must exceed the budget before the run warns that no size meets it."""


def make_group_sizer(settings: GroupSizing, fixed_size: int, seed: int, steps: int) -> GroupSizer:
    """Make the sizer of a run of ``steps``. ``fixed_size``: ``rollout.group_size``, with which the straggler-aware
    sizer starts where the recipe has a budget. ``recipe.rules.scheduling_rules`` has refused settings that do not fit
    together."""
    if settings.kind is SizingKind.SAGC:
        return StragglerAwareSize(settings, fixed_size, steps)
    if settings.kind is SizingKind.RANDOM:
        return RandomSize(settings, seed)
    return FixedSize(fixed_size)


class _Draws(Struct, frozen=True, kw_only=True):
    """State of ``RandomSize``. ``drawn``: number of draws of each size; ``size``: last draw; ``held``: steps that used
    it."""

    drawn: dict[int, int]
    size: int
    held: int = 0


class RandomSize:
    """Random sizes with the recipe's ``shares``, each for ``dwell`` steps: the control experiment of straggler-aware
    sizing.

    A draw favours the sizes that are behind their share, so that even a short run has about these shares: after any
    number of draws the count of a size is off by about one. The order is random, and a function of ``seed`` alone."""

    def __init__(self, settings: GroupSizing, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._draws = self._draw(dict.fromkeys(settings.sizes, 0))

    @property
    def size(self) -> int:
        return self._draws.size

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1, earlier_samples: float = 0.0) -> SizingDecision:
        rate = sagc.straggler_rate(_tables(groups), self._settings.straggler_ratio)
        steps = self._draws.held + batches
        if steps < self._settings.dwell:
            self._draws = replace(self._draws, held=steps)
            reason = f"stays {self.size}: drawn for {self._settings.dwell} steps, {steps} of them done"
        else:
            self._draws = self._draw(self._draws.drawn)
            reason = f"{self.size} by chance: draw {sum(self._draws.drawn.values())}"
        return SizingDecision(size=self.size, reason=reason, figures=_figures(self.size, rate))

    def snapshot(self) -> PolicyState:
        return asdict(self._draws)

    def restore(self, state: PolicyState) -> None:
        """Continue after the draws of ``state``; the state of another kind of sizing is ignored."""
        if "drawn" not in state:
            return
        draws = msgspec.convert(state, _Draws, str_keys=True)
        drawn = {size: draws.drawn.get(size, 0) for size in self._settings.sizes}
        if draws.size in self._settings.sizes:
            self._draws = replace(draws, drawn=drawn)
        else:
            self._draws = self._draw(drawn)

    def _draw(self, drawn: dict[int, int]) -> _Draws:
        """Draw the next size after the draws ``drawn``."""
        sizes = self._settings.sizes
        shares = self._settings.shares
        number = sum(drawn.values())
        total = sum(shares)
        # Draws by which each size is behind its share: its weight in this draw.
        weights = [
            max(share / total * (number + 1) - drawn[size], 0.0) for size, share in zip(sizes, shares, strict=True)
        ]
        point = derive_seed(self._seed, "group size", number) / 2**63 * sum(weights)
        # Where rounding puts the point beyond all weights, the largest size with a weight is drawn.
        draw = max(size for size, weight in zip(sizes, weights, strict=True) if weight > 0)
        for size, weight in zip(sizes, weights, strict=True):
            if point < weight:
                draw = size
                break
            point -= weight
        return _Draws(drawn={**drawn, draw: drawn[draw] + 1}, size=draw)


class StragglerAwareSize:
    """SAGC: the largest groups whose long-term straggler rate stays within a budget (``control.policies.sagc``).

    Each step counts the groups that straggled, learns the risk of every size (larger groups are split into smaller
    ones, so that one size informs all smaller sizes), moves a virtual queue by the rate above the budget, and chooses
    the size with the best utility less queue times risk. Risk is estimated optimistically, so that every size is tried;
    a size stays for at least ``dwell`` steps. ``reuse``: whether larger groups inform smaller sizes (False for an
    ablation)."""

    def __init__(self, settings: GroupSizing, start: int, steps: int, *, reuse: bool = True) -> None:
        self._settings = settings
        self._sizes = settings.sizes
        self._reuse = reuse and settings.informs_smaller
        self._memory = sagc.SizingMemory(
            size=settings.sizes[-1] if settings.budget is None else start,
            budget=settings.budget or 0.0,
            asked=settings.budget or 0.0,  # the recipe's; ``budget`` may be measured
            tradeoff=settings.tradeoff_over(steps),
            calibration_steps=settings.calibration_over(steps),
        )

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def budget(self) -> float:
        """Budget in force for the long-term straggler rate: the recipe's, or the measured one (0: not measured yet)."""
        return self._memory.budget

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1, earlier_samples: float = 0.0) -> SizingDecision:
        settings = self._settings
        tables = _tables(groups)
        rate = sagc.straggler_rate(tables, settings.straggler_ratio)
        if rate is None and tables and self.size < SMALLEST_SIZE:
            rate = 0.0
        if rate is None:
            return self._decision(None, f"stays {self.size}: no group of the step was large enough to tell")
        calibrating = not self.budget
        memory = sagc.learn(
            self._memory,
            tables,
            self._sizes,
            ratio=settings.straggler_ratio,
            discount=settings.discount,
            reuse=self._reuse,
        )
        memory = sagc.spend(
            memory, rate, batches, smallest=self._sizes[0], tightening=settings.tightening, tradeoff=memory.tradeoff
        )
        self._memory = replace(memory, held=memory.held + batches)
        message = ""  # for the user
        if calibrating:
            message = self._calibrate()
        if not self.budget:
            progress = f"step {memory.steps} without a budget, {memory.calibration_steps} are to measure it"
            return self._decision(rate, message or f"stays {self.size}: {progress}", notify=bool(message))
        choice = self._choose(earlier_samples)
        message = message or self._warning()
        reason = f"{message}; {choice}" if message else choice
        return self._decision(rate, reason, notify=bool(message))

    def snapshot(self) -> PolicyState:
        return asdict(self._memory)

    def restore(self, state: PolicyState) -> None:
        """Continue with ``state``; the state of another kind of sizing is ignored.

        Where the recipe no longer has the current size, the sizer starts with its initial size. Where the recipe has
        another budget (in a new run that begins from a checkpoint) or other ``calibration_steps``, the queue and the
        sums of rates start from zero, and a budget that the recipe leaves out is measured again. Counts of groups by
        size stay in each case."""
        if "budget" not in state:
            return
        memory = msgspec.convert(state, sagc.SizingMemory, str_keys=True)
        new = self._memory
        other_steps = self._settings.calibration_steps not in (None, memory.calibration_steps)
        other_budget = memory.asked != new.asked or other_steps
        if other_budget:
            memory = replace(memory, budget=new.budget, queue=0.0, steps=0, rate_sum=0.0, warned=False)
        starts_over = memory.size not in self._sizes or (other_budget and not new.asked)
        size = new.size if starts_over else memory.size
        self._memory = replace(
            memory,
            size=size,
            asked=new.asked,
            tradeoff=self._settings.tradeoff or memory.tradeoff or new.tradeoff,
            calibration_steps=self._settings.calibration_steps or memory.calibration_steps or new.calibration_steps,
        )

    def _calibrate(self) -> str:
        """Count one step without a budget; after the last one measure the budget, as if it had been in force from the
        start. Returns a message for the user, or an empty text.

        The steps have the largest size; where sizes do not inform each other, the second half of them has the smallest.
        Where too few groups of either size ended, the middle size stays for good."""
        memory = self._memory
        sizes = self._sizes
        if memory.warned:
            return ""
        group_counts = {size: memory.straggling[size] + memory.calm[size] for size in (sizes[-1], sizes[0])}
        steps = memory.steps
        needed_steps = memory.calibration_steps
        if not self._reuse:
            if memory.size != sizes[0]:
                if 2 * steps >= needed_steps:
                    self._memory = replace(memory, size=sizes[0], held=0)
                return ""
            steps = memory.held
            # Early rounds at the smallest size may still end with groups of the largest: then this half is longer.
            if group_counts[sizes[0]] >= sagc.FEWEST_GROUPS:
                needed_steps //= 2
        if steps < needed_steps:
            return ""
        rarest = min(group_counts, key=group_counts.__getitem__)
        if group_counts[rarest] < sagc.FEWEST_GROUPS:
            middle = sizes[len(sizes) // 2]
            self._memory = replace(memory, size=middle, held=0, warned=True)
            return (
                f"group size stays {middle}: {group_counts[rarest]:.0f} groups of size {rarest} are too few to measure "
                "a budget by; set group_sizing.budget, or more group_sizing.advanced.calibration_steps"
            )
        budget, text = sagc.measured_budget(sagc.risks_of(memory, sizes, 0.0), self._settings.tightening)
        memory = replace(memory, budget=budget, held=max(memory.held, self._settings.dwell))
        self._memory = replace(memory, queue=max(memory.overspent, 0.0))
        return text

    def _choose(self, earlier_samples: float) -> str:
        """Choose the size of the next round. ``earlier_samples``: samples in a prompt's baseline beside siblings.
        Returns the reason."""
        memory = self._memory
        settings = self._settings
        risks = sagc.risks_of(memory, self._sizes, settings.optimism)
        if sagc.is_out_of_reach(memory, self._sizes[0]):
            # Not by utility: the queue is at its cap, where the utility of a large size outweighs a risk that is hardly
            # higher.
            best = self._sizes[0]
        else:
            utilities = sagc.utilities_of(self._sizes, earlier_samples)
            best = sagc.best_size(utilities, risks, queue=memory.queue, tradeoff=memory.tradeoff)
        standing = f"queue {memory.queue:.2f}, risk {risks[best].low:.2f} at size {best}, budget {memory.budget:g}"
        if best == memory.size:
            return f"stays {best}: {standing}"
        if memory.held < settings.dwell:
            return f"stays {memory.size} for {settings.dwell} steps, {memory.held} of them done: {standing}"
        self._memory = replace(memory, size=best, held=0)
        return f"{memory.size} to {best}: {standing}"

    def _warning(self) -> str:
        """Warning for the user that no size meets the budget, given once; else an empty text."""
        memory = self._memory
        smallest = self._sizes[0]
        if memory.warned or memory.steps < self._settings.dwell or not sagc.is_out_of_reach(memory, smallest, SURE):
            return ""
        self._memory = replace(memory, warned=True)
        risk = sagc.risks_of(memory, [smallest], 0.0)[smallest].mean
        possible_budget = math.ceil(risk * 20) / 20
        remedy = "raise group_sizing.advanced.straggler_ratio"
        if possible_budget < 1:
            remedy = f"the budget that it could meet is {possible_budget:g}"
        return (
            f"no size meets group_sizing.budget = {memory.budget:g}: size {smallest} straggles in {risk:.2f} of its "
            f"groups; {remedy}"
        )

    def _decision(self, rate: float | None, reason: str, *, notify: bool = False) -> SizingDecision:
        memory = self._memory
        figures = _figures(memory.size, rate) | {"sizing/queue": memory.queue, "sizing/budget": memory.budget}
        risks = sagc.risks_of(memory, self._sizes, self._settings.optimism)
        figures.update({f"sizing/risk_{size}": risk.mean for size, risk in risks.items()})
        return SizingDecision(size=memory.size, reason=reason, figures=figures, notify=notify)


def _tables(groups: Sequence[GroupLengths]) -> list[sagc.LengthTable]:
    """Lengths of the groups of each size (a row for each group, a column for each member): infinite for a truncated
    member, whose length is not known, and estimated for a member that the race dropped (length 0). A group of which all
    members were dropped is left out."""
    by_size: dict[int, list[GroupLengths]] = {}
    for group in groups:
        if any(group.lengths):
            by_size.setdefault(len(group.lengths), []).append(group)
    tables = []
    for groups_of_size in by_size.values():
        table_GL = np.array([sagc.with_dropped_members(group.lengths) for group in groups_of_size], dtype=np.float64)
        for row, group in enumerate(groups_of_size):
            if True in group.truncated:
                table_GL[row, list(group.truncated)] = np.inf
        tables.append(table_GL)
    return tables


def _figures(size: int, rate: float | None) -> dict[str, float]:
    figures = {"sizing/size": float(size)}
    if rate is not None:
        figures["sizing/straggler_rate"] = rate
    return figures
