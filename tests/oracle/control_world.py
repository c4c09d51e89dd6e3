"""The oracle of control: a world around the pure core that answers in any order, with a ledger of its own.

Engines, rewards and trainer are sets of things that may happen next. What was dropped while it ran still comes back
once; rewards fail while their engine is stopped; engines are lost; runs are killed and resumed from a checkpoint. After
every event ``check`` compares what control says with the ledger: every trajectory, group and prompt ends once, with a
reason (accounting); nothing that is trained is too old (staleness); and a run always ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import Control, fork
from streamrl.control.policies.deterministic import DeterministicControl
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import RunState, Snapshot, prompts_needed
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import DeferredPrompts, RoundKind, StalePolicy

TAIL, SORTED, CONTINUOUS = RoundKind.TAIL_BATCHING, RoundKind.LENGTH_SORTED, RoundKind.CONTINUOUS
AFTER_FAILURE = ("", "", "drop_group")  # what a recipe may want when a reward failed


def control_settings(**changes: object) -> ControlSettings:
    defaults: dict[str, object] = {
        "steps": 3,
        "batch_groups": 2,
        "group_size": 2,
        "rounds": RoundKind.SYNCHRONOUS,
        "max_staleness": 0,
        "when_stale": StalePolicy.WAIT,
        "dynamic_sampling": False,
        "max_failed_share": 1.0,
        "failure_window": 8,
    }
    return ControlSettings(**{**defaults, **changes})  # type: ignore[arg-type]


def through_bytes(snapshot: Snapshot) -> Snapshot:
    """As it is read back from the disk."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)


class Checkpoint(msgspec.Struct, kw_only=True):
    """What a checkpoint has of control, and what the ledger of the world said when it was written."""

    version: int
    control: Snapshot
    attempts: dict[str, list[do.LaunchGroup]]
    over: set[str]


