"""Worlds in which control is kept and restored in the middle of a run: beside the original, and in its place after a
crash of everything that ran."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from random import Random

import msgspec
from control_world import World
from policy_world import PolicyWorld

from streamrl.base.types import DropReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.settings import ControlSettings
from streamrl.control.state import EXHAUSTED, ControlState
from streamrl.journal.outstanding import Outstanding, TrainedBatch
from streamrl.journal.snapshot import take_snapshot
from streamrl.journal.whole_state import WholeState, keep_whole, restore_whole

TRANSIENT = {"_changed", "newest", "_late", "_ticks", "_curve"}
"""Attributes that do not outlive an event, or are made of others when they are needed."""


def through_bytes(kept: WholeState) -> WholeState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=WholeState)


def attributes(value: object, seen: tuple[int, ...] = ()) -> object:
    """Everything that an object holds, by name and in order, as plain values: two that are equal act equally."""
    if isinstance(value, enum.Enum | str | bytes | int | float | bool) or value is None:
        return value
    if isinstance(value, dict):
        return [(attributes(k, seen), attributes(v, seen)) for k, v in value.items()]
    if isinstance(value, Iterable):
        return [attributes(v, seen) for v in value]
    if id(value) in seen or callable(value):
        return "..."
    names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else vars(value)
    return {name: attributes(getattr(value, name), (*seen, id(value))) for name in names if name not in TRANSIENT}


def held(state: ControlState) -> object:
    """What ``state`` holds. Bins of a histogram are a set: their order is who came first, and decides nothing."""

    def ordered(value: object) -> object:
        if isinstance(value, dict):
            return {name: sorted(v) if name == "_bins" else ordered(v) for name, v in value.items()}
        return [ordered(v) for v in value] if isinstance(value, list | tuple) else value

    return ordered(attributes(state))


def shown(state: ControlState) -> tuple[object, ...]:
    """What people and policies are told of ``state`` at any time."""
    view = state.launching.view() if state.live_version >= 0 else None
    return (
        state.accounting(),
        state.buffer.wasted_tokens,
        state.round_kind,
        state.finished,
        view,
        state.lengths.sizing_figures,
        state.sizer.size,
        state.slots.in_use,
        state.due.evaluating,
        state.due.checkpointing,
        state.stopping,
        state.draining,
        state.launching.held_for,
        take_snapshot(state),
    )


class RecoveryWorld(PolicyWorld):
    """Keeps an ``Outstanding`` beside its core. In deterministic rounds an end may count later than it is told."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.outstanding = Outstanding()
        self.shelf: set[str] = set()
        self.failed: dict[TrajectoryId, DropReason] = {}
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def new_core(self) -> ControlState:
        return Watched(self, self.settings)

    def obey(self, action: do.ControlAction) -> None:
        if isinstance(action, do.LaunchGroup):
            assert action.ids[0].prompt_id in self.shelf, "its prompt was forgotten"
        waits = self.core.arrivals
        if isinstance(action, do.HoldEngines) and waits is not None and self.to_step is None:
            # The step is over, and its answer waits for another one: engines are held until its push all the same.
            assert not self.running and self.held_for is None and action.policy_version == self.trainer_version
            self.held_for = action.policy_version
        elif isinstance(action, do.CancelEvaluation) and waits is not None and waits.answered(on.EvaluationDone):
            assert self.to_evaluate is None  # it is over: there is nothing to cancel
        else:
            super().obey(action)

    def told(self, event: on.ControlEvent) -> None:
        """The core is about to take ``event``. What was drawn, or is of a checkpoint, is on the shelf by then."""
        if isinstance(event, on.PromptsDrawn):
            self.shelf.update(event.prompt_ids)
        elif isinstance(event, on.RunBegan) and event.kept is not None:
            self.shelf |= event.kept.prompt_ids()

    def handled(self, actions: list[do.ControlAction]) -> None:
        """The core took an event; its ``actions`` were not obeyed yet. A failure that waited ended with its group, or
        counts now. Prompts that are not needed are forgotten at once."""
        self.shelf &= self.outstanding.prompts_needed(self.core)
        assert take_snapshot(self.core).prompt_ids() <= self.shelf, "a checkpoint lacks prompts"
        dropped = {i for a in actions if isinstance(a, do.CancelGroup | do.ForgetTrajectories) for i in a.ids}
        for trajectory in [t for t in self.failed if self.core.buffer.member(t) is None]:
            reason = self.failed.pop(trajectory)
            if trajectory not in dropped:
                self._leaves(trajectory, reason)

    def fail(self, trajectory: TrajectoryId, reason: DropReason = DropReason.REWARD_FAILED, policy: str = "") -> None:
        for place in (self.running, self.stopped_at, self.returning):
            place.pop(trajectory, None)
        self.failed[trajectory] = reason
        self.tell(on.TrajectoryFailed(id=trajectory, reason=reason, message="planted", tokens=2, policy=policy))

    def check(self) -> None:
        arrivals = self.core.arrivals
        if arrivals is None or not arrivals.answered(on.BatchTrained):  # else the ledger is ahead of what counts
            super().check()


