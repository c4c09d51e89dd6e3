"""Parts of straggler-aware group control: the straggler event, the risk of each size, and what to choose.

After arXiv 2606.02218 ("straggler-aware group sizing"), whose constants and update rule are not public: this is a
controller of that outline (a discounted Beta posterior for each size and a virtual queue on the long-term rate), not
the published one. Pure functions; the state between steps is in ``SizingMemory``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.recipe.scheduling import SMALLEST_SIZE

LengthTable = NDArray[np.float64]
"""``_GL``: lengths of G groups of equally many members L, by sample number; infinite where a member was truncated."""


CALIBRATED_SHARE = 0.5
"""Where a measured budget is, on the way from the risk of the smallest size to that of the largest."""
FEWEST_GROUPS = 6.0
"""Fewest groups of the largest and of the smallest size by which a budget is measured."""
QUEUE_CAP = 5.0
"""Largest queue, in multiples of V, while no size meets the budget."""


class SizingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All that straggler-aware sizing knows between steps; it is what a checkpoint keeps.

    ``held``: steps since ``size`` was chosen. ``steps``: with a complete group, so far. One that trained several
    batches counts as so many in both. ``rate_sum``: sum of their straggler rates. ``queue``: the virtual queue Q.
    ``budget``: the one in force (0: not measured yet); ``asked``: that of the recipe (0: none). ``straggling``,
    ``calm``: discounted numbers of groups of each size that straggled and that did not. ``warned``: the warning that no
    size meets the budget, or that none could be measured, was given. ``tradeoff``, ``calibration_steps``: in force
    since the run began, also where it has got more steps since."""

    size: int
    budget: float
    held: int = 0
    steps: int = 0
    rate_sum: float = 0.0
    queue: float = 0.0
    straggling: dict[int, float] = {}
    calm: dict[int, float] = {}
    asked: float = 0.0
    warned: bool = False
    tradeoff: float = 0.0
    calibration_steps: int = 0

    @property
    def overspent(self) -> float:
        """Excess of the sum of all straggler rates over the budget's, in whole steps of rate 1."""
        return self.rate_sum - self.steps * self.budget


class SizeRisk(msgspec.Struct, frozen=True, kw_only=True):
    """Posterior of one size: its mean, and the optimistic (lower) bound that decides."""

    mean: float
    low: float


