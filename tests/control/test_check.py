"""``violations`` says what is wrong with a state: states that are wrong by hand, and bugs planted in control."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import pytest
from oracle.control_walks import CrashWorld, random_run
from oracle.control_world import CONTINUOUS, SORTED, World, control_settings, through_bytes

from streamrl.base.types import Baseline, DropReason, FinishReason
from streamrl.buffers.rollout_buffer import Member, RolloutBuffer
from streamrl.buffers.slots import Slots
from streamrl.control import actions as do
from streamrl.control import apply, decide, mixture
from streamrl.control.check import INVARIANTS, violations
from streamrl.control.reward_tracker import DiscountedSum
from streamrl.control.run_state import Batch, DrawnSet, RunState
from streamrl.recipe.scheduling import KvAdmission, LengthSorted

CHOSEN = control_settings(rounds=CONTINUOUS, max_staleness=1, steps=2, admission=KvAdmission())
PAUSING = control_settings(
    rounds=SORTED, length_sorted=LengthSorted(cohort_batches=2, partial=True), max_staleness=1, steps=2, in_turns=True
)


def world_at(place: str) -> World:
    """A run of continuous rounds: groups 0 to 3 are launched, 0 joins the batch, 1 fills it; then the step is done. In
    the ranks' turn: the same groups in rounds that pause, 2 and 3 are paused."""
    world = World(PAUSING if place == "turn" else CHOSEN)
    world.begin()
    world.answer_draw()
    for trajectory in sorted(world.running)[: {"open": 2, "closed": 4, "turn": 4, "pushed": 4, "ended": 0}[place]]:
        world.score(trajectory, 1.0, 5)
    if place == "pushed":
        world.step()
    elif place == "ended":
        world.run_to_end()
    return world


def put(name: str, value: Any) -> Callable[[RunState], None]:
    """Set a field of the state, by a path of attributes and keys: ``buffer.untrained.2.open``."""

    def change(state: RunState) -> None:
        *outer, last = name.split(".")
        owner: Any = state
        for part in outer:
            owner = owner[int(part)] if isinstance(owner, dict) else getattr(owner, part)
        if isinstance(owner, dict):
            owner[int(last)] = value
        else:
            setattr(owner, last, value)

    return change