class World:
    """``prompts``: that the source has from its beginning (None: endless); ``start``: the version that it begins with;
    ``resumed_from``: the checkpoint of a run that was killed.

    ``recipe``: what it was begun with; ``settings``: what is in force. ``running``, ``paused``: trajectories that are
    sampled or stopped, with their launch version; ``returning``: dropped while they ran, so that their result is still
    on the way. ``log``, ``answers``: events so far, and all actions."""

    steered = False

    def __init__(
        self,
        chosen: ControlSettings,
        prompts: int | None = None,
        start: int = 0,
        resumed_from: Checkpoint | None = None,
    ) -> None:
        self.settings = self.recipe = chosen
        self.prompts, self.resumed_from = prompts, resumed_from
        kept = None if resumed_from is None else fork(resumed_from.control, chosen)
        self.first = None if kept is None else msgspec.msgpack.encode(kept)
        self.core = self.control(chosen, kept)
        self.start = self.trainer_version = self.live_version = resumed_from.version if resumed_from else start
        self.next_prompt = self.core.state.prompts.drawn
        self.prompts_left = None if prompts is None else prompts - self.next_prompt
        self.of_set = self.positions()
        self.written: Checkpoint | None = None
        self.checkpoint: Checkpoint | None = None
        self.log: list[on.ControlEvent] = []
        self.answers: list[do.ControlAction] = []
        # the stages
        self.running: dict[TrajectoryId, int] = {}
        self.paused: dict[TrajectoryId, int] = {}
        self.returning: dict[TrajectoryId, int] = {}
        self.scored: set[TrajectoryId] = set()
        self.oldest: dict[TrajectoryId, int] = {}
        self.batches: dict[int, list[tuple[TrajectoryId, ...]]] = {}
        self.draw: do.DrawPrompts | None = None
        self.to_step: do.StepOptimizer | None = None
        self.to_publish: int | None = None
        self.to_evaluate: tuple[int, int] | None = None
        self.to_save: int | None = None
        self.paused_for: int | None = None
        self.drained = False
        self.finished: str | None = None
        self.stopped: str | None = None
        # the ledger
        self.launched: list[do.LaunchGroup] = []
        self.of_group: dict[int, do.LaunchGroup] = {}
        self.members: dict[int, set[TrajectoryId]] = {}
        self.living: Counter[str] = Counter()
        self.attempts = {p: list(a) for p, a in resumed_from.attempts.items()} if resumed_from else {}
        self.over = set(resumed_from.over) if resumed_from else set()
        pool = self.core.state.prompts
        self.drawn_again = {ref.prompt_id for ref in (*pool.queue, *pool.waiting) if ref.seed_base is None}
        self.content = prompts_needed(self.core.state)
        self.issued: set[TrajectoryId] = set()
        self.trained: Counter[TrajectoryId] = Counter()
        self.failed: dict[TrajectoryId, DropReason] = {}
        self.staleness: list[int] = []
        self.due: set[tuple[int, int]] = set()
        self.evaluated: list[tuple[int, int]] = []
        self.saved: list[int] = []

    def control(self, settings: ControlSettings, snapshot: Snapshot | None) -> Control:
        """What decides."""
        return make_control(settings, snapshot)

    @property
    def state(self) -> RunState:
        return self.core.state

    @property
    def over_now(self) -> bool:
        """The run has ended."""
        return self.finished is not None or self.stopped is not None

    @property
    def sampled(self) -> list[TrajectoryId]:
        """Those that may end now: engines do not sample while they are paused."""
        return sorted(t for t, version in self.running.items() if version <= self.live_version)

    # ---- control ---------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.settings.evaluate_at_start and self.start < self.settings.steps:
            self.falls_due(0)
        self.tell(on.RunBegan(policy_version=self.start, steps=self.settings.steps))

    def tell(self, event: on.ControlEvent) -> list[do.ControlAction]:
        """Let control take ``event``, and obey."""
        self.log.append(event)
        self.drained = self.drained or isinstance(event, on.StopRequested)
        if isinstance(event, on.PromptsDrawn):
            self.content.update(event.prompt_ids)
        actions = self.core.handle(event)
        self.answers.extend(actions)
        self.after(event, actions)
        for action in actions:
            self.obey(action)
        if any(isinstance(action, do.WriteCheckpoint) for action in actions):
            self.written = self.take_checkpoint()
        return actions

    def after(self, event: on.ControlEvent, actions: list[do.ControlAction]) -> None:
        """Control took ``event``; ``actions`` were not obeyed yet. Prompts that it does not need are forgotten. A
        failure that waited (deterministic rounds) ended with its group, or counts now."""
        self.content &= prompts_needed(self.state)
        self.settings = msgspec.structs.replace(self.core.settings, steps=self.state.steps)
        if any(isinstance(action, do.Decision) and action.subject == "settings" for action in actions):
            pool = self.state.prompts  # rounds that replay draw what others left anew
            self.drawn_again |= {ref.prompt_id for ref in (*pool.queue, *pool.waiting) if ref.seed_base is None}
        dropped = {i for a in actions if isinstance(a, do.Drop) for i in a.ids}
        for trajectory in [t for t in self.failed if self.state.buffer.member(t) is None]:
            reason = self.failed.pop(trajectory)
            if trajectory not in dropped:
                self._leaves(trajectory, reason)

    def take_checkpoint(self) -> Checkpoint:
        return Checkpoint(
            version=self.trainer_version,
            control=through_bytes(self.core.snapshot()),
            attempts={prompt: list(launches) for prompt, launches in self.attempts.items()},
            over=set(self.over),
        )

    def killed_and_resumed(self) -> World:
        """A new run that goes on from the last checkpoint that is complete."""
        assert self.checkpoint is not None
        return type(self)(self.settings, self.prompts, resumed_from=self.checkpoint)

    def obey(self, action: do.ControlAction) -> None:
        match action:
            case do.DrawPrompts():
                assert self.draw is None
                self.draw = action
            case do.LaunchGroup():
                self._launch(action)
            case do.Drop():
                self._drop(action)
            case do.PauseEngines():
                self._pause_engines(action.policy_version)
            case do.PauseTrajectories():
                for trajectory in action.ids:
                    self.paused[trajectory] = self.running.pop(trajectory)
            case do.ResumeTrajectories():
                for trajectory in action.ids:
                    self.running[trajectory] = self.paused.pop(trajectory)
            case do.Decision():
                assert action.reason
            case do.TrainGroupNow():
                assert self.to_step is None, "group handed to a closed batch"
                assert set(action.ids) <= self.scored, "untrained reward"
                self.batches.setdefault(action.batch_id, []).append(action.ids)
            case do.StepOptimizer():
                assert self.to_step is None
                self.to_step = action
            case do.PublishWeights():
                assert self.to_publish is None, "two pushes at once"
                self.to_publish = action.policy_version
            case do.Evaluate():
                assert self.to_evaluate is None and not self.drained
                self.to_evaluate = (action.policy_version, action.limit)
            case do.CancelEvaluation():
                assert self.drained
                if self.to_evaluate is not None:  # else it is over, and its answer waits (deterministic rounds)
                    assert action.policy_version == self.to_evaluate[0]
                    self.due.discard(self.to_evaluate)  # dropped, and said so
            case do.WriteCheckpoint():
                assert self.to_save is None
                self.to_save = action.policy_version
            case do.End():
                if action.error:
                    self.stopped = action.reason
                else:
                    self.finished = action.reason

    def _launch(self, action: do.LaunchGroup) -> None:
        ids = action.ids
        prompt, attempt = ids[0].prompt_id, ids[0].attempt
        assert prompt in self.content, "its prompt was forgotten"
        assert {(t.prompt_id, t.attempt, t.group_id) for t in ids} == {(prompt, attempt, action.group_id)}
        assert [t.sample for t in ids] == list(range(len(ids)))
        assert action.group_id >= self.start * self.settings.batch_groups
        assert not set(ids) & self.issued, "identity used twice"
        before = self.attempts.setdefault(prompt, [])
        if not self.settings.length_sorted.single:
            assert not self.living[prompt], "two groups of one prompt at once"
            assert prompt not in self.over, "launched again after it had ended"
            assert attempt == len(before), "an attempt is missing or used twice"
            races = self.settings.rounds in (TAIL, RoundKind.AUTO)
            if before and races and self.settings.tail_batching.deferred_prompts is DeferredPrompts.REPLAY:
                same = action.seed_base == before[-1].seed_base
                # What was under way when the run was killed is drawn anew.
                assert same or prompt in self.drawn_again, "a replayed prompt draws from other seeds"
                self.drawn_again.discard(prompt)
            elif before and not self.steered:  # rounds that do not replay take what others deferred
                assert action.seed_base not in {launch.seed_base for launch in before}, "the same seeds again"
        before.append(action)
        self.launched.append(action)
        self.of_group[action.group_id] = action
        self.members[action.group_id] = set(ids)
        self.living[prompt] += 1
        self.issued.update(ids)
        self.running |= dict.fromkeys(ids, action.policy_version)

    def _pause_engines(self, version: int) -> None:
        assert self.paused_for is None and not self.running, "what runs under the old weights is paused"
        self.paused_for = version

    def _drop(self, action: do.Drop) -> None:
        for trajectory in action.ids:
            if trajectory in self.running or trajectory in self.paused:
                assert action.abort, "dropped while it runs, and nobody stops it"
                self.returning[trajectory] = self.running.get(trajectory, self.paused.get(trajectory, 0))
            self._leaves(trajectory, action.reason)
            self.running.pop(trajectory, None)
            self.paused.pop(trajectory, None)
            self.scored.discard(trajectory)

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
        deferred = reason in (DropReason.LOST_RACE, DropReason.BATCH_FULL)
        regenerated = reason is DropReason.STALE and self.settings.when_stale is StalePolicy.REGENERATE
        if not (with_the_run or deferred or regenerated):
            self.over.add(trajectory.prompt_id)

    # ---- what the world may do -------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Do the one thing that is due, at source, engines or trainer; False: only results can come."""
        if self.draw is not None:
            self.answer_draw()
        elif self.to_publish is not None:
            self.go_live()
        elif self.to_evaluate is not None:
            self.evaluate()
        elif self.to_save is not None:
            self.save()
        elif self.to_step is not None:
            self.step()
        else:
            return False
        return True

    def answer_draw(self) -> None:
        assert self.draw is not None
        if self.draw.sets:
            self.answer_draw_of_sets(self.draw)
            return
        count = self.draw.count if self.prompts_left is None else min(self.draw.count, self.prompts_left)
        exhausted = count < self.draw.count
        if self.prompts_left is not None:
            self.prompts_left -= count
        numbers = range(self.next_prompt, self.next_prompt + count)
        self.next_prompt += count
        self.draw = None
        tokens = tuple(10 + number % 7 for number in numbers)
        names = tuple(f"p{number}" for number in numbers)
        self.tell(on.PromptsDrawn(prompt_ids=names, exhausted=exhausted, prompt_tokens=tokens))

    def answer_draw_of_sets(self, order: do.DrawPrompts) -> None:
        """Each set has as many prompts as ``prompts`` says."""
        assert len(order.sets) == order.count
        names, sets, exhausted_sets = [], [], []
        for name in order.sets:
            if self.prompts is not None and self.of_set[name] >= self.prompts:
                exhausted_sets.append(name)
                continue
            names.append(f"{name}/p{self.of_set[name]}")
            sets.append(name)
            self.of_set[name] += 1
        self.draw = None
        exhausted = tuple(dict.fromkeys(exhausted_sets))
        self.tell(on.PromptsDrawn(prompt_ids=tuple(names), sets=tuple(sets), exhausted_sets=exhausted))
        if not self.over_now:  # else it is not taken
            assert self.positions() == +self.of_set, "control has other positions than the sources"

    def positions(self) -> Counter[str]:
        """Prompts that each set has given, as control knows it: where its source is opened again."""
        return Counter({name: drawn.drawn for name, drawn in self.state.prompts.sets.items() if drawn.drawn})

    def score(
        self, trajectory: TrajectoryId, reward: float, tokens: int, late: int = 0, truncated: bool = False
    ) -> None:
        launched = next(p.pop(trajectory) for p in (self.running, self.paused, self.returning) if trajectory in p)
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
                seconds=tokens / 8,
            )
        )

    def score_any(self, random: Random, among: list[TrajectoryId]) -> None:
        """One of them ends with some reward and length."""
        tokens = random.choice([1, 2, 3, 5, 8, 20, 60])
        trajectory = random.choice(among)
        self.score(trajectory, random.choice([0.0, 1.0]), tokens, random.choice([0, 0, 0, 1]), truncated=tokens == 60)

    def fail(self, trajectory: TrajectoryId, policy: str = "", reason: DropReason = DropReason.REWARD_FAILED) -> None:
        for place in (self.running, self.paused, self.returning):
            place.pop(trajectory, None)
        self.failed[trajectory] = reason
        self.tell(on.TrajectoryFailed(id=trajectory, reason=reason, message="planted", tokens=2, policy=policy))

    def lose_an_engine(self, random: Random) -> None:
        """Half of what runs ends at once."""
        for trajectory in [t for t in self.sampled if random.random() < 0.5]:
            if trajectory in self.running and not self.over_now:
                self.fail(trajectory, reason=DropReason.ENGINE_FAILED)

    def late_result(self, random: Random) -> None:
        """What was dropped while it ran comes back once, as a result or as an end, and changes nothing."""
        trajectory = random.choice(sorted(self.returning))
        before, answered = self.state.accounting(), len(self.answers)
        if random.random() < 0.5:
            self.score(trajectory, 1.0, tokens=9)
        else:
            self.fail(trajectory, reason=DropReason.CANCELLED)
        assert self.state.accounting() == before, "a late result changed the accounting"
        late = [a for a in self.answers[answered:] if not (isinstance(a, do.Drop) and not a.abort)]
        assert not late, "a late result was acted upon"

    def measured(self, token_s: float = 0.001, environment: int = 0, **caches: Any) -> on.EnginesMeasured:
        figures = {"token_s": token_s, "environment": environment, "kv_usage": 0.3, "preemptions": 0} | caches
        return on.EnginesMeasured(running=float(len(self.running)), waiting=0, **figures)

    def measure_caches(self, random: Random) -> None:
        """Engines report their KV caches, anywhere from empty to full, and contexts that were known a while ago."""
        open_groups = [group for group in self.state.buffer.untrained if random.random() < 0.9]
        contexts = {group: random.randint(0, 100) for group in open_groups}
        preemptions = random.choice([0, 0, 2])
        self.tell(self.measured(kv_usage=random.random(), contexts=contexts, preemptions=preemptions))

    def measure(self, random: Random) -> None:
        """Engines and clocks report. Now and then the tail looks costly, so that ``auto`` has something to change."""
        self.tell(self.measured(random.choice([0.001, 0.001, 0.0001 * (1 + len(self.running))])))
        rollout_s = random.choice([0.06, 0.06, 0.5])
        self.tell(on.RoundTimed(policy_version=self.trainer_version, rollout_s=rollout_s, training_s=0.01, push_s=0.01))

    def step(self) -> None:
        order = self.to_step
        assert order is not None
        groups = self.batches.pop(order.batch_id)
        self._check_batch(order, groups)
        for trajectory in [t for ids in groups for t in ids]:
            self._leaves(trajectory, None)
            self.staleness.append(self.trainer_version - self.oldest[trajectory])
            self.trained[trajectory] += 1
            self.scored.discard(trajectory)
        self.to_step = None
        self.trainer_version = order.policy_version
        change = order.policy_version % 4 / 100 if self.settings.tracked else 0.0
        self.tell(on.BatchTrained(batch_id=order.batch_id, policy_version=order.policy_version, change=change))

    def go_live(self) -> None:
        assert self.to_publish is not None
        self.live_version, self.to_publish = self.to_publish, None
        if self.paused_for == self.live_version:
            self.paused_for = None
        every, at_end = self.settings.evaluate_every, self.settings.evaluate_at_end
        if every and self.live_version % every == 0 and not (at_end and self.live_version == self.settings.steps):
            self.falls_due(0 if "evaluate" in self.state.steering.waiting_orders else self.settings.evaluate_limit)
        self.tell(on.WeightsLive(policy_version=self.live_version))

    def falls_due(self, limit: int) -> None:
        if not self.drained:
            self.due.add((self.live_version, limit))

    def evaluate(self) -> None:
        assert self.to_evaluate is not None
        done, self.to_evaluate = self.to_evaluate, None
        self.evaluated.append(done)
        self.tell(on.EvaluationDone(policy_version=done[0]))

    def save(self) -> None:
        self.checkpoint = self.written
        self.saved.append(self.trainer_version)
        self.to_save = None
        self.tell(on.CheckpointDone(policy_version=self.trainer_version))

    def moves(self, random: Random) -> list[tuple[int, Callable[[], None]]]:
        """(weight, what may happen now)."""
        possible: list[tuple[int, Callable[[], None]]] = []
        if self.sampled:
            possible.append((60, lambda: self.score_any(random, self.sampled)))
            possible.append((2, lambda: self.fail(random.choice(self.sampled), random.choice(AFTER_FAILURE))))
            possible.append((1, lambda: self.lose_an_engine(random)))
        if self.paused:
            possible.append((4, lambda: self.score_any(random, sorted(self.paused))))
            possible.append((1, lambda: self.fail(random.choice(sorted(self.paused)))))
        if self.returning:
            possible.append((6, lambda: self.late_result(random)))
        return possible + self.due_answers()

    def due_answers(self) -> list[tuple[int, Callable[[], None]]]:
        """What source, trainer and engines may answer now, as ``moves``."""
        asked = (
            (20, self.draw, self.answer_draw),
            (10, self.to_step, self.step),
            (10, self.to_publish, self.go_live),
            (10, self.to_save, self.save),
            (10, self.to_evaluate, self.evaluate),
        )
        return [(weight, answer) for weight, order, answer in asked if order is not None]

    def anything_else(self, random: Random) -> None:
        """What a checker adds to a walk."""
        if self.core.settings.admission is not None and random.random() < 0.2:
            self.measure_caches(random)

    def run_to_end(self, limit: int = 20_000) -> None:
        """Whatever is possible happens, oldest first: the run must end."""
        for _ in range(limit):
            if self.over_now:
                return
            if self.goes_on():
                continue
            if self.sampled:
                trajectory = self.sampled[0]
                self.score(trajectory, reward=float(trajectory.sample), tokens=3)
            else:
                raise AssertionError(f"nothing can happen and the run has not ended: {self.state.accounting()}")
        raise AssertionError("the run does not end")

    # ---- what must hold --------------------------------------------------------------------------

    def _check_batch(self, order: do.StepOptimizer, groups: list[tuple[TrajectoryId, ...]]) -> None:
        settings, on_policy = self.settings, self.core.rules.policy.on_policy
        assert len(groups) == order.groups and sum(map(len, groups)) == order.samples
        batches = settings.tail_batching.long_round_batches if settings.rounds is TAIL else 1
        target = self.state.batch.target
        assert target <= batches * settings.batch_weight, "more than a batch"
        assert target >= settings.batch_weight or settings.length_sorted.cut_tokens, "less than a batch"
        kept = {group.keep for group in self.state.buffer.batched.values()}
        mixed = self.steered and settings.rounds is SORTED  # a cohort of what rounds of other sizes left
        assert len(kept) < 2 or not on_policy or mixed, "a round of several sizes"
        for ids in groups:
            # Of a race of responses the kept ones are the first that were rewarded; all others have left.
            assert set(ids) == self.members[ids[0].group_id], "part of a group was trained"
            oldest = min(self.oldest[t] for t in ids)
            assert self.trainer_version - oldest <= (0 if on_policy else settings.max_staleness), "trained too late"

    def check(self) -> None:
        state, settings = self.state, self.settings
        assert not (found := violations(state, self.core.rules)), found
        if isinstance(self.core, DeterministicControl) and on.BatchTrained in self.core._answers:
            return  # the ledger is ahead of what counts
        accounting = state.accounting()
        assert accounting.issued == len(self.issued)
        assert accounting.trained == sum(self.trained.values())
        assert all(count == 1 for count in self.trained.values()), "trained twice"
        groups = list(state.buffer.groups())
        waiting = {i for i in self.scored if state.buffer.member(i) is not None}
        assert waiting >= {i for g in groups for i in {*g.ids} - {*g.open_ids}}, "scored, and nobody scored it"
        if settings.rounds in (TAIL, SORTED) and not settings.length_sorted.single and not state.prompts.exhausted:
            assert all(group.keep == group.prompt.group_size for group in groups if group.queued), (
                "trained at another size than its cohort, or than it was deferred at"
            )

    def check_end(self) -> None:
        self.check()
        assert "wait for nothing" not in str(self.stopped)
        self._check_replay()
        if self.finished is None:
            return
        assert not self.members, f"groups that never ended: {sorted(self.members)}"
        if self.settings.evaluate_at_end and self.start < self.settings.steps:
            self.falls_due(0)
        missed = self.due - set(self.evaluated)
        assert not missed, f"neither done nor dropped: {missed}"
        assert len(set(self.evaluated)) == len(self.evaluated), "evaluated twice"
        assert len(set(self.saved)) == len(self.saved), "saved twice"
        if self.settings.checkpoint_at_end and self.start < self.settings.steps:
            assert self.saved[-1] == self.trainer_version
        if self.state.starved and not self.drained:
            drawn = {f"p{n}" for n in range(self.next_prompt)}
            if self.settings.shares:
                drawn = {f"{name}/p{n}" for name, count in self.of_set.items() for n in range(count)}
            left = sorted(drawn - self.over)
            assert not left, f"prompts that were drawn and neither trained nor dropped: {left}"

    def _check_replay(self) -> None:
        """The log rebuilds the run: the same events give the same actions."""
        first = None if self.first is None else msgspec.msgpack.decode(self.first, type=Snapshot)
        again = self.control(self.recipe, first)
        answers = [action for event in self.log for action in again.handle(event)]
        assert answers == self.answers, "a replay decides differently"


def begun(**changes: object) -> World:
    """A world with these settings whose first prompts are launched."""
    world = World(control_settings(**changes))
    world.begin()
    world.answer_draw()
    return world