def count_stragglers(groups: Sequence[LengthTable], size: int, ratio: float) -> tuple[int, int]:
    """(groups that straggled, groups) of ``size``, after each group is split into such by generation index.

    Members are exchangeable given their prompt, so that any fixed split is an unbiased sample of the smaller size.
    Samples left over are not counted. A group straggles when its longest length is at least ``ratio`` times its median
    one. Lengths are 1 or more."""
    straggled = 0
    number = 0
    for table_GL in groups:
        whole = table_GL.shape[1] // size * size
        rows_RS = np.sort(table_GL[:, :whole].reshape(-1, size), axis=1)
        median_R = (rows_RS[:, (size - 1) // 2] + rows_RS[:, size // 2]) / 2
        straggled += int(np.count_nonzero(rows_RS[:, -1] >= ratio * median_R))
        number += len(rows_RS)
    return straggled, number


def straggler_rate(groups: Sequence[LengthTable], ratio: float) -> float | None:
    """Share of the groups that straggled, each at the size that it has; None where none is large enough to tell."""
    telling = [table_GL for table_GL in groups if table_GL.shape[1] >= SMALLEST_SIZE]
    counts = [count_stragglers([table_GL], table_GL.shape[1], ratio) for table_GL in telling]
    number = sum(number for _, number in counts)
    return sum(straggled for straggled, _ in counts) / number if number else None


def learn(
    memory: SizingMemory,
    groups: Sequence[LengthTable],
    sizes: Sequence[int],
    *,
    ratio: float,
    discount: float,
    reuse: bool,
) -> SizingMemory:
    """Forget a little of every size, since the policy drifts, and count the groups of this step. With ``reuse`` a group
    also informs every smaller size; without it only its own."""
    straggling = dict(memory.straggling)
    calm = dict(memory.calm)
    for size in sizes:
        informing = [table_GL for table_GL in groups if reuse or table_GL.shape[1] == size]
        straggled, number = count_stragglers(informing, size, ratio)
        straggling[size] = straggling.get(size, 0.0) * discount + straggled
        calm[size] = calm.get(size, 0.0) * discount + number - straggled
    return msgspec.structs.replace(memory, straggling=straggling, calm=calm)


def risks_of(memory: SizingMemory, sizes: Sequence[int], optimism: float) -> dict[int, SizeRisk]:
    """The posterior of each size, ascending, under Jeffreys' prior. ``low``: ``optimism`` deviations below the mean,
    and never below that of a smaller size, because risk cannot fall with the size."""
    risks: dict[int, SizeRisk] = {}
    low = 0.0
    for size in sizes:
        straggling = memory.straggling.get(size, 0.0)
        calm = memory.calm.get(size, 0.0)
        mean = (straggling + 0.5) / (straggling + calm + 1)
        deviation = math.sqrt(mean * (1 - mean) / (straggling + calm + 2))
        low = max(low, mean - optimism * deviation)
        risks[size] = SizeRisk(mean=mean, low=low)
    return risks


def utilities_of(sizes: Sequence[int]) -> dict[int, float]:
    """The utility of each size, ascending: the variance that it takes off the gradient, scaled from 0 to 1.

    With a leave-one-out baseline (Kool et al. 2019) the variance within prompts is proportional to 1 / (G - 1) at equal
    prompts and to G / (G - 1) at equal samples. These differ by a constant, so scaled to 0..1 they are equal."""
    least = 1 / (sizes[-1] - 1)
    most = 1 / (sizes[0] - 1)
    return {size: (most - 1 / (size - 1)) / (most - least) if most > least else 0.0 for size in sizes}


def is_out_of_reach(memory: SizingMemory, smallest: int, deviations: float = 0.0) -> bool:
    """Return whether no size meets the budget: the risk of size ``smallest``, so many deviations below its mean, is
    above it, and risk cannot fall with the size. False while no group told anything of that size."""
    seen = memory.straggling.get(smallest, 0.0) + memory.calm.get(smallest, 0.0)
    return seen >= 1 and risks_of(memory, [smallest], deviations)[smallest].low > memory.budget


def spend(
    memory: SizingMemory, rate: float, batches: int, *, smallest: int, tightening: float, tradeoff: float
) -> SizingMemory:
    """Charge the straggler rate of so many batches to the budget: Q grows by what is above it. A long round that trains
    several batches at once holds as many groups more, and more that straggle than the short ones before it.

    ``tightening`` works while the run is over its budget, to pay back what the first steps overspent. Always on, it
    would hold the long-term rate that far below the budget. The cap is an anti-windup: without it a stretch in which no
    size meets the budget would pin the smallest one long after. Where size ``smallest`` meets it, debts can be paid
    back and none is forgotten: where risks are close, a smaller size is chosen at a Q that is above any fixed cap."""
    after = msgspec.structs.replace(memory, steps=memory.steps + batches, rate_sum=memory.rate_sum + batches * rate)
    if not memory.budget:
        return after
    target = memory.budget - (tightening if after.overspent > 0 else 0.0)
    queue = max(memory.queue + batches * (rate - target), 0.0)
    if is_out_of_reach(memory, smallest):
        queue = min(queue, max(memory.queue, QUEUE_CAP * tradeoff))
    return msgspec.structs.replace(after, queue=queue)


def best_size(utilities: Mapping[int, float], risks: Mapping[int, SizeRisk], *, queue: float, tradeoff: float) -> int:
    """The size that maximises V U(G) - Q risk(G) (drift plus penalty); the larger of two equals."""
    return max(utilities, key=lambda size: (tradeoff * utilities[size] - queue * risks[size].low, size))


def measured_budget(risks: Mapping[int, SizeRisk], tightening: float) -> tuple[float, str]:
    """(budget, why): ``CALIBRATED_SHARE`` of the way between the risks of the smallest and the largest size. Where they
    hardly differ, a budget that the largest size meets."""
    smallest = risks[min(risks)].mean
    largest = risks[max(risks)].mean
    spread = f"size {min(risks)} straggles in {smallest:.2f} of its groups, size {max(risks)} in {largest:.2f}"
    if largest - smallest <= 2 * tightening:
        budget = round(min(max(smallest, largest) + tightening, 1.0), 4)
        return budget, f"group_sizing.budget = {budget:g}, measured: {spread}, too near for sizes to matter"
    budget = round(smallest + CALIBRATED_SHARE * (largest - smallest), 4)
    return budget, f"group_sizing.budget = {budget:g}, measured: {spread}"


def with_cut_members(lengths: Sequence[int]) -> list[float]:
    """``lengths`` of a group, with an estimate for members that a race cut (0): mirrored about the median. With k cut,
    the i-th longest is the longest that ended x (length k+1 / length i), lengths ascending.

    A race cuts the longest, so that the others say nothing of stragglers. Where log lengths of a prompt are spread
    alike above and below their median, and fewer than half are cut, groups straggle about as often as without a race.
    The order of samples decides which of the shortest stands for which member, so that parts of a group are fair."""
    ended = sorted(length for length in lengths if length)
    cut = len(lengths) - len(ended)
    if not cut:
        return list(lengths)
    mirror = ended[min(cut, len(ended) - 1)]
    limit = ended[min(cut, len(ended)) - 1]
    shortest = (length for length in lengths if 0 < length <= limit)
    return [length or ended[-1] * mirror / next(shortest, mirror) for length in lengths]
