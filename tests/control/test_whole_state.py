"""The whole control state as a record: what is restored from it does what the original does, event by event."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import chain
from random import Random

import msgspec
import pytest
from control_world import control_settings
from msgspec import inspect
from policy_world import COMBINATIONS, PolicyWorld, random_run
from recovery_world import RecoveryWorld, TwinWorld, shown, through_bytes

from streamrl.base.errors import StreamRLError
from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.buffers.slots import KeptSlots
from streamrl.control import events as on
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.journal.outstanding import Outstanding
from streamrl.journal.whole_state import WholeState, keep_whole, restore_whole
from streamrl.recipe.scheduling import LengthSorted, RoundKind

ON_POLICY = [
    pair
    for pair in COMBINATIONS
    if not pair[0].startswith(("continuous", "losers resumed", "partial")) and pair[0] != "auto"
]


@pytest.mark.parametrize(("composition", "sizing"), COMBINATIONS)
def test_what_is_restored_does_what_the_original_does(composition: str, sizing: str) -> None:
    TwinWorld.random = Random(1)
    world = random_run(Random(1), composition, sizing, world_of=TwinWorld)
    assert isinstance(world, TwinWorld) and world.twins
    world.restore_a_twin()  # also at the very end


@pytest.mark.parametrize(("composition", "sizing"), ON_POLICY)
def test_what_waits_in_a_deterministic_run_is_restored_too(composition: str, sizing: str) -> None:
    TwinWorld.random = Random(3)
    random_run(Random(3), composition, sizing, world_of=TwinWorld, deterministic=True)


# ---- what if a field were forgotten --------------------------------------------------------------

DECIDES_NOTHING = {
    "buffer.groups.ticket.group_size": "of a group that was launched its own size counts",
    "batch.settled": "what is settled twice has no losers left; only a policy that counts its questions could tell",
    "due.final_ordered": "evaluations and checkpoints of a version are ordered once each, which its other fields say",
    "supply.cohort": "the policy asks for the cohort again, and finds its prompts waiting",
    "supply.waiting.noise": "a prompt that waits draws new noise, always; those that replay theirs are in the queue",
    **{
        f"launching.next_batch.{name}": "nothing joins a batch whose round was opened in advance before it is open"
        for name in ("groups", "samples", "tokens", "seats_taken", "domains", "shown_kind", "settled", "closed")
    },
}
"""Fields whose loss changes no decision of the policies that are there, and why. They are kept all the same."""
ATOMIC = ("id", "open_groups", "step", "stopped", "trained", "end", "ended", "answers")
"""Not taken apart: identities, and what is an order or an event as a whole."""


def forgotten(value: msgspec.Struct) -> Iterator[tuple[str, msgspec.Struct]]:
    """``value`` with one field after the other as if it had never been kept."""
    for field in msgspec.structs.fields(value):
        content = getattr(value, field.name)
        if field.default is not msgspec.NODEFAULT:
            empty = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            empty = field.default_factory()
        else:
            empty = content if isinstance(content, msgspec.Struct) else _nothing_like(content)
        if field.name != "schema" and content != empty:
            yield field.name, msgspec.structs.replace(value, **{field.name: empty})
        if field.name in ATOMIC:
            continue
        if isinstance(content, msgspec.Struct):
            for name, part in forgotten(content):
                yield f"{field.name}.{name}", msgspec.structs.replace(value, **{field.name: part})
        elif isinstance(content, tuple) and content and isinstance(content[0], msgspec.Struct):
            by_name: dict[str, dict[int, msgspec.Struct]] = {}
            for index, element in enumerate(content):
                for name, part in forgotten(element):
                    by_name.setdefault(name, {})[index] = part
            for name, parts in by_name.items():
                changed = tuple(parts.get(index, element) for index, element in enumerate(content))
                yield f"{field.name}.{name}", msgspec.structs.replace(value, **{field.name: changed})


def _nothing_like(content: object) -> object:
    return next(iter(type(content))) if isinstance(content, enum.Enum) else type(content)()


def noticed(settings: ControlSettings, log: list[on.ControlEvent], start: int, known: set[str]) -> dict[str, bool]:
    """For each field that is not empty after ``start`` events, and not ``known``: whether the rest of the run differs
    without it."""

    def rest(kept: WholeState) -> list[object]:
        state, outstanding = restore_whole(settings, kept)
        seen: list[object] = [outstanding.again(state), outstanding.kept_tokens]
        for event in log[start:]:
            outstanding.told(event)
            actions = state.handle(event)
            outstanding.ordered(actions)
            seen.append((actions, shown(state), outstanding.again(state), outstanding.trained_since(-1)))
        return seen

    state, outstanding = ControlState(settings), Outstanding()
    for event in log[:start]:
        outstanding.told(event)
        outstanding.ordered(state.handle(event))
    kept = through_bytes(keep_whole(state, outstanding))
    expected = rest(kept)
    found: dict[str, bool] = {}
    for name, without in forgotten(kept):
        assert isinstance(without, WholeState)
        if name in known:
            continue
        try:
            found[name] = rest(without) != expected
        except Exception:  # noqa: BLE001 - whatever it stumbles over
            found[name] = True
    return found


Walk = tuple[ControlSettings, list[on.ControlEvent], int]


def walks() -> Iterator[Walk]:
    """First those that were found to tell most, then any."""
    told_most = [
        (4, ("domains", "random"), False),
        (4, ("partial", "fixed"), False),
        (1, ("domains", "fixed"), True),
        (1, ("partial", "sagc"), False),
        (12, ("race of responses", "sagc"), False),
        (12, ("auto", "fixed"), False),
        (0, ("sorted, single", "fixed"), False),
        (4, ("continuous at 3", "fixed"), False),
        (11, ("wide race", "random"), False),
        (0, ("race on both axes", "sagc"), True),
        (0, ("partial", "sagc"), False),
        (1, ("race on both axes", "fixed"), True),
        (2, ("synchronous", "random"), True),
        (7, ("race of responses", "sagc"), False),
        (12, ("losers resumed", "sagc"), False),
        (16, ("domains", "fixed"), True),
    ]
    others = [(seed, pair, False) for seed in range(20, 24) for pair in COMBINATIONS]
    for seed, pair, deterministic in (*told_most, *others):
        world = random_run(Random(seed), *pair, world_of=RecoveryWorld, deterministic=deterministic)
        if len(world.log) > 3:
            yield world.settings, world.log, Random(seed).randint(1, len(world.log) - 1)


def ended(group: int, version: int, *, fails: bool = False) -> on.ControlEvent:
    """The only member of a group whose prompt has the group's number."""
    name = TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=0)
    if fails:
        return on.TrajectoryFailed(id=name, reason=DropReason.REWARD_FAILED)
    return on.TrajectoryScored(
        id=name,
        reward=1.0,
        tokens=3,
        finish_reason=FinishReason.STOP,
        oldest_version=version,
        newest_version=version,
    )


