"""Choice of the training set of each prompt that is drawn, in the exact shares of the recipe, and pools by difficulty,
which skip prompts that are drawn again. Pure: ``launch`` orders draws by it, ``apply`` counts the prompts that come and
notes their rewards, and the state of both is in the snapshot.

Sets are taken by Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980, theorem 1): after
any number of prompts, each of n sets has its share of them to within 1 - 1 / (2 n - 2) prompts. The largest remainder
alone does not hold this: with six sets and more a set may be off by more than one prompt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from streamrl.base.types import Texts
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.run_state import DrawnSet, PoolCount, PromptPool
from streamrl.control.settings import ControlSettings
from streamrl.recipe.sections import ONE_SET, Pool


def draw_order(pool: PromptPool, shares: Mapping[str, float], count: int) -> do.DrawPrompts:
    """Return the order to draw the prompts that lack of the next ``count``, each from the set whose turn it is.
    ``shares``: share of each set (empty: the run has a single source)."""
    if not shares:
        return do.DrawPrompts(count=count)
    reserved = Counter({name: len(drawn.reserve) for name, drawn in pool.sets.items()})
    names: list[str] = []
    for name in sets_in_turn(pool.sets, shares, count):
        if reserved[name]:
            reserved[name] -= 1
        else:
            names.append(name)
    return do.DrawPrompts(count=len(names), sets=tuple(names))


def sets_in_turn(drawn: Mapping[str, DrawnSet], shares: Mapping[str, float], count: int) -> Texts:
    """Return the sets of the next ``count`` prompts, after those that are counted in ``drawn``. A set whose source is
    exhausted is left out, and the others keep their shares of each other. Empty: no set has prompts."""
    open_shares = {name: share for name, share in shares.items() if name not in drawn or not drawn[name].exhausted}
    total = sum(open_shares.values())
    counts = {name: drawn[name].counted if name in drawn else 0 for name in open_shares}
    names: list[str] = []
    if open_shares:
        for number in range(sum(counts.values()) + 1, sum(counts.values()) + count + 1):
            due = {name: share / total * number - counts[name] for name, share in open_shares.items()}
            name = _first_due(due, {name: share / total for name, share in open_shares.items()})
            counts[name] += 1
            names.append(name)
    return tuple(names)


def _first_due(due: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return the set that must be drawn first, of those that may be drawn now. ``due``: prompts by which each set is
    behind its share, once the prompt that is drawn now is counted."""
    if len(due) == 1:
        return next(iter(due))
    slack = 1 / (2 * len(due) - 2)
    # By rounding, of two sets that are due by a half none may be.
    may_follow = [name for name in due if due[name] >= slack] or list(due)
    return min(may_follow, key=lambda name: ((1 - slack - due[name]) / shares[name], name))


def take_drawn(
    pool: PromptPool,
    refs: Sequence[PromptRef],
    event: on.PromptsDrawn,
    settings: ControlSettings,
    out: list[ControlAction],
) -> list[PromptRef]:
    """Count the prompts that were drawn, close sets that are exhausted, and return the prompts that may be launched, in
    the order of their sets' turns. Prompts that pools skip do not count for the share of their set; those of other sets
    wait in reserve until the missing ones have come."""
    names = event.sets
    if settings.pools and not names:
        names = (ONE_SET,) * len(refs)
    if not names and not event.exhausted_sets:
        return list(refs)
    for name, ref in zip(names, refs, strict=True):
        drawn = pool.sets.setdefault(name, DrawnSet())
        drawn.drawn += 1
        if not settings.pools or _is_admitted(pool, drawn, ref, settings.pools):
            drawn.reserve.append(ref)
        else:
            drawn.skipped += 1
    in_turn: list[PromptRef] = []
    for name in event.exhausted_sets:
        in_turn += _close_set(pool, name)
    for name, drawn in pool.sets.items():
        # Twice, because the last prompts of an epoch and the first of the next one may be the same.
        if drawn.skipped_in_a_row > 2 * drawn.prompts_known and not drawn.exhausted:
            in_turn += _close_set(pool, name)
            prompts = f"{drawn.prompts_known} prompts of prompts.train {name}".rstrip()
            out.append(do.Decision(subject="prompts", reason=f"all {prompts} are in pools that keep none"))
    shares = settings.shares or {ONE_SET: 1.0}
    while (turn := sets_in_turn(pool.sets, shares, 1)) and turn[0] in pool.sets and pool.sets[turn[0]].reserve:
        drawn = pool.sets[turn[0]]
        drawn.counted += 1
        in_turn.append(drawn.reserve.pop(0))
    return in_turn


def no_set_left(pool: PromptPool, shares: Mapping[str, float]) -> bool:
    """Return whether all sets are exhausted, or the single source is."""
    return not sets_in_turn(pool.sets, shares or {ONE_SET: 1.0}, 1)


def note_reward(pool: PromptPool, prompt_id: str, mean_reward: float, shares: Mapping[str, float]) -> None:
    """Note the mean reward of a group of a prompt, which is its difficulty from now on."""
    if prompt_id not in pool.rewards:
        name = prompt_id.partition("/")[0] if shares else ONE_SET
        pool.sets.setdefault(name, DrawnSet()).prompts_known += 1
    pool.rewards[prompt_id] = mean_reward


def _is_admitted(pool: PromptPool, drawn: DrawnSet, ref: PromptRef, pools: Mapping[str, Pool]) -> bool:
    """Return whether a prompt that was drawn is launched. Of the prompts of each pool exactly its share is, rounded
    down."""
    mean_reward = pool.rewards.get(ref.prompt_id)
    names = [name for name, bounds in pools.items() if mean_reward is not None and bounds.holds(mean_reward)]
    if not names:
        drawn.skipped_in_a_row = 0
        return True
    keep = pools[names[0]].keep
    count = pool.pools.setdefault(names[0], PoolCount())
    count.drawn += 1
    is_admitted = math.floor(count.drawn * keep) > count.launched
    count.launched += is_admitted
    drawn.skipped_in_a_row = drawn.skipped_in_a_row + 1 if keep == 0 else 0
    return is_admitted


def _close_set(pool: PromptPool, name: str) -> list[PromptRef]:
    """Close a set, and return the prompts that it had in reserve."""
    closed = pool.sets.setdefault(name, DrawnSet())
    closed.exhausted = True
    for drawn in pool.sets.values():
        drawn.counted = 0  # the shares of the sets that are left are kept from now on
    refs = closed.reserve
    closed.reserve = []
    return refs