BASELINE = Baseline(total=1.0, weight=2.0, deviation=1.0)
SCORED = Member(oldest_version=0, finish_reason=FinishReason.STOP)
WRONG = [
    ("open", put("buffer.issued", 9), "accounting: 9 were issued, and (0, 0, 8) trained, dropped and in"),
    ("open", lambda s: put("buffer.untrained.0", s.buffer.batched[0])(s), "groups: groups {0} are in a batch and wait"),
    ("open", put("buffer.batched.0.open", 1), "groups: group 0 is in a batch, and 1 of its members have no reward"),
    ("open", put("buffer.untrained.2.members", {}), "groups: group 2 has ended and is kept"),
    ("open", put("buffer.untrained.2.open", 1), "groups: group 2 counts 1 members without a reward, 0 have one"),
    ("open", put("buffer.untrained.2.keep", 3), "groups: group 2 keeps 3 of 2 trajectories"),
    ("open", put("buffer.untrained.2.members.7", SCORED), "groups: group 2 keeps 2 of 2 trajectories and has the memb"),
    ("open", put("buffer.batched.0.members.2", SCORED), "groups: group 0 has 3 rewards, and a batch takes 2"),
    ("open", put("buffer.untrained.2.weight", 1), "groups: group 2 weighs 1 in place of 2"),
    ("open", put("next_group_id", 3), "groups: group 3 has a number that will be given again, after 3"),
    ("open", put("buffer.untrained.2.launch_version", 1), "groups: group 2 is sampled by version 1, and engines serve"),
    ("open", put("buffer.untrained.2.members.0.oldest_version", -1), "indexes: group 2 says 0, members -1"),
    ("open", put("buffer.ready", [2]), "indexes: ready is [2], and the groups say []"),
    ("open", put("buffer.paused", [2]), "indexes: paused is [2], and the groups say []"),
    ("open", put("buffer.by_version", {0: 5}), "indexes: by_version is {0: 5}"),
    ("open", put("batch.groups", [0, 1]), "batch: batch 0 has the groups [0, 1], and the buffer [0]"),
    ("open", put("batch.filled", 3), "batch: batch 0 says (3, 2, 10) of weight, samples and tokens, its groups (2, 2"),
    ("closed", put("batch.target", 2), "batch: the last group of batch 0 joined when it was full"),
    ("closed", put("batch.target", 6), "batch: batch 0 is closed, with 2 of 6 missing, and there are prompts"),
    ("open", put("next_batch", Batch(batch_id=1, target=4)), "batch: another batch is open beside batch 0"),
    ("open", put("buffer.untrained.2.oldest_version", -2), "staleness: group 2 has a token of version -2, 0 trains it"),
    ("closed", put("buffer.untrained.2.oldest_version", -1), "staleness: group 2 has a token of version -1, 1 trains"),
    ("open", put("buffer.dropped", {DropReason.STALE: 2}), "staleness: 2 trajectories were dropped as stale"),
    ("open", put("slots.in_use", 7), "slots: 7 are in use, and groups and versions that are not live have 8"),
    ("open", put("slots.in_use", 9), "slots: 9 are in use, and there are 8"),
    ("pushed", put("slots.consumed", {2: 4}), "slots: versions [2] keep some: 0 is live, 1 trained"),
    ("pushed", put("live_version", -1), "versions: engines serve -1, the trainer holds 1"),
    ("open", put("batch.batch_id", 3), "versions: version 0 trains batch 3"),
    ("open", put("saved_version", 1), "versions: 1 is saved, the trainer holds 0"),
    ("closed", put("batch.samples", 3), "orders: StepOptimizer(batch_id=0, policy_version=1, groups=2, samples=4"),
    ("closed", put("pending.checkpoint", 0), "orders: version 0 is left before it is live and saved"),
    ("open", put("pending.push", 1), "orders: version 1 is pushed: 0 is live, 0 trained"),
    ("pushed", put("pending.evaluation", do.Evaluate(0, 0)), "orders: weights change under Evaluate(policy_version=0"),
    ("open", put("pending.checkpoint", 0), "orders: version 0 is saved, and the trainer holds 0"),
    ("open", put("pending.paused_for", 1), "orders: engines are paused for version 1, and 0 is made"),
    ("turn", put("buffer.untrained.2.paused", False), "turns: it is the ranks' turn, and groups [2] and None"),
    ("turn", put("pending.evaluation", do.Evaluate(0, 0)), "turns: it is the ranks' turn, and groups [] and Evaluate("),
    ("turn", put("pending.paused_for", 1), "turns: engines are paused for version 1"),
    ("open", put("admission.limit", 1), "admission: 6 trajectories are in flight, and 2 may be"),
    ("open", put("buffer.batched.0.baseline", BASELINE), "tracker: group 0 in a batch has the baseline"),
    ("open", put("tracker.prompts", {"a": DiscountedSum(total=1.0, weight=2.0)}), "tracker: knows 1 prompts of an ob"),
    ("open", put("tracker.rewards", DiscountedSum(total=1.0, weight=2.0)), "tracker: knows 0 prompts of an ob"),
    ("open", put("stop_reason", "stop"), "drain: the run ends, with Accounting("),
    ("open", put("prompts.sets", {"a": DrawnSet(drawn=99)}), "mixture: sets have given 99 prompts, "),
    ("ended", put("trainer_version", 3), "drain: the run has ended (finished), and something is under way"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "change", "said"), WRONG, ids=[said[:40] for _, _, said in WRONG])
def test_a_wrong_state_is_named(place: str, change: Callable[[RunState], None], said: str) -> None:
    world = world_at(place)
    state = through_bytes(world.core.snapshot()).state
    assert violations(state, world.core.rules) == []
    change(state)
    found = violations(state, world.core.rules)
    assert any(text.startswith(said) for text in found), found


def test_every_invariant_has_a_state_that_is_wrong() -> None:
    assert {said.partition(":")[0] for _, _, said in WRONG} == set(INVARIANTS)


def nothing(*arguments: object, **options: object) -> None: ...


PLANTED: list[tuple[str, Any, str, Callable[..., object], str]] = [
    ("accounting", RolloutBuffer, "_dropped", nothing, "race"),
    ("groups", RolloutBuffer, "_leave_untrained", nothing, "continuous, regenerating"),
    ("indexes", RolloutBuffer, "resume", nothing, "deferred prompts resumed"),
    ("batch", Batch, "take", nothing, "synchronous"),
    ("staleness", decide, "drop_stale", nothing, "continuous, regenerating"),
    ("slots", Slots, "version_live", nothing, "synchronous"),
    ("versions", apply, "batch_after", lambda state, settings: Batch(batch_id=0, target=1), "synchronous"),
    ("orders", apply, "order_checkpoint", lambda state, version, out: put("pending.checkpoint", 0)(state), "sorted"),
    ("mixture", mixture, "_first_due", lambda due, shares: min(due), "synchronous"),
    ("drain", decide, "drop_group", nothing, "synchronous"),
]


@pytest.mark.parametrize(("invariant", "owner", "name", "bug", "composition"), PLANTED)
def test_a_planted_bug_is_found_by_a_walk(
    invariant: str, owner: Any, name: str, bug: Callable[..., object], composition: str
) -> None:
    with mock.patch.object(owner, name, bug), pytest.raises(AssertionError, match=f"{invariant}: "):
        for seed in range(60):
            random_run(Random(seed), composition, "random", world_of=CrashWorld if seed % 2 else World)