class Watched(ControlState):
    """A core that tells its world when it has decided, and its ``Outstanding`` everything."""

    def __init__(self, world: RecoveryWorld, settings: ControlSettings) -> None:
        super().__init__(settings)
        self._world = world

    def handle(self, event: on.ControlEvent) -> list[do.ControlAction]:
        self._world.outstanding.told(event)
        self._world.told(event)
        actions = super().handle(event)
        self._world.outstanding.ordered(actions)
        self._world.handled(actions)
        return actions


class TwinWorld(RecoveryWorld):
    """Every now and then control is kept, encoded, restored, and from then on both must do the same."""

    share = 0.02
    random = Random(0)

    def __init__(self, *arguments: object, **options: object) -> None:
        self.twins: list[tuple[ControlState, Outstanding]] = []
        super().__init__(*arguments, **options)

    def tell(self, event: on.ControlEvent) -> None:
        if self.random.random() < self.share or not self.log:
            self.restore_a_twin()
        told = len(self.answers)
        super().tell(event)
        for twin, outstanding in self.twins:
            outstanding.told(event)
            actions = twin.handle(event)
            outstanding.ordered(actions)
            assert actions == self.answers[told:], "what was restored decides differently"
            assert twin.accounting() == self.core.accounting()
            assert outstanding.keep() == self.outstanding.keep()
            assert outstanding.again(twin) == self.outstanding.again(self.core)
            assert shown(twin) == shown(self.core), "what was restored shows something else"

    def restore_a_twin(self) -> None:
        """Of the original or of a twin, which is what is restored twice."""
        kept = [keep_whole(self.core, self.outstanding), *(keep_whole(*twin) for twin in self.twins)]
        assert all(one == kept[0] for one in kept), "what is kept differs between the original and what was restored"
        restored = restore_whole(self.settings, through_bytes(self.random.choice(kept)))
        assert through_bytes(keep_whole(*restored)) == through_bytes(kept[0]), "what is restored is not what was kept"
        mine = held(self.core)
        assert isinstance(mine, dict)
        del mine["_world"]
        assert held(restored[0]) == mine, "an attribute is not kept"
        self.twins = [*self.twins[-1:], restored]


