"""Group sizers: fixed, straggler-aware (SAGC), or random with given shares. Each is asked for ``size`` once a round,
and given the groups of a step with ``observe``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.base.seeds import derive_seed
from streamrl.control.model import GroupLengths
from streamrl.control.policies import sagc
from streamrl.control.round_policy import FixedSize, GroupSizer, SizingDecision
from streamrl.recipe.scheduling import GroupSizing, SizingKind

SURE = 2.0
"""Standard deviations by which a risk must exceed the budget before the run warns that no size meets it."""


def make_group_sizer(settings: GroupSizing, fixed_size: int, seed: int, steps: int) -> GroupSizer:
    """The sizer of a run of ``steps``. ``fixed_size``: ``rollout.group_size``, which the straggler-aware one starts
    with where its budget is known. Settings that do not fit together were refused
    (``recipe.rules.scheduling_rules``)."""
    if settings.kind is SizingKind.SAGC:
        return StragglerAwareSize(settings, fixed_size, steps)
    if settings.kind is SizingKind.RANDOM:
        return RandomSize(settings, seed)
    return FixedSize(fixed_size)


class _Draws(msgspec.Struct, frozen=True, kw_only=True):
    """State of ``RandomSize``: draws of each size, the last one, and the steps that it served."""

    drawn: dict[int, int]
    size: int
    held: int = 0


class RandomSize:
    """Sizes by chance with given shares, each for ``dwell`` steps: the control experiment of straggler-aware sizing.

    A draw favours the sizes that are behind their share, so that a short run has the histogram that was asked for:
    after any number of draws a size is off by about one. The order is chance, and a function of ``seed`` alone."""

    def __init__(self, settings: GroupSizing, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._draws = self._draw(dict.fromkeys(settings.sizes, 0))

    @property
    def size(self) -> int:
        return self._draws.size

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1) -> SizingDecision:
        rate = sagc.straggler_rate(_tables(groups), self._settings.straggler_ratio)
        held = self._draws.held + batches
        if held < self._settings.dwell:
            self._draws = msgspec.structs.replace(self._draws, held=held)
            reason = f"stays {self.size}: drawn for {self._settings.dwell} steps, {held} of them done"
        else:
            self._draws = self._draw(self._draws.drawn)
            reason = f"{self.size} by chance: draw {sum(self._draws.drawn.values())}"
        return SizingDecision(size=self.size, reason=reason, figures=_figures(self.size, rate))

    def snapshot(self) -> dict[str, object]:
        return msgspec.structs.asdict(self._draws)

    def restore(self, state: dict[str, object]) -> None:
        """Continue after the draws of ``state``; start over from a checkpoint of another kind of sizing."""
        if "drawn" in state:
            draws = msgspec.convert(state, _Draws, str_keys=True)
            drawn = {size: draws.drawn.get(size, 0) for size in self._settings.sizes}
            known = draws.size in self._settings.sizes
            self._draws = msgspec.structs.replace(draws, drawn=drawn) if known else self._draw(drawn)

    def _draw(self, drawn: dict[int, int]) -> _Draws:
        sizes = self._settings.sizes
        shares = self._settings.shares
        number = sum(drawn.values())
        total = sum(shares)
        behind = [
            max(share / total * (number + 1) - drawn[size], 0.0) for size, share in zip(sizes, shares, strict=True)
        ]
        point = derive_seed(self._seed, "group size", number) / 2**63 * sum(behind)
        # Rounding may leave the point just beyond the last size that is behind: take that one.
        chosen = max(size for size, weight in zip(sizes, behind, strict=True) if weight > 0)
        for size, weight in zip(sizes, behind, strict=True):
            if point < weight:
                chosen = size
                break
            point -= weight
        return _Draws(drawn={**drawn, chosen: drawn[chosen] + 1}, size=chosen)


class StragglerAwareSize:
    """SAGC: the largest groups whose long-term straggler rate stays within a budget (see ``control.policies.sagc``).

    Each step it counts the groups that straggled, learns the risk of every size (larger groups are split into smaller
    ones, so that one size informs all below it), moves a virtual queue by the rate above the budget, and chooses the
    size of best utility less queue times risk. Risk is taken optimistically, so that no size is given up untried; a
    size is kept for ``dwell`` steps at least. ``reuse`` false is the ablation in which a size informs only itself."""

    def __init__(self, settings: GroupSizing, start: int, steps: int, *, reuse: bool = True) -> None:
        self._settings = settings
        self._sizes = settings.sizes
        self._reuse = reuse and settings.informs_smaller
        self._utilities = sagc.utilities_of(settings.sizes)
        self._memory = sagc.SizingMemory(
            size=settings.sizes[-1] if settings.budget is None else start,
            budget=settings.budget or 0.0,
            asked=settings.budget or 0.0,
            tradeoff=settings.tradeoff_over(steps),
            calibration_steps=settings.calibration_over(steps),
        )

    @property
    def size(self) -> int:
        return self._memory.size

    @property
    def budget(self) -> float:
        """The long-term straggler rate that is kept: the recipe's, or what was measured (0: not yet)."""
        return self._memory.budget

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1) -> SizingDecision:
        settings = self._settings
        tables = _tables(groups)
        rate = sagc.straggler_rate(tables, settings.straggler_ratio)
        if rate is None:
            return self._decided(None, f"stays {self.size}: no group of the step was large enough to tell")
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
        self._memory = msgspec.structs.replace(memory, held=memory.held + batches)
        text = self._calibrate() if calibrating else ""
        if not self.budget:
            progress = f"step {memory.steps} without a budget, {memory.calibration_steps} are to measure it"
            return self._decided(rate, text or f"stays {self.size}: {progress}", notify=bool(text))
        chosen = self._choose()
        text = text or self._warning()
        return self._decided(rate, f"{text}; {chosen}" if text else chosen, notify=bool(text))

    def snapshot(self) -> dict[str, object]:
        return msgspec.structs.asdict(self._memory)

    def restore(self, state: dict[str, object]) -> None:
        """Continue with what ``state`` knows; start over from a checkpoint of another kind of sizing.

        Sizes that the recipe has no more are forgotten; where the current one is among them, the first size is taken.
        Where the recipe asks for another budget (a fork), what was spent of the one before does not count, and one that
        it leaves out is measured again, as with other ``calibration_steps``; what is known of the sizes stays."""
        if "budget" not in state:
            return
        memory = msgspec.convert(state, sagc.SizingMemory, str_keys=True)
        new = self._memory
        other_steps = self._settings.calibration_steps not in (None, memory.calibration_steps)
        other_budget = memory.asked != new.asked or other_steps
        if other_budget:
            memory = msgspec.structs.replace(memory, budget=new.budget, queue=0.0, steps=0, rate_sum=0.0, warned=False)
        starts_over = memory.size not in self._sizes or (other_budget and not new.asked)
        size = new.size if starts_over else memory.size
        self._memory = msgspec.structs.replace(
            memory,
            size=size,
            asked=new.asked,
            tradeoff=self._settings.tradeoff or memory.tradeoff or new.tradeoff,
            calibration_steps=self._settings.calibration_steps or memory.calibration_steps or new.calibration_steps,
        )

    def _calibrate(self) -> str:
        """One step without a budget is done. After the last one at the largest size (and at the smallest, where they do
        not inform each other) it is measured, and the queue made as if it had been in force from the start. Where too
        few groups of either were seen, the middle size stays. Returns what the user is to know."""
        memory = self._memory
        sizes = self._sizes
        if memory.warned:
            return ""
        seen = {size: memory.straggling[size] + memory.calm[size] for size in (sizes[-1], sizes[0])}
        done = memory.steps
        needed = memory.calibration_steps
        if not self._reuse:
            if memory.size != sizes[0]:
                if 2 * done >= needed:
                    self._memory = msgspec.structs.replace(memory, size=sizes[0], held=0)
                return ""
            # Rounds that still bring groups of the largest size make the part at the smallest one longer.
            late = seen[sizes[0]] < sagc.FEWEST_GROUPS
            done = memory.held
            needed = needed if late else needed // 2
        if done < needed:
            return ""
        fewest = min(seen, key=seen.__getitem__)
        if seen[fewest] < sagc.FEWEST_GROUPS:
            middle = sizes[len(sizes) // 2]
            self._memory = msgspec.structs.replace(memory, size=middle, held=0, warned=True)
            return (
                f"group size stays {middle}: {seen[fewest]:.0f} groups of size {fewest} are too few to measure a "
                "budget by; set group_sizing.budget, or more group_sizing.advanced.calibration_steps"
            )
        budget, text = sagc.measured_budget(sagc.risks_of(memory, sizes, 0.0), self._settings.tightening)
        memory = msgspec.structs.replace(memory, budget=budget, held=max(memory.held, self._settings.dwell))
        self._memory = msgspec.structs.replace(memory, queue=max(memory.overspent, 0.0))
        return text

    def _choose(self) -> str:
        memory = self._memory
        settings = self._settings
        risks = sagc.risks_of(memory, self._sizes, settings.optimism)
        if sagc.is_out_of_reach(memory, self._sizes[0]):
            # The queue is at its cap, where the utility of the largest size outweighs a risk that hardly differs.
            best = self._sizes[0]
        else:
            best = sagc.best_size(self._utilities, risks, queue=memory.queue, tradeoff=memory.tradeoff)
        standing = f"queue {memory.queue:.2f}, risk {risks[best].low:.2f} at size {best}, budget {memory.budget:g}"
        if best == memory.size:
            return f"stays {best}: {standing}"
        if memory.held < settings.dwell:
            return f"stays {memory.size} for {settings.dwell} steps, {memory.held} of them done: {standing}"
        self._memory = msgspec.structs.replace(memory, size=best, held=0)
        return f"{memory.size} to {best}: {standing}"

    def _warning(self) -> str:
        """The warning that the user gets, once, where no size meets the budget."""
        memory = self._memory
        smallest = self._sizes[0]
        if memory.warned or memory.steps < self._settings.dwell or not sagc.is_out_of_reach(memory, smallest, SURE):
            return ""
        self._memory = msgspec.structs.replace(memory, warned=True)
        risk = sagc.risks_of(memory, [smallest], 0.0)[smallest].mean
        least = math.ceil(risk * 20) / 20
        could_meet = f"the budget that it could meet is {least:g}"
        remedy = could_meet if least < 1 else "raise group_sizing.advanced.straggler_ratio"
        return (
            f"no size meets group_sizing.budget = {memory.budget:g}: size {smallest} straggles in {risk:.2f} of its "
            f"groups; {remedy}"
        )

    def _decided(self, rate: float | None, reason: str, *, notify: bool = False) -> SizingDecision:
        memory = self._memory
        figures = _figures(memory.size, rate) | {"sizing/queue": memory.queue, "sizing/budget": memory.budget}
        risks = sagc.risks_of(memory, self._sizes, self._settings.optimism)
        figures.update({f"sizing/risk_{size}": risk.mean for size, risk in risks.items()})
        return SizingDecision(size=memory.size, reason=reason, figures=figures, notify=notify)


def _tables(groups: Sequence[GroupLengths]) -> list[sagc.LengthTable]:
    """Lengths of the groups of each size, infinite where a member was truncated: its length is not known. Groups of
    which a race left nothing are not counted."""
    by_size: dict[int, list[GroupLengths]] = {}
    for group in groups:
        if any(group.lengths):
            by_size.setdefault(len(group.lengths), []).append(group)
    tables = []
    for same in by_size.values():
        table_GL = np.array([sagc.with_cut_members(group.lengths) for group in same], dtype=np.float64)
        for row, group in enumerate(same):
            if True in group.truncated:
                table_GL[row, list(group.truncated)] = np.inf
        tables.append(table_GL)
    return tables


def _figures(size: int, rate: float | None) -> dict[str, float]:
    return {"sizing/size": float(size)} | ({} if rate is None else {"sizing/straggler_rate": rate})