def drawn(*numbers: int, exhausted: bool = False) -> on.PromptsDrawn:
    return on.PromptsDrawn(prompt_ids=tuple(f"p{n}" for n in numbers), exhausted=exhausted)


def rare_ends() -> Iterator[Walk]:
    """What no random walk meets: trip-wires, and what falls due twice."""
    single = {"batch_groups": 1, "group_size": 1, "steps": 9}
    begin, went = on.RunBegan(), (on.BatchTrained(batch_id=0, policy_version=1), on.WeightsLive(policy_version=1))
    failing = control_settings(**single, failure_window=2, max_failed_share=0.5)
    yield failing, [begin, drawn(0), ended(0, 0, fails=True), drawn(1), ended(1, 0, fails=True)], 3
    many = [event for n in range(22) for event in (drawn(n), ended(n, 0, fails=True))]
    yield control_settings(**single, failure_window=99), [begin, *many], 20
    evaluated = control_settings(**single, evaluate_every=1, evaluate_at_end=True)
    done = (on.EvaluationDone(policy_version=1), drawn(exhausted=True))
    yield evaluated, [begin, drawn(0), ended(0, 0), *went, *done], 6
    saved = control_settings(**single, checkpoint_every=1, checkpoint_at_end=True)
    yield saved, [begin, drawn(0), ended(0, 0), *went, on.CheckpointDone(policy_version=1), drawn(exhausted=True)], 6
    over = [begin, drawn(0), on.StopRequested(reason="enough"), ended(0, 0)]
    yield control_settings(**single), over, 3
    shorter = [begin, drawn(0), on.RunContinued(steps=1), ended(0, 0), *went]
    yield control_settings(**single), shorter, 3
    alone = control_settings(batch_groups=1, dynamic_sampling=True)
    yield alone, [begin, drawn(0), compared_alone(0, right=1.0, short=0.0), compared_alone(1, right=0.0, short=1.0)], 3
    yield lengths_change()