class CrashWorld(RecoveryWorld):
    """``crash``: everything that ran is lost; what the journal has brings it back, from a base and the events since."""

    share = 0.08
    unheard = False
    crashes = 0

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.compact()
        self.made: list[TrainedBatch] = []
        self.durable = self.start

    def compact(self) -> None:
        """A base of the journal: nothing before it is needed any more."""
        self.base = msgspec.msgpack.encode(keep_whole(self.core, self.outstanding))
        self.since = len(self.log)

    def crash(self, random: Random) -> None:
        """Kill, replay, order again; in flight is what was in flight, and nothing else."""
        CrashWorld.crashes += 1
        over = self.finished is not None or self.stopped is not None
        stepped = self.to_step is not None and not over and random.random() < 0.3
        before = self._in_flight()
        steps = self._other_steps(random)
        state, outstanding = restore_whole(self.settings, msgspec.msgpack.decode(self.base, type=WholeState))
        for event in self.log[self.since :]:
            outstanding.told(event)
            outstanding.ordered(state.handle(event))
        assert keep_whole(state, outstanding) == keep_whole(self.core, self.outstanding), "the replay is not the run"
        self._lose_everything()
        self._take_over(state, outstanding)
        if stepped:  # the ranks have, and nobody heard: that is told first, and ``again`` says what follows from it
            self._step_unheard(before)
        again = self.outstanding.again(self.core)
        for action in again:
            self._obey_again(action)
        if not stepped and not over:
            after = self._in_flight()
            wrong = [name for name in before if before[name] != after[name]]
            assert not wrong, {name: (before[name], after[name]) for name in wrong}
        if steps:
            if self.trainer_version < steps and self.finished != EXHAUSTED:
                self.finished, self.drained = None, False
            self.tell(on.RunContinued(steps=steps))
        if random.random() < 0.3:
            self.compact()

    def _other_steps(self, random: Random) -> int:
        """Sometimes the recipe says another number of steps now; what was lived before is replayed as it was lived."""
        if self.stopped is not None or self.trainer_version < 1 or random.random() < 0.7:
            return 0
        steps = random.randint(max(1, self.trainer_version - 1), self.trainer_version + 3)
        self.settings = msgspec.structs.replace(self.settings, steps=steps)
        return steps

    def _take_over(self, state: ControlState, outstanding: Outstanding) -> None:
        self.outstanding = outstanding
        watched = Watched(self, self.settings)
        for name, value in vars(state).items():
            setattr(watched, name, value)
        for part in (watched.launching, watched.filling):
            part._state = watched
        self.core = watched

    def _step_unheard(self, before: dict[str, object]) -> None:
        order = before["to_step"]
        assert isinstance(order, do.StepOptimizer)
        self.batches[order.batch_id], self.to_step = self.batches_lost, order
        self.unheard = True
        self.step()
        self.unheard = False

    def obey(self, action: do.ControlAction) -> None:
        if not self.unheard or isinstance(action, do.CancelGroup | do.ForgetTrajectories | do.FinishRun | do.StopRun):
            super().obey(action)
        elif isinstance(action, do.LaunchGroup):  # the ledger knows it; nobody samples it
            self._launched(action)
            self.launched.append(action)
            self.issued.update(action.ids)

    def _lose_everything(self) -> None:
        if self.to_step is not None:
            self.batches_lost = self.batches[self.to_step.batch_id]
        self.running, self.stopped_at, self.returning = {}, {}, {}
        self.batches = {}
        self.draw = self.to_step = self.to_publish = self.to_evaluate = self.to_save = self.held_for = None

    def _in_flight(self) -> dict[str, object]:
        """What is under way, as the other side sees it. Of what runs the version may be newer after a crash."""
        alive = self.core.buffer.member
        return {
            "runs": sorted(t for t in self.running if alive(t)),
            "in advance": {t: v for t, v in self.running.items() if v > self.live_version and alive(t)},
            "stopped": sorted(t for t in self.stopped_at if alive(t)),
            "draw": self.draw,
            "to_step": self.to_step,
            "to_publish": self.to_publish,
            "to_evaluate": self.to_evaluate,
            "to_save": self.to_save,
            "held_for": self.held_for,
            # A drain takes groups back that were handed over and will not be stepped.
            "batches": [groups for groups in self.batches.values() if any(alive(t) for ids in groups for t in ids)],
        }

    def _obey_again(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                assert action.ids and not set(action.ids) & set(self.running), "launched twice"
                assert action.ids[0].prompt_id in self.shelf, "its prompt was forgotten"
                assert action.noise == self.of_group[action.group_id].noise, "other noise than before"
                assert action.policy_version <= self.live_version or action.policy_version == self.held_for
                self.running |= dict.fromkeys(action.ids, action.policy_version)
            case do.HoldEngines():
                assert not self.running and self.to_publish is None and self.to_evaluate is None
                self.held_for = action.policy_version
            case do.Evaluate():
                assert action.policy_version == self.live_version and self.to_publish is None
                self.to_evaluate = (action.policy_version, action.limit)
            case do.CancelEvaluation():
                assert self.drained and self.to_evaluate is not None
            case do.WriteCheckpoint():
                self.written = self._checkpoint()
                World.obey(self, action)
            case do.TrainGroupNow() | do.StepOptimizer() | do.PublishWeights() | do.DrawPrompts():
                World.obey(self, action)
            case do.CutTrajectories():
                World.obey(self, action)
            case do.FinishRun() | do.StopRun():
                assert self.finished is not None or self.stopped is not None
            case _:
                raise AssertionError(f"nobody can carry this out again: {action}")

    def told_twice(self, random: Random) -> None:
        """An answer that was taken before comes again, and changes nothing."""
        answers = (on.BatchTrained, on.WeightsLive, on.EvaluationDone, on.CheckpointDone, on.PromptsDrawn)
        outcomes = (on.TrajectoryScored, on.TrajectoryFailed)
        waits = self.core.arrivals
        chosen = [
            event
            for event in self.log
            if (isinstance(event, answers) and not self._awaited(event))
            or (isinstance(event, outcomes) and event.id not in {*self.running, *self.stopped_at})
        ]
        if not chosen or (waits is not None and any(waits.answered(kind) for kind in answers)):
            return
        event = random.choice(chosen)
        before, told = self.core.accounting(), len(self.answers)
        kept = keep_whole(self.core, self.outstanding)
        self.tell(event)
        assert self.core.accounting() == before
        gone = isinstance(event, outcomes) and self.core.buffer.member(event.id) is None
        if not gone:
            assert self.answers[told:] == [], f"acted upon what was told twice: {event} {self.answers[told:]}"
            assert keep_whole(self.core, self.outstanding) == kept, f"changed by what was told twice: {event}"

    def anything_else(self, random: Random) -> None:
        if random.random() < self.share:
            self.crash(random)
        if random.random() < self.share:
            self.told_twice(random)

    def _awaited(self, event: on.ControlEvent) -> bool:
        """Whether it would be a first answer."""
        match event:
            case on.BatchTrained(policy_version=version):
                return self.to_step is not None and self.to_step.policy_version == version
            case on.WeightsLive(policy_version=version):
                return self.to_publish == version
            case on.EvaluationDone(policy_version=version):
                return self.to_evaluate is not None and self.to_evaluate[0] == version
            case on.CheckpointDone(policy_version=version):
                return self.to_save == version
            case _:
                return self.draw is not None

    def step(self) -> None:
        order = self.to_step
        assert order is not None
        groups = self.batches[order.batch_id]
        handed = tuple(do.TrainGroupNow(batch_id=order.batch_id, group_id=ids[0].group_id, ids=ids) for ids in groups)
        self.made.append(TrainedBatch(groups=handed, step=order))
        super().step()

    def save(self) -> None:
        self.durable = self.trainer_version
        super().save()

    def check(self) -> None:
        super().check()
        since = [batch for batch in self.made if batch.policy_version > self.durable]
        assert self.outstanding.trained_since(-1) == since, "the batches since the last checkpoint"
        needed = self.outstanding.trajectories_needed(self.core)
        assert {t for batch in since for group in batch.groups for t in group.ids} <= needed
        assert {t for t in self.scored if self.core.buffer.member(t)} <= needed, "a payload would be lost"
