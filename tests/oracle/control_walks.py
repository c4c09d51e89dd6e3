"""Random walks of control through every composition of policies, with checkers: runs whose control is encoded and
restored now and then (``TwinWorld``), and runs whose controller is killed at any event (``CrashWorld``)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec
from oracle.control_world import AFTER_FAILURE, CONTINUOUS, SORTED, TAIL, World, control_settings, through_bytes

from streamrl.base.types import TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.launch import view
from streamrl.control.machine import Control
from streamrl.control.policies.deterministic import DeterministicControl
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import Snapshot
from streamrl.control.settings import ControlSettings
from streamrl.recipe.objectives.spo import TrackedBaseline
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    GroupSizing,
    Keeps,
    KvAdmission,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    Straggler,
    TailBatching,
)

COMPOSITIONS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "continuous": {"rounds": CONTINUOUS, "max_staleness": 1},
    "continuous at 3": {"rounds": CONTINUOUS, "max_staleness": 3},
    "continuous, dropping": {"rounds": CONTINUOUS, "max_staleness": 2, "when_stale": StalePolicy.DROP},
    "continuous, regenerating": {"rounds": CONTINUOUS, "max_staleness": 1, "when_stale": StalePolicy.REGENERATE},
    "continuous, by KV": {"rounds": CONTINUOUS, "max_staleness": 2, "admission": KvAdmission()},
    "race": {"rounds": TAIL, "tail_batching": TailBatching()},
    "wide race": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=2.0, deferred_prompts=DeferredPrompts.REGENERATE),
    },
    "race on both axes": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=1.5, response_oversampling=1.5),
    },
    "race of responses": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=1.0, response_oversampling=1.5),
    },
    "deferred prompts resumed": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=1.5, deferred_prompts=DeferredPrompts.RESUME),
        "max_staleness": 9,
    },
    "elastic": {"rounds": TAIL, "tail_batching": TailBatching(prompt_oversampling=1.5, long_round_batches=2)},
    "sorted": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=3)},
    "sorted, oversubscribed": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=3, oversubscription=1.5)},
    "sorted, cut by tokens": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=2, cut_tokens=20)},
    "sorted, single": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=2, single=True)},
    "partial": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=3, partial=True), "max_staleness": 2},
    "partial, single": {
        "rounds": SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True, single=True),
        "max_staleness": 2,
    },
    "partial, tight": {
        "rounds": SORTED,
        "length_sorted": LengthSorted(cohort_batches=2, partial=True, oversubscription=1.0),
        "max_staleness": 1,
    },
    "partial, oversubscribed": {
        "rounds": SORTED,
        "length_sorted": LengthSorted(cohort_batches=4, partial=True, oversubscription=2.0),
        "max_staleness": 3,
    },
    "auto": {"rounds": RoundKind.AUTO},
}
SIZINGS: dict[str, GroupSizing] = {
    "fixed": GroupSizing(),
    "sagc": GroupSizing(
        kind=SizingKind.SAGC, sizes=(4, 8), dwell=1, tradeoff=0.3, discount=0.5, straggler=Straggler.SECONDS
    ),
    "random": GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1),
}
for name in ("sagc", "random"):
    SIZINGS[f"{name}, prompts"] = msgspec.structs.replace(SIZINGS[name], keeps=Keeps.PROMPTS)


COMBINATIONS = [(n, sizing) for n in COMPOSITIONS for sizing in SIZINGS if sizing == "fixed" or "single" not in n]
"""Single trajectories have no group size."""
QUICK_COMBINATIONS = [(name, sizing) for name, sizing in COMBINATIONS if sizing in ("fixed", "sagc")]
"""Those that quick tests walk; ``ControlMachine`` draws from all."""
OFF_POLICY = ("continuous", "deferred prompts resumed", "partial")
ON_POLICY = [pair for pair in COMBINATIONS if not pair[0].startswith(OFF_POLICY) and pair[0] != "auto"]


def random_settings(composition: str, sizing: str, random: Random) -> ControlSettings:
    """A recipe of ``composition``: small batches, everything else drawn."""
    if sizing == "fixed":
        groups, size = random.randint(1, 4), random.randint(1, 3)
    else:
        groups, size = random.randint(1, 3), 8
    every, at_end = random.randint(0, 2), random.random() < 0.5
    shares = random_shares(Random(str(random.getstate())))  # other draws stay as they are without sets
    in_turns = not composition.startswith("continuous") and random.random() < 0.4
    return control_settings(
        **{
            "presubmit": random.random() < 0.5 and not in_turns,
            "in_turns": in_turns,
            "dynamic_sampling": size > 1 and random.random() < 0.5,
            "batch_groups": groups,
            "group_size": size,
            "group_sizing": SIZINGS[sizing],
            "seed": random.randint(0, 99),
            "shares": shares,
            "tracked": random.choice([None, TrackedBaseline()]),
            "steps": random.randint(1, 8),
            "evaluate_every": every,
            "evaluate_limit": 3 * int(at_end),
            "evaluate_at_start": every > 0,
            "evaluate_at_end": at_end,
            "checkpoint_every": every,
            "checkpoint_at_end": random.random() < 0.5,
            **COMPOSITIONS[composition],
        }
    )


def random_shares(random: Random) -> dict[str, float]:
    """Shares of one to eight training sets, or of a single source."""
    weights = [random.random() ** 3 + 0.01 for _ in range(random.choice([0, 0, 1, 2, 3, 8]))]
    return {f"set{number}": weight / sum(weights) for number, weight in enumerate(weights)}


def random_run(
    random: Random,
    composition: str,
    sizing: str,
    stop_share: float = 0.005,
    world_of: type[World] = World,
    deterministic: bool = False,
) -> World:
    """One run to its end, with whatever may happen on the way, kills, drains and resumes included; the invariants are
    checked after every event."""
    settings = msgspec.structs.replace(random_settings(composition, sizing, random), deterministic=deterministic)
    prompts = random.choice([None, None, random.randint(0, 60)])
    world = world_of(settings, prompts, random.choice([0, 0, 0, 1, 4]))
    world.begin()
    for _ in range(400):
        if world.finished is not None and world.drained and world.checkpoint is not None and random.random() < 0.5:
            world = world.killed_and_resumed()
            world.begin()
        if world.over_now:
            break
        world.anything_else(random)
        moves = world.moves(random)
        if not moves:
            break
        chance = random.random()
        if chance < stop_share:
            world.tell(on.StopRequested(reason="drained"))
        elif chance < 0.03 and world.checkpoint is not None:
            world = world.killed_and_resumed()
            world.begin()
        elif chance < 0.05:
            world.measure(random)
        else:
            weights, calls = zip(*moves, strict=True)
            random.choices(calls, weights)[0]()
        world.check()
    world.run_to_end()
    world.check_end()
    return world


def seen(control: Control) -> tuple[object, ...]:
    """All of control, as it is written down, and what policies are shown."""
    shown = view(control.state, control.rules) if control.state.live_version >= 0 else None
    return msgspec.to_builtins(control.snapshot()), control.unanswered_orders(), shown


class TwinWorld(World):
    """Every now and then control is encoded and restored, and from then on both must do the same."""

    share = 0.02
    random = Random(0)

    def __init__(self, *arguments: object, **options: object) -> None:
        self.twins: list[Control] = []
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def tell(self, event: on.ControlEvent) -> list[do.ControlAction]:
        if self.random.random() < self.share or not self.log:
            self.restore_a_twin()
        return super().tell(event)

    def after(self, event: on.ControlEvent, actions: list[do.ControlAction]) -> None:
        super().after(event, actions)
        for twin in self.twins:
            assert twin.handle(event) == actions, "what was restored decides differently"
            assert seen(twin) == seen(self.core), "what was restored is something else"

    def restore_a_twin(self) -> None:
        """Of the original or of a twin, which is what is restored twice."""
        original = self.random.choice([self.core, *self.twins])
        restored = make_control(self.recipe, through_bytes(original.snapshot()))
        assert seen(restored) == seen(self.core)
        self.twins = [*self.twins[-1:], restored]


class CrashWorld(World):
    """``crash``: everything that ran is lost; a snapshot and the events since bring it back."""

    share = 0.08
    unheard = False
    crashes = 0

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.compact()

    def compact(self) -> None:
        """A base of the journal: nothing before it is needed any more."""
        self.base = msgspec.msgpack.encode(self.core.snapshot())
        self.since = len(self.log)

    def crash(self, random: Random) -> None:
        """Kill, replay, order again; in flight is what was in flight, and nothing else."""
        CrashWorld.crashes += 1
        over = self.over_now
        stepped = self.to_step is not None and not over and random.random() < 0.3
        before = self._in_flight()
        steps = self._other_steps(random)
        restored = make_control(self.recipe, msgspec.msgpack.decode(self.base, type=Snapshot))
        for event in self.log[self.since :]:
            restored.handle(event)
        assert seen(restored) == seen(self.core), "the replay is not the run"
        self.core = restored
        self._lose_everything()
        if stepped:  # the ranks have, and nobody heard: that comes first, and what is ordered again follows from it
            self._step_unheard(before)
        for action in self.core.unanswered_orders():
            self._obey_again(action)
        if not stepped and not over:
            after = self._in_flight()
            wrong = [name for name in before if before[name] != after[name]]
            assert not wrong, {name: (before[name], after[name]) for name in wrong}
        if steps:
            if self.trainer_version < steps and (self.drained or not self.state.starved):
                self.finished, self.drained = None, False
            self.tell(on.RunContinued(steps=steps))
        if random.random() < 0.3:
            self.compact()

    def _other_steps(self, random: Random) -> int:
        """Sometimes the recipe says another number of steps now; what was lived before is replayed as it was lived."""
        if self.stopped is not None or self.trainer_version < 1 or random.random() < 0.7:
            return 0
        steps = random.randint(max(1, self.trainer_version - 1), self.trainer_version + 3)
        self.recipe = msgspec.structs.replace(self.recipe, steps=steps)
        return steps

    def _check_replay(self) -> None:
        """Every crash is one; with other steps, the first settings are not those of the end."""

    def _step_unheard(self, before: dict[str, object]) -> None:
        order = before["to_step"]
        assert isinstance(order, do.StepOptimizer)
        self.batches[order.batch_id], self.to_step = self.batches_lost, order
        self.unheard = True
        self.step()
        self.unheard = False

    def obey(self, action: do.ControlAction) -> None:
        if not self.unheard or isinstance(action, do.Drop | do.End):
            super().obey(action)
        elif isinstance(action, do.LaunchGroup):  # the ledger knows it; nobody samples it
            paused_for, self.paused_for = self.paused_for, action.policy_version
            self._launch(action)
            self.paused_for = paused_for
            for trajectory in action.ids:
                del self.running[trajectory]

    def _lose_everything(self) -> None:
        if self.to_step is not None:
            self.batches_lost = self.batches[self.to_step.batch_id]
        self.running, self.paused, self.returning = {}, {}, {}
        self.batches = {}
        self.of_set = self.positions()
        self.draw = self.to_step = self.to_publish = self.to_evaluate = self.to_save = self.paused_for = None

    def _in_flight(self) -> dict[str, object]:
        """What is under way, as the other side sees it. Of what runs the version may be newer after a crash."""
        alive = self.state.buffer.member
        return {
            "runs": sorted(t for t in self.running if alive(t)),
            "in advance": {t: v for t, v in self.running.items() if v > self.live_version and alive(t)},
            "paused": sorted(t for t in self.paused if alive(t)),
            "draw": self.draw,
            "to_step": self.to_step,
            "to_publish": self.to_publish,
            "to_evaluate": self.to_evaluate,
            "to_save": self.to_save,
            "paused_for": self.paused_for,
            # A drain takes groups back that were handed over and will not be stepped.
            "batches": [groups for groups in self.batches.values() if any(alive(t) for ids in groups for t in ids)],
        }

    def _obey_again(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                assert action.ids and not set(action.ids) & set(self.running), "launched twice"
                assert action.ids[0].prompt_id in self.content, "its prompt was forgotten"
                assert action.seed_base == self.of_group[action.group_id].seed_base, "other seeds than before"
                assert action.policy_version <= self.live_version or action.policy_version == self.paused_for
                self.running |= dict.fromkeys(action.ids, action.policy_version)
            case do.Drop() | do.ResumeTrajectories() | do.Decision():
                raise AssertionError(f"nobody can carry this out again: {action}")
            case do.PauseEngines():
                assert self.to_publish is None and self.to_evaluate is None
                World.obey(self, action)
            case do.Evaluate():  # in a drain too: its end is waited for
                self.to_evaluate = (action.policy_version, action.limit)
            case do.WriteCheckpoint():
                self.written = self.take_checkpoint()
                World.obey(self, action)
            case do.End():
                assert self.over_now
            case _:
                World.obey(self, action)

    def answer_twice(self, random: Random) -> None:
        """An answer that was taken before comes again, and changes nothing."""
        if isinstance(self.core, DeterministicControl) and self.core._answers:
            return
        again = [event for event in self.log if self._was_answered(event)]
        if not again:
            return
        event = random.choice(again)
        before, answered = seen(self.core), len(self.answers)
        self.tell(event)
        gone = isinstance(event, on.TrajectoryScored | on.TrajectoryFailed)
        if not (gone and self.state.buffer.member(event.id) is None):
            assert self.answers[answered:] == [], f"acted upon what came twice: {event} {self.answers[answered:]}"
            assert seen(self.core) == before, f"changed by what came twice: {event}"

    def _was_answered(self, event: on.ControlEvent) -> bool:
        match event:
            case on.TrajectoryScored() | on.TrajectoryFailed():
                return event.id not in {*self.running, *self.paused}
            case on.BatchTrained(policy_version=version):
                return self.to_step is None or self.to_step.policy_version != version
            case on.WeightsLive(policy_version=version):
                return self.to_publish != version
            case on.EvaluationDone(policy_version=version):
                return self.to_evaluate is None or self.to_evaluate[0] != version
            case on.CheckpointDone(policy_version=version):
                return self.to_save != version
            case on.PromptsDrawn():
                return self.draw is None
            case _:
                return False

    def anything_else(self, random: Random) -> None:
        if random.random() < self.share:
            self.crash(random)
        if random.random() < self.share:
            self.answer_twice(random)


class TurnsWorld(CrashWorld):
    """Trajectories of one turn or of many, a few of very many. Between two turns one is in its environment: no engine
    samples it, whatever control does meanwhile. Rounds that read it hear how many those are."""

    share = 0.02
    visits = 0

    def __init__(self, *arguments: object, **options: object) -> None:
        self.away: set[TrajectoryId] = set()
        self.first_turn: dict[TrajectoryId, int] = {}  # the version that sampled the first turn
        super().__init__(*arguments, **options)

    @property
    def sampled(self) -> list[TrajectoryId]:
        return [trajectory for trajectory in super().sampled if trajectory not in self.away]

    def score_any(self, random: Random, among: list[TrajectoryId]) -> None:
        """A turn of one of them ends, or its last turn."""
        trajectory = random.choice(among)
        ends = Random(f"{trajectory}").choice([1.0, 0.7, 0.5, 0.3, 0.05])
        if trajectory in self.running and trajectory not in self.away and random.random() > ends:
            version = self.running[trajectory] + random.choice([0, 0, 0, 1])
            self.first_turn.setdefault(trajectory, min(version, self.live_version))
            self.away.add(trajectory)
            TurnsWorld.visits += 1
        else:
            super().score_any(random, [trajectory])

    def score(self, trajectory: TrajectoryId, reward: float, tokens: int, late: int = 0, **other: bool) -> None:
        launched = next(p[trajectory] for p in (self.running, self.paused, self.returning) if trajectory in p)
        self.away.discard(trajectory)
        super().score(trajectory, reward, tokens, self.first_turn.get(trajectory, launched + late) - launched, **other)

    def moves(self, random: Random) -> list[tuple[int, Callable[[], None]]]:
        self.away &= self.running.keys() | self.paused.keys()
        possible = super().moves(random)
        if away := sorted(self.away):
            possible.append((40, lambda: self.away.remove(random.choice(away))))
            possible.append((10, lambda: self.score_any(random, away)))
            possible.append((2, lambda: self.fail(random.choice(away), random.choice(AFTER_FAILURE))))
        return possible

    def goes_on(self) -> bool:
        went = super().goes_on()
        if not went and not self.sampled:  # all come back at once
            self.away.clear()
        return went

    def anything_else(self, random: Random) -> None:
        super().anything_else(random)
        if self.core.settings.reads_environment and random.random() < 0.2:
            self.tell(self.measured(environment=len(self.away)))


def scored_once(trajectory: TrajectoryId, version: int = 0, reward: float = 1.0, tokens: int = 5) -> on.ControlEvent:
    """The outcome of one trajectory that ``version`` sampled."""
    return on.TrajectoryScored(
        id=trajectory,
        reward=reward,
        tokens=tokens,
        finish_reason=on.FinishReason.STOP,
        oldest_version=version,
        newest_version=version,
    )
