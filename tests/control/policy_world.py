"""A world for round policies: compositions of policies, results that come late, and a ledger of prompts.

Beyond ``World``: what was cancelled while it ran still comes back once; rewards fail while their engine is stopped;
engines are lost; prompts have domains and lengths; and every prompt that was drawn must end, once, with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
from control_world import World, control_settings

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.prompt_queue import DomainShares
from streamrl.control.settings import ControlSettings
from streamrl.control.state import EXHAUSTED, ControlState
from streamrl.journal.kept_state import ControlSnapshot
from streamrl.journal.snapshot import take_snapshot
from streamrl.policies.round_policies import ROUND_POLICIES
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    GroupSizing,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)

POLICIES = ("", "", "drop_group")  # what a recipe may want when a reward failed
DOMAINS = {"easy": 2.0, "hard": 1.0}
TAIL, SORTED, CONTINUOUS = RoundKind.TAIL_BATCHING, RoundKind.LENGTH_SORTED, RoundKind.CONTINUOUS
COMPOSITIONS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "continuous": {"rounds": CONTINUOUS, "max_staleness": 1},
    "continuous at 3": {"rounds": CONTINUOUS, "max_staleness": 3},
    "continuous, dropping": {"rounds": CONTINUOUS, "max_staleness": 2, "when_stale": StalePolicy.DROP},
    "continuous, regenerating": {"rounds": CONTINUOUS, "max_staleness": 1, "when_stale": StalePolicy.REGENERATE},
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
    "losers resumed": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=1.5, deferred_prompts=DeferredPrompts.RESUME),
        "max_staleness": 9,
    },
    "elastic": {"rounds": TAIL, "tail_batching": TailBatching(prompt_oversampling=1.5, long_round_batches=2)},
    "domains": {
        "rounds": TAIL,
        "tail_batching": TailBatching(prompt_oversampling=1.5, domain_column="domain", domains=DOMAINS),
    },
    "sorted": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=3)},
    "sorted, oversubscribed": {
        "rounds": SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, oversubscription=1.5),
    },
    "sorted, cut by tokens": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=2, cut_tokens=20)},
    "sorted, single": {"rounds": SORTED, "length_sorted": LengthSorted(cohort_batches=2, single=True)},
    "partial": {
        "rounds": SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True),
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
}
if RoundKind.AUTO in ROUND_POLICIES:
    COMPOSITIONS["auto"] = {"rounds": RoundKind.AUTO}
SIZINGS: dict[str, GroupSizing] = {
    "fixed": GroupSizing(),
    "sagc": GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8), dwell=1, tradeoff=0.3, discount=0.5),
    "random": GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1),
}


def varies(composition: str) -> bool:
    """Whether group sizes may vary under ``composition`` (``config.sizing_rules``)."""
    waits = COMPOSITIONS[composition].get("when_stale", StalePolicy.WAIT) is StalePolicy.WAIT
    continuous = COMPOSITIONS[composition].get("rounds") is CONTINUOUS
    return composition != "sorted, single" and not (continuous and waits)


COMBINATIONS = [(name, sizing) for name in COMPOSITIONS for sizing in SIZINGS if sizing == "fixed" or varies(name)]


def domain_of(number: int) -> str:
    """A third of the prompts is hard."""
    return "hard" if number % 3 == 1 else "easy"


def random_settings(composition: str, sizing: str, random: Random) -> ControlSettings:
    """A recipe of ``composition``: small batches, everything else drawn."""
    if sizing == "fixed":
        groups, size = random.randint(1, 4), random.randint(1, 3)
    else:
        groups, size = random.randint(1, 3), 8
    every = random.randint(0, 2)
    return control_settings(
        **{
            "presubmit": random.random() < 0.5,
            "dynamic_sampling": size > 1 and random.random() < 0.5,
            "batch_groups": groups,
            "group_size": size,
            "group_sizing": SIZINGS[sizing],
            "seed": random.randint(0, 99),
            "steps": random.randint(1, 8),
            "evaluate_every": every,
            "evaluate_at_start": every > 0,
            "evaluate_at_end": random.random() < 0.5,
            "checkpoint_every": every,
            "checkpoint_at_end": random.random() < 0.5,
            **COMPOSITIONS[composition],
        }
    )


class Checkpoint(msgspec.Struct, kw_only=True):
    """What a checkpoint keeps, and what the ledger of the world said when it was written."""

    version: int
    control: ControlSnapshot
    attempts: dict[str, list[do.LaunchGroup]]
    over: set[str]


class PolicyWorld(World):
    """``returning``: cancelled while they ran, so that their result is still on the way. ``log``: what was told.

    ``resumed_from``: the checkpoint of a run that was killed; ``prompts``: that the source has from its beginning.
    """

    def __init__(
        self,
        chosen: ControlSettings,
        prompts: int | None = None,
        start: int = 0,
        resumed_from: Checkpoint | None = None,
    ) -> None:
        super().__init__(chosen, prompts, resumed_from.version if resumed_from else start)
        self.prompts = prompts
        self.resumed_from = resumed_from
        self.written: Checkpoint | None = None
        self.checkpoint: Checkpoint | None = None
        self.returning: dict[TrajectoryId, int] = {}
        self.log: list[on.ControlEvent] = []
        self.answers: list[do.ControlAction] = []
        self.domain_of: dict[str, str] = {}
        self.attempts: dict[str, list[do.LaunchGroup]] = {}
        self.of_group: dict[int, do.LaunchGroup] = {}
        self.living: Counter[str] = Counter()
        self.members: dict[int, set[TrajectoryId]] = {}
        self.over: set[str] = set()
        self.drawn_again: set[str] = set()
        if resumed_from is not None:
            kept = resumed_from.control
            self.prompts_left = None if prompts is None else prompts - kept.drawn
            self.next_prompt = kept.drawn
            self.domain_of = {f"p{number}": domain_of(number) for number in range(kept.drawn)}
            self.attempts = {prompt: list(launches) for prompt, launches in resumed_from.attempts.items()}
            self.over = set(resumed_from.over)
            self.drawn_again = {ticket.prompt_id for ticket in (*kept.queued, *kept.waiting) if ticket.noise < 0}

    def begin(self) -> None:
        if self.resumed_from is None:
            super().begin()
            return
        if self.settings.evaluate_at_start and self.start < self.settings.steps:
            self.falls_due(0)
        kept = self.resumed_from.control
        self.tell(on.RunBegan(policy_version=self.start, kept=kept, steps=self.settings.steps))

    def killed_and_resumed(self) -> PolicyWorld:
        """A new run that goes on from the last checkpoint that is complete."""
        assert self.checkpoint is not None
        return type(self)(self.settings, self.prompts, resumed_from=self.checkpoint)

    # ---- the ledger of prompts

    def tell(self, event: on.ControlEvent) -> None:
        self.log.append(event)
        self.drained = self.drained or isinstance(event, on.StopRequested)
        actions = self.core.handle(event)
        self.answers.extend(actions)
        for action in actions:
            self.obey(action)
        if any(isinstance(action, do.WriteCheckpoint) for action in actions):
            self.written = self._checkpoint()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            version=self.trainer_version,
            control=msgspec.convert(msgspec.to_builtins(take_snapshot(self.core)), ControlSnapshot),
            attempts={prompt: list(launches) for prompt, launches in self.attempts.items()},
            over=set(self.over),
        )

    def obey(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                self._launched(action)
            case do.CancelGroup():
                for trajectory in action.ids:
                    if trajectory in self.running or trajectory in self.stopped_at:
                        self.returning[trajectory] = self.running.get(trajectory, self.stopped_at.get(trajectory, 0))
                self._ended(action.ids, action.reason)
            case do.ForgetTrajectories():
                self._ended(action.ids, action.reason)
        super().obey(action)

    def _launched(self, action: do.LaunchGroup) -> None:
        ids = action.ids
        prompt, attempt = ids[0].prompt_id, ids[0].attempt
        assert {(t.prompt_id, t.attempt, t.group_id) for t in ids} == {(prompt, attempt, action.group_id)}
        assert [t.sample for t in ids] == list(range(len(ids)))
        before = self.attempts.setdefault(prompt, [])
        if not self.settings.length_sorted.single:
            assert not self.living[prompt], "two groups of one prompt at once"
            assert prompt not in self.over, "launched again after it had ended"
            assert attempt == len(before), "an attempt is missing or used twice"
            races = self.settings.rounds in (RoundKind.TAIL_BATCHING, RoundKind.AUTO)
            if before and races and self.settings.tail_batching.deferred_prompts is DeferredPrompts.REPLAY:
                same = action.noise == before[-1].noise
                # What was under way when the run was killed is drawn anew.
                assert same or prompt in self.drawn_again, "a replayed loser draws other noise"
                self.drawn_again.discard(prompt)
            elif before:
                assert action.noise not in {launch.noise for launch in before}, "the same noise was drawn again"
        before.append(action)
        self.of_group[action.group_id] = action
        self.members[action.group_id] = set(ids)
        self.living[prompt] += 1

    def _ended(self, ids: tuple[TrajectoryId, ...], reason: DropReason) -> None:
        for trajectory in ids:
            self._leaves(trajectory, reason)

    def _leaves(self, trajectory: TrajectoryId, reason: DropReason | None) -> None:
        """``trajectory`` ended; ``reason`` None: it was trained. With its last member a group ends."""
        members = self.members.get(trajectory.group_id)
        if members is None or trajectory not in members:
            return  # a late result of what had ended
        members.remove(trajectory)
        if members:
            return
        del self.members[trajectory.group_id]
        self.living[trajectory.prompt_id] -= 1
        # What the end of a run ends stays in its last checkpoint, and is sampled anew where it goes on.
        with_the_run = reason in (DropReason.DRAINED, DropReason.CANCELLED)
        if with_the_run:
            self.drawn_again.add(trajectory.prompt_id)
        again = (
            with_the_run
            or reason in (DropReason.LOST_RACE, DropReason.CUT)
            or (reason is DropReason.STALE and self.settings.when_stale is StalePolicy.REGENERATE)
        )
        if not again:
            self.over.add(trajectory.prompt_id)

    # ---- what the world may do

    def answer_draw(self) -> None:
        assert self.draw is not None
        count = self.draw if self.prompts_left is None else min(self.draw, self.prompts_left)
        exhausted = count < self.draw
        if self.prompts_left is not None:
            self.prompts_left -= count
        numbers = range(self.next_prompt, self.next_prompt + count)
        names = tuple(f"p{number}" for number in numbers)
        domains = tuple(domain_of(number) for number in numbers)
        self.domain_of.update(zip(names, domains, strict=True))
        self.next_prompt += count
        self.draw = None
        asks = bool(self.settings.tail_batching.domain_column)
        tokens = tuple(10 + number % 7 for number in numbers)
        self.tell(
            on.PromptsDrawn(
                prompt_ids=names, exhausted=exhausted, prompt_tokens=tokens, domains=domains if asks else ()
            )
        )

    def score(
        self, trajectory: TrajectoryId, reward: float, tokens: int, late: int = 0, truncated: bool = False
    ) -> None:
        for place in (self.running, self.stopped_at, self.returning):
            if trajectory in place:
                launched = place.pop(trajectory)
                break
        oldest = min(launched + late, self.live_version)  # queued in a pause: first token under newer weights
        self.oldest[trajectory] = oldest
        if trajectory in self.members.get(trajectory.group_id, ()):
            self.scored.add(trajectory)
        self.tell(
            on.TrajectoryScored(
                id=trajectory,
                reward=reward,
                tokens=tokens,
                finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
                oldest_version=oldest,
                newest_version=self.live_version,
            )
        )

    def fail(self, trajectory: TrajectoryId, reason: DropReason = DropReason.REWARD_FAILED, policy: str = "") -> None:
        for place in (self.running, self.stopped_at, self.returning):
            place.pop(trajectory, None)
        self._leaves(trajectory, reason)
        self.tell(on.TrajectoryFailed(id=trajectory, reason=reason, message="planted", tokens=2, policy=policy))

    def lose_an_engine(self, random: Random) -> None:
        """Half of what runs ends at once."""
        for trajectory in [t for t in self.sampled if random.random() < 0.5]:
            if trajectory in self.running and self.stopped is None and self.finished is None:
                self.fail(trajectory, DropReason.ENGINE_FAILED)

    def save(self) -> None:
        self.checkpoint = self.written
        super().save()

    def late_result(self, random: Random) -> None:
        """What was cancelled while it ran comes back once, as a result or as an end, and changes nothing."""
        trajectory = random.choice(sorted(self.returning))
        before = self.core.accounting()
        told = len(self.answers)
        if random.random() < 0.5:
            self.score(trajectory, 1.0, tokens=9)
        else:
            self.fail(trajectory, DropReason.CANCELLED)
        assert self.core.accounting() == before, "a late result changed the accounting"
        assert all(isinstance(a, do.ForgetTrajectories) for a in self.answers[told:]), "a late result was acted upon"

    def cut_arrives(self, random: Random) -> None:
        """The engine tells how far one came that was stopped; it decides nothing."""
        told = len(self.answers)
        self.tell(on.TrajectoryCut(id=random.choice(sorted(self.stopped_at)), tokens=4))
        assert len(self.answers) == told

    def measure(self, random: Random) -> None:
        """Engines and clocks report. Now and then the tail looks costly, so that ``auto`` has something to change."""
        busy = float(len(self.running))
        token_s = random.choice([0.001, 0.001, 0.0001 * (1 + busy)])
        self.tell(on.EnginesMeasured(running=busy, waiting=0, token_s=token_s, kv_usage=0.3, preemptions=0))
        rollout_s = random.choice([0.06, 0.06, 0.5])
        self.tell(on.RoundTimed(policy_version=self.trainer_version, rollout_s=rollout_s, training_s=0.01, push_s=0.01))

    def step(self) -> None:
        order = self.to_step
        assert order is not None
        groups = self.batches[order.batch_id]
        self._check_batch(order, groups)
        for trajectory in [t for ids in groups for t in ids]:
            self._leaves(trajectory, None)
        super().step()

    def _check_batch(self, order: do.StepOptimizer, groups: list[tuple[TrajectoryId, ...]]) -> None:
        settings = self.settings
        batches = settings.tail_batching.long_round_batches if settings.rounds is RoundKind.TAIL_BATCHING else 1
        # Off-policy rounds may hold groups of several sizes: the last one to join may take more than the seats left.
        mixes = not self.core.policy.on_policy and settings.group_sizing.kind is not SizingKind.FIXED
        excess = max(settings.group_sizing.sizes) - 1 if mixes else 0
        assert order.samples <= batches * settings.batch_trajectories + excess, "more than a batch"
        seats = sum(len(self.of_group[ids[0].group_id].ids) for ids in groups)
        ended_early = self.core.supply.exhausted or settings.length_sorted.cut_tokens
        assert seats >= settings.batch_trajectories or ended_early, "less than a batch"
        for ids in groups:
            # Of a race of responses the kept ones are the first that were rewarded; all others have left.
            assert set(ids) == self.members[ids[0].group_id], "part of a group was trained"
        if settings.tail_batching.domains and not self.core.supply.exhausted:
            trained = Counter(self.domain_of[ids[0].prompt_id] for ids in groups)
            quota = DomainShares(settings.tail_batching.domains).quota(len(groups))
            assert trained == {name: number for name, number in quota.items() if number}, "shares of the domains"
        if self.core.policy.on_policy:
            stale = [t for ids in groups for t in ids if self.oldest[t] != self.trainer_version]
            assert not stale, "an on-policy round trains what an older version sampled"

    def moves(self, random: Random) -> list[tuple[int, Callable[[], None]]]:
        """(weight, what may happen now)."""
        possible: list[tuple[int, Callable[[], None]]] = []
        if self.draw is not None:
            possible.append((20, self.answer_draw))
        if self.sampled:
            possible.append((60, lambda: self.score_any(random, self.sampled)))
            possible.append((2, lambda: self.fail(random.choice(self.sampled), policy=random.choice(POLICIES))))
            possible.append((1, lambda: self.lose_an_engine(random)))
        if self.stopped_at:
            possible.append((4, lambda: self.score_any(random, sorted(self.stopped_at))))
            possible.append((1, lambda: self.fail(random.choice(sorted(self.stopped_at)))))
            possible.append((3, lambda: self.cut_arrives(random)))
        if self.returning:
            possible.append((6, lambda: self.late_result(random)))
        if self.to_step is not None:
            possible.append((10, self.step))
        if self.to_publish is not None:
            possible.append((10, self.go_live))
        if self.to_evaluate is not None:
            possible.append((10, self.evaluate))
        if self.to_save is not None:
            possible.append((10, self.save))
        return possible

    def score_any(self, random: Random, among: list[TrajectoryId]) -> None:
        """One of them ends with some reward and length."""
        tokens = random.choice([1, 2, 3, 5, 8, 20, 60])
        trajectory = random.choice(among)
        self.score(trajectory, random.choice([0.0, 1.0]), tokens, random.choice([0, 0, 0, 1]), truncated=tokens == 60)

    def anything_else(self, random: Random) -> None:
        """What a test adds to a walk."""

    # ---- what must hold

    def check(self) -> None:
        super().check()
        supply = self.core.supply
        of_one_size = self.settings.rounds in (TAIL, SORTED) and not self.settings.length_sorted.single
        if of_one_size and not supply.exhausted:
            again = [group for group in self.core.buffer.groups.values() if group.queued]
            assert all(group.keep == group.ticket.group_size for group in again), (
                "trained at another size than its cohort, or than it lost at"
            )

    def check_end(self) -> None:
        super().check_end()
        if self.finished is not None:
            assert not self.members, f"groups that never ended: {sorted(self.members)}"
            if self.finished == EXHAUSTED:
                left = sorted(set(self.domain_of) - self.over)
                assert not left, f"prompts that were drawn and neither trained nor dropped: {left}"
        self._check_replay()

    def _check_replay(self) -> None:
        """The log rebuilds the run: the same events give the same actions."""
        again = ControlState(self.settings)
        answers = [action for event in self.log for action in again.handle(event)]
        assert answers == self.answers, "a replay decides differently"


def random_run(
    random: Random,
    composition: str,
    sizing: str,
    stop_share: float = 0.005,
    world_of: type[PolicyWorld] = PolicyWorld,
    deterministic: bool = False,
) -> PolicyWorld:
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
        if world.finished is not None or world.stopped is not None:
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
    world.run_to_end(20000)
    world.check_end()
    return world
