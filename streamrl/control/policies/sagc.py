"""Functions of straggler-aware group sizing: counts of stragglers, the risk of each size, and the choice of a size.
``group_sizing.StragglerAwareSize`` calls them, and reports of the simulator count stragglers with them.

After arXiv 2606.02218 ("straggler-aware group sizing"), whose constants and update rule are not public: a controller of
the same outline (a discounted Beta posterior for each size and a virtual queue on the long-term rate). Functions are
pure; the state between steps is in ``SizingMemory``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.recipe.scheduling import SMALLEST_SIZE

LengthTable = NDArray[np.float64]
"""``_GL``: lengths of G groups of equally many members L, by sample number; infinite where a member was truncated."""


CALIBRATED_SHARE = 0.5
"""Position of a measured budget between the risk of the smallest size (0) and the risk of the largest (1)."""
FEWEST_GROUPS = 6.0
"""Number of groups of the largest and of the smallest size that a measured budget needs."""
QUEUE_CAP = 5.0
"""Largest queue, in multiples of V, while no size meets the budget."""


class SizingMemory(Struct, frozen=True, kw_only=True):
    """State of straggler-aware sizing between steps, which a checkpoint has. Steps that trained several batches count
    as several steps.

    ``size``: current group size;
    ``budget``: budget in force (0: not measured yet);
    ``held``: steps since ``size`` was chosen;
    ``steps``: steps so far with a complete group;
    ``rate_sum``: sum of the straggler rates of these steps;
    ``queue``: virtual queue Q;
    ``straggling``, ``calm``: discounted numbers of groups of each size that straggled and that did not;
    ``asked``: budget of the recipe (0: none);
    ``warned``: whether the user was warned that no size meets the budget, or that no budget could be measured;
    ``tradeoff``, ``calibration_steps``: values for the number of steps at the start of the run, which stay when a user
      changes this number."""

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
        """Sum of all straggler rates above the budget, in steps."""
        return self.rate_sum - self.steps * self.budget


class SizeRisk(Struct, frozen=True, kw_only=True):
    """Posterior risk of one size. ``mean``: posterior mean; ``low``: optimistic bound, by which a size is chosen."""

    mean: float
    low: float


def count_stragglers(groups: Sequence[LengthTable], size: int, ratio: float) -> tuple[int, int]:
    """(number that straggled, number) of groups of ``size``, into which each group is split by sample number.

    Members are exchangeable given their prompt, so that any fixed split is an unbiased sample of the smaller size.
    Members beyond the last complete group are ignored. A group straggles when its longest length is at least ``ratio``
    times its median length. Lengths are 1 or more."""
    straggled = 0
    number = 0
    for table_GL in groups:
        members = table_GL.shape[1] // size * size
        rows_RS = np.sort(table_GL[:, :members].reshape(-1, size), axis=1)
        median_R = (rows_RS[:, (size - 1) // 2] + rows_RS[:, size // 2]) / 2
        straggled += int(np.count_nonzero(rows_RS[:, -1] >= ratio * median_R))
        number += len(rows_RS)
    return straggled, number


def straggler_rate(groups: Sequence[LengthTable], ratio: float) -> float | None:
    """Share of groups that straggled, each at its own size; None where no group has ``SMALLEST_SIZE`` members."""
    large_enough = [table_GL for table_GL in groups if table_GL.shape[1] >= SMALLEST_SIZE]
    counts = [count_stragglers([table_GL], table_GL.shape[1], ratio) for table_GL in large_enough]
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
    """Discount the counts of every size, since the policy drifts, and add the groups of this step. ``reuse``: whether a
    group informs every smaller size too."""
    straggling = dict(memory.straggling)
    calm = dict(memory.calm)
    for size in sizes:
        informing = [table_GL for table_GL in groups if reuse or table_GL.shape[1] == size]
        straggled, number = count_stragglers(informing, size, ratio)
        if size < SMALLEST_SIZE:
            straggled = 0  # too few members for a longest one to stand out from the median
        straggling[size] = straggling.get(size, 0.0) * discount + straggled
        calm[size] = calm.get(size, 0.0) * discount + number - straggled
    return replace(memory, straggling=straggling, calm=calm)


def risks_of(memory: SizingMemory, sizes: Sequence[int], optimism: float) -> dict[int, SizeRisk]:
    """Posterior risk of each of the ascending ``sizes`` under Jeffreys' prior. Its ``low`` is ``optimism`` standard
    deviations below the mean, and at least the ``low`` of any smaller size, since risk cannot fall with the size."""
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


def utilities_of(sizes: Sequence[int], earlier_samples: float = 0.0) -> dict[int, float]:
    """Utility of each of the ascending ``sizes``: the variance that it takes off the gradient, as a share of what the
    largest size takes off, from 0 to 1. ``earlier_samples``: samples in the baseline of a prompt beside siblings.

    With a leave-one-out baseline (Kool et al. 2019) the variance within prompts is proportional to 1 / (G - 1) at equal
    prompts and to G / (G - 1) at equal samples. These differ by a constant, so scaled to 0..1 they are equal. A
    baseline that has K earlier samples of the prompt leaves 1 / (K + G - 1) in place of 1 / (G - 1)."""
    variances = {size: 1 / (earlier_samples + size - 1) for size in sizes if earlier_samples + size > 1}
    utilities = dict.fromkeys(sizes, 0.0)
    smallest = min(variances.values())
    largest = max(variances.values())
    # Without siblings the variance is that of a baseline of the earlier samples alone.
    scale = 1 / (sizes[0] - 1) - 1 / (sizes[-1] - 1) if sizes[0] > 1 else 1.0
    if largest > smallest:
        utilities |= {size: (largest - variance) / scale for size, variance in variances.items()}
    return utilities


def is_out_of_reach(memory: SizingMemory, smallest: int, deviations: float = 0.0) -> bool:
    """Return whether no size meets the budget: even the risk of size ``smallest`` is above it, at ``deviations``
    standard deviations below its mean. False while no group has informed this size."""
    group_count = memory.straggling.get(smallest, 0.0) + memory.calm.get(smallest, 0.0)
    return group_count >= 1 and risks_of(memory, [smallest], deviations)[smallest].low > memory.budget


def spend(
    memory: SizingMemory, rate: float, batches: int, *, smallest: int, tightening: float, tradeoff: float
) -> SizingMemory:
    """Add the straggler rate of a step that trained ``batches`` to the virtual queue Q, which grows by the rate above
    the budget. A long round of several batches has several times the groups, and more of them straggle.

    ``tightening``: amount by which the target is below the budget while the run is over its budget, so that the run
    pays back what the first steps overspent. At all times it would keep the long-term rate below the budget. The cap of
    Q is an anti-windup: without it a period in which no size meets the budget would force the smallest size long after.
    Q has no cap while size ``smallest`` meets the budget: then it can fall again, and where risks are close, a smaller
    size is chosen only at a Q above any fixed cap."""
    after = replace(memory, steps=memory.steps + batches, rate_sum=memory.rate_sum + batches * rate)
    if not memory.budget:
        return after
    target = memory.budget - (tightening if after.overspent > 0 else 0.0)
    queue = max(memory.queue + batches * (rate - target), 0.0)
    if is_out_of_reach(memory, smallest):
        queue = min(queue, max(memory.queue, QUEUE_CAP * tradeoff))
    return replace(after, queue=queue)


def best_size(utilities: Mapping[int, float], risks: Mapping[int, SizeRisk], *, queue: float, tradeoff: float) -> int:
    """Size that maximises V U(G) - Q risk(G) (drift plus penalty); of equal sizes the larger one."""
    return max(utilities, key=lambda size: (tradeoff * utilities[size] - queue * risks[size].low, size))


def measured_budget(risks: Mapping[int, SizeRisk], tightening: float) -> tuple[float, str]:
    """(budget, message for the user): the point at ``CALIBRATED_SHARE`` between the risks of the smallest and the
    largest size. Where these risks hardly differ, a budget that the largest size meets."""
    smallest = risks[min(risks)].mean
    largest = risks[max(risks)].mean
    spread = f"size {min(risks)} straggles in {smallest:.2f} of its groups, size {max(risks)} in {largest:.2f}"
    if largest - smallest <= 2 * tightening:
        budget = round(min(max(smallest, largest) + tightening, 1.0), 4)
        return budget, f"group_sizing.budget = {budget:g}, measured: {spread}, too near for sizes to matter"
    budget = round(smallest + CALIBRATED_SHARE * (largest - smallest), 4)
    return budget, f"group_sizing.budget = {budget:g}, measured: {spread}"


def with_dropped_members(lengths: Sequence[int]) -> list[float]:
    """``lengths`` of a group, with an estimate for each member that a race dropped (length 0).

    The longest members are dropped, so that the others say nothing about stragglers. Estimates mirror the shortest
    known lengths about the median: with k dropped members the i-th longest is the longest known length x (length k+1 /
    length i), lengths ascending. Where log lengths of a prompt are spread alike above and below their median, and fewer
    than half are dropped, groups straggle about as often as without a race. Short lengths are assigned to dropped
    members in the order of samples, so that each part of a group is a fair sample."""
    known_lengths = sorted(length for length in lengths if length)
    dropped = len(lengths) - len(known_lengths)
    if not dropped:
        return list(lengths)
    middle = known_lengths[min(dropped, len(known_lengths) - 1)]
    limit = known_lengths[min(dropped, len(known_lengths)) - 1]
    short_lengths = (length for length in lengths if 0 < length <= limit)
    longest = known_lengths[-1]
    return [length or longest * middle / next(short_lengths, middle) for length in lengths]