def compared_alone(sample: int, **rewards: float) -> on.ControlEvent:
    """A sample of the first group: totals are equal, and its rewards are not those of its sibling."""
    return on.TrajectoryScored(
        id=TrajectoryId(prompt_id="p0", group_id=0, sample=sample),
        reward=sum(rewards.values()),
        tokens=3,
        finish_reason=FinishReason.STOP,
        oldest_version=0,
        newest_version=0,
        separate_rewards=rewards,
    )


def lengths_change() -> Walk:
    """A cohort of three batches of four prompts, of which six are in flight. Of the prompts that wait in the queue the
    last becomes the shortest by what is learnt of its neighbours, and is launched first."""
    settings = control_settings(
        rounds=RoundKind.LENGTH_SORTED,
        length_sorted=LengthSorted(cohort_batches=3, oversubscription=1.5),
        batch_groups=4,
        group_size=1,
        steps=3,
    )
    world = PolicyWorld(settings)
    world.begin()
    for _ in range(200):
        if world.finished is not None:
            break
        if not world.goes_on():
            # The more tokens a prompt has, the shorter the answer: the opposite of their order in the source.
            length = {t: 1000 // (10 + int(t.prompt_id[1:]) % 7) ** 2 for t in world.sampled}
            first = min(world.sampled, key=lambda t: (length[t], t))
            world.score(first, 1.0, length[first])
    place = next(i for i, event in enumerate(world.log) if isinstance(event, on.BatchTrained))
    return settings, world.log, place


def kept_fields(kind: inspect.Type) -> Iterator[str]:
    """Names of all that a record keeps, as ``forgotten`` gives them."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                if not isinstance(field.type, inspect.StructType):
                    yield field.name
                if field.name not in ATOMIC:
                    yield from (f"{field.name}.{name}" for name in kept_fields(field.type))
        case inspect.VarTupleType():
            yield from kept_fields(kind.item_type)
        case inspect.UnionType():
            for member in kind.types:
                yield from kept_fields(member)


def test_no_field_can_be_forgotten_unnoticed() -> None:
    wanted = set(kept_fields(inspect.type_info(WholeState))) - {"schema"} - set(DECIDES_NOTHING)
    told: set[str] = set()
    for settings, log, start in chain(rare_ends(), walks()):
        told |= {name for name, was in noticed(settings, log, start, told).items() if was}
        if wanted <= told:
            break
    assert wanted <= told, f"kept for nothing, or the walks are too tame: {sorted(wanted - told)}"


def test_another_schema_and_other_settings_are_refused() -> None:
    settings = control_settings()
    kept = keep_whole(ControlState(settings), Outstanding())
    with pytest.raises(StreamRLError, match="schema 99, this streamrl reads 1"):
        restore_whole(settings, msgspec.structs.replace(kept, schema=99))
    with pytest.raises(StreamRLError, match="deterministic = true: resume with its own recipe"):
        restore_whole(msgspec.structs.replace(settings, deterministic=True), kept)
    crowded = msgspec.structs.replace(kept, slots=KeptSlots(in_use=5))
    with pytest.raises(ValueError, match="5 slots were in use, and this recipe has 4"):
        restore_whole(settings, crowded)


def test_what_is_kept_does_not_change_with_the_run() -> None:
    world = PolicyWorld(control_settings())
    world.begin()
    world.answer_draw()
    kept = keep_whole(world.core, Outstanding())
    before = through_bytes(kept)
    world.run_to_end()
    assert kept == before
