"""What a step says about itself: trajectories are followed to their end, bias and idleness are reported."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import msgspec
import pytest
from builders.base import SetClock
from builders.observe import unregistered
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from oracle.control_world import TAIL, begun, control_settings
from oracle.trace_header import trace_header

from streamrl.base.messages import EngineLoad, WeightAnnouncement
from streamrl.base.run_events import RunEvent, StepFinished
from streamrl.base.stage_messages import RolloutStatistics, Scored, TrajectoryLost, TrajectoryPaused
from streamrl.base.types import (
    DropReason,
    FinishReason,
    Prompt,
    RewardCall,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    token_array,
)
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import PushReport
from streamrl.control.actions import Drop, LaunchGroup, PublishWeights, StepOptimizer
from streamrl.control.events import ControlEvent, PromptsDrawn, RunBegan
from streamrl.control.policies.round_policies import make_control
from streamrl.observe.report.alarms import Alarms, alarm_rules
from streamrl.observe.report.run_report import FigureSources, RunReport
from streamrl.observe.report.trajectory_stats import RewardCalls, TrajectoryStats
from streamrl.observe.report.trajectory_trace import TrajectoryTrace, read_trace
from streamrl.recipe.scheduling import TailBatching
from streamrl.run.journal.records import JOURNAL_SCHEMA, JournalBase
from streamrl.run.journal.recover import RecoveredRun, Resumption
from streamrl.run.step_metrics import discard_metrics, length_metrics, reward_metrics, set_metrics, unbiased_mean
from streamrl.run.wait_reason import WaitReason

SETTINGS = control_settings(steps=9, max_failed_share=0.5, failure_window=64)
ANCHOR = WeightAnnouncement(policy_version=0, base_version=None, state_hash=0, sources=())


def identity(group: int, sample: int, attempt: int = 0) -> TrajectoryId:
    return TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=sample, attempt=attempt)


def launch(ids: Sequence[TrajectoryId], version: int, kind: str) -> LaunchGroup:
    return LaunchGroup(group_id=ids[0].group_id, ids=tuple(ids), policy_version=version, seed_base=0, round_kind=kind)


def trajectory(
    trajectory_id: TrajectoryId, tokens: int, reason: FinishReason = FinishReason.STOP, version: int = 0
) -> Trajectory:
    segment = Segment(
        token_ids=token_array([5] * tokens),
        trained=True,
        version_spans=(VersionSpan(start=0, end=tokens, policy_version=version),),
    )
    prompt = Prompt(prompt_id=trajectory_id.prompt_id, token_ids=token_array([1, 2, 3]))
    return Trajectory(
        id=trajectory_id, prompt=prompt, segments=(segment,), finish_reason=reason, rollout_seconds=tokens / 100
    )


def scored(
    trajectory_id: TrajectoryId, tokens: int, reward: float = 1.0, reason: FinishReason = FinishReason.STOP
) -> ScoredTrajectory:
    return ScoredTrajectory(trajectory=trajectory(trajectory_id, tokens, reason), reward=reward, reward_seconds=0.25)


def lost(trajectory_id: TrajectoryId, tokens: int, *, cancelled: bool = True) -> TrajectoryLost:
    return TrajectoryLost(id=trajectory_id, cancelled=cancelled, reason="cancelled", tokens=tokens)


# ---- signal within groups --------------------------------------------------------------------------


def test_a_group_of_one_says_nothing_about_signal() -> None:
    """SortedRL trains single trajectories: no alarm may call that a batch without signal."""
    single = reward_metrics([scored(identity(group, 0), 10, reward=group) for group in range(4)])
    assert single["reward/std"] > 0
    assert not {"reward/zero_std_ratio", "reward/group_std_mean"} & single.keys()
    alarms = Alarms(alarm_rules(0.05))
    assert not [message for step in range(20) for message in alarms.check(step, single)]
    mixed = reward_metrics([scored(identity(group, sample), 10) for group in range(3) for sample in range(group + 1)])
    assert mixed["reward/zero_std_ratio"] == 1.0


# ---- what rewards cost -----------------------------------------------------------------------------


def test_each_training_set_has_figures_of_its_own() -> None:
    """Figures are of the samples of the set alone, and a run of a single source has none."""
    of_sets = []
    for n, sample in enumerate(batch_of(3, 2, 4)):
        prompt = replace(sample.trajectory.prompt, set="code" if n < 2 else "math")
        of_sets.append(replace(sample, trajectory=replace(sample.trajectory, prompt=prompt)))
    of_sets[:2] = [replace(one, reward=3.0 + n) for n, one in enumerate(of_sets[:2])]
    figures = set_metrics(of_sets)
    assert figures["prompts/code/samples"] == 2
    assert figures["prompts/code/reward_mean"] == 3.5
    assert figures["prompts/code/reward_zero_std_ratio"] == 0
    assert figures["prompts/math/samples"] == 4
    assert figures["prompts/math/reward_mean"] == pytest.approx(fmean(one.reward for one in of_sets[2:]))
    assert figures["prompts/math/completion_length_mean"] == 4
    assert not unregistered(figures)
    assert set_metrics(batch_of(3, 2, 4)) == {}


def returned(sample: int, reward_s: float, *calls: RewardCall) -> Scored:
    outcome = msgspec.structs.replace(scored(identity(0, sample), 10), calls=calls)
    return Scored(outcome=outcome, reward_s=reward_s)


def test_a_slow_reward_costs_what_the_batch_waited_for_it_alone() -> None:
    calls, stats = RewardCalls(), TrajectoryStats()
    quick = RewardCall(function="quick", seconds=0.1)
    slow = RewardCall(function="slow", seconds=3.0, waited_s=1.0, limit_s=5.0, adapted=True)
    late = RewardCall(function="slow", seconds=5.0, failure=RewardFailureKind.TIMED_OUT)
    ids = [identity(0, sample) for sample in range(4)]
    stats.launched(launch(ids, 0, "short"), 1, 0.0)
    # Sampled at 0, 5 and 6 seconds, rewarded at 4, 5.1 and 9: without rewards the batch would be complete at 6.
    for item, now in (
        (returned(0, 4.0, quick, slow), 4.0),
        (returned(1, 0.1, quick), 5.1),
        (returned(2, 3.0, quick, slow), 9.0),
        (returned(3, 90.0, slow), 99.0),
        (returned(4, 5.0, quick, late), 9.5),  # a shadow: scored all the same
    ):
        calls.on_outcome(item)
        stats.on_outcome(item, now)
    stats.dropped(ids[3:], DropReason.STALE, 99.0)  # the batch did not wait for it
    cost = stats.trained([scored(identity(0, sample), 10) for sample in range(3)], 99.0)
    assert cost == {"reward/round_cost_s": 3.0, "reward/func/slow/round_cost_s": 3.0}
    figures = calls.take()
    assert figures["reward/func/quick/latency_p50_s"] == 0.1
    assert figures["reward/func/slow/waited_p95_s"] == 1.0
    assert figures["reward/func/slow/adapted_limit_p50_s"] == 5.0
    assert figures["reward/func/slow/timed_out_total"] == 1.0
    assert not unregistered([*figures, *cost])
    assert set(calls.take()) == {"reward/func/slow/timed_out_total"}  # counters go on, the rest starts at 0


# ---- every trajectory to its end -----------------------------------------------------------------


def test_each_ends_once_whatever_comes_first(tmp_path: Path) -> None:
    """Dropped before and after its result, refused, failed, trained, under way at the end: one line each."""
    trace = TrajectoryTrace(tmp_path / "t", trace_header())
    work = TrajectoryStats(trace)
    ids = [identity(0, sample) for sample in range(9)]
    work.launched(launch(ids, 4, "short"), 3, 1.0)
    work.on_outcome(TrajectoryPaused(id=ids[0], tokens=5), 1.5)
    work.on_outcome(Scored(outcome=scored(ids[0], 10)), 2.0)
    work.trained([scored(ids[0], 10)], 2.5)
    work.dropped([ids[1]], DropReason.LOST_RACE, 2.6)  # it still runs: its tokens are not known yet
    work.dropped([ids[1]], DropReason.CANCELLED, 2.6)  # the first reason holds
    work.on_outcome(lost(ids[1], 7), 2.7)
    work.on_outcome(Scored(outcome=scored(ids[2], 20, reward=0.5)), 3.0)
    work.dropped([ids[2]], DropReason.ZERO_VARIANCE, 3.1)
    work.dropped([ids[3]], DropReason.BATCH_FULL, 3.2)
    work.on_outcome(Scored(outcome=scored(ids[3], 30, reward=0.25)), 3.3)  # it ended before the cancel reached it
    failure = RewardFailure(trajectory=trajectory(ids[4], 40), function="f", kind=RewardFailureKind.RAISED, message="")
    work.on_outcome(Scored(outcome=failure), 3.4)
    work.on_outcome(lost(ids[5], 0, cancelled=False), 3.5)
    work.dropped([ids[6]], DropReason.DRAINED, 3.6)
    work.on_outcome(lost(identity(9, 9), 99), 3.6)  # of an evaluation: not ours
    late = RewardFailure(trajectory=trajectory(ids[7], 8), function="f", kind=RewardFailureKind.RAISED, message="")
    work.on_outcome(Scored(outcome=late), 3.6)
    work.dropped([ids[7]], DropReason.STALE, 3.7)  # control had not heard of the failure when it decided
    window = work.take_window()
    work.close(4.0)
    trace.close()

    lines = read_trace(tmp_path / "t").trajectories
    assert {line.sample: (line.outcome, line.tokens) for line in lines} == {
        0: ("trained", 10),
        1: ("lost_race", 7),
        2: ("zero_variance", 20),
        3: ("cut", 30),
        4: ("reward_failed", 40),
        5: ("engine_failed", 0),
        6: ("drained", 0),
        7: ("stale", 8),
        8: ("unfinished", 0),
    }
    assert len(lines) == 9
    by_sample = {line.sample: line for line in lines}
    assert (by_sample[0].reward, by_sample[4].reward, by_sample[1].reward) == (1.0, None, None)
    assert (by_sample[1].finish_reason, by_sample[1].rollout_s) == ("", 1.7)
    assert (by_sample[1].oldest_version, by_sample[0].rollout_s, by_sample[0].reward_s) == (4, 0.1, 0.25)
    assert work.wasted_tokens == {
        "lost_race": 7,
        "zero_variance": 20,
        "cut": 30,
        "reward_failed": 40,
        "engine_failed": 0,
        "stale": 8,
    }
    assert work.ended_tokens == 10 + 7 + 20 + 30 + 40 + 8
    assert sorted(length.tokens for length in window.sampled) == [0, 7, 8, 10, 20, 30, 40]
    assert window.discarded_rewards == {"short": [0.5, 0.25]}
    assert window.kept_rewards == {"short": [1.0]}
    assert [length.tokens for length in window.trained] == [10]


# ---- length bias ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_with_nothing_stopped_it_is_the_mean(lengths: list[int]) -> None:
    assert unbiased_mean(Counter(lengths), Counter(), 50) == pytest.approx(sum(lengths) / len(lengths))


def test_the_product_limit_estimate_by_hand() -> None:
    # Four at risk: one ends at 2 (3/4 survive), one is stopped at 3, one of the last two ends at 4 (3/8), one at 6.
    # Area 2 + 3/4 * 2 + 3/8 * 2.
    assert unbiased_mean(Counter([2, 4, 6]), Counter([3]), 6) == pytest.approx(2 + 1.5 + 0.75)
    assert unbiased_mean(Counter(), Counter([3]), 6) == 0.0


def test_what_nobody_has_seen_whole_is_not_guessed() -> None:
    # Of 50 one was stopped at 20, beyond all others: at a limit of 30 it can add 10 / 50 to a mean of 10.2.
    lengths, stopped = Counter({10: 49}), Counter([20])
    assert unbiased_mean(lengths, stopped, 30) == pytest.approx(10.2)
    assert unbiased_mean(lengths, stopped, 100) == 0.0


async def test_siblings_that_race_say_nothing_of_the_lengths_that_lost() -> None:
    """From the first race on, which `streamrl set` may have brought; also in rounds without races after it."""
    story = Story()
    work, seen = story.report.trajectories, []
    work.lengths.limit = 30
    for factor in (1.0, 1.5, 1.0):
        world = begun(rounds=TAIL, max_staleness=9, tail_batching=TailBatching(response_oversampling=factor))
        story.report._control = world.core
        await story.launched(world.launched[0])
        ended = scored(world.launched[0].ids[0], 10)
        story.report.on_outcome(Scored(outcome=ended))
        work.trained([ended], 1.0)
        seen.append("length/bias" in length_metrics(work.take_window(), work.lengths, by_kind=False))
    assert seen == [True, False, False]


def test_a_race_is_seen_through() -> None:
    """Of 10 groups the 8 that end first are kept, again and again: the trained mean falls, the estimate does not."""
    source = random.Random(1)
    everything, kept, whole, stopped = [], [], Counter[int](), Counter[int]()
    for _ in range(400):
        lengths = [max(1, round(source.lognormvariate(math.log(45), 0.9))) for _ in range(10)]
        cut = sorted(lengths)[7]
        everything += lengths
        kept += [length for length in lengths if length <= cut]
        whole.update(length for length in lengths if length <= cut)
        stopped.update(cut for length in lengths if length > cut)
    truth = sum(everything) / len(everything)
    assert sum(kept) / len(kept) < 0.75 * truth
    # Beyond the longest cut of all rounds nothing is known, so the heaviest tail is still missing.
    assert 0.9 * truth < unbiased_mean(whole, stopped, max(whole)) < 1.02 * truth


def test_lengths_of_each_kind_of_round() -> None:
    work = TrajectoryStats(limit=30)
    kept, slow, truncated = identity(0, 0), identity(0, 1), identity(1, 0, attempt=1)
    work.launched(launch([kept, slow], 0, "short"), 3, 0.0)
    work.launched(launch([truncated], 0, "long"), 3, 0.0)
    work.on_outcome(Scored(outcome=scored(kept, 10)), 1.0)
    work.on_outcome(lost(slow, 30), 1.0)
    work.on_outcome(Scored(outcome=scored(truncated, 100, reason=FinishReason.LENGTH)), 1.0)
    work.trained([scored(kept, 10), scored(truncated, 100, reason=FinishReason.LENGTH)], 1.0)
    window = work.take_window()
    metrics = length_metrics(window, work.lengths, by_kind=True)
    assert metrics == {
        "length/sampled_mean": pytest.approx(140 / 3),
        "length/sampled_p95": 100,
        "length/sampled_truncated_ratio": pytest.approx(1 / 3),
        "length/long/sampled_mean": 100,
        "length/long/sampled_p95": 100,
        "length/long/sampled_truncated_ratio": 1.0,
        "length/long/trained_mean": 100,
        "length/long/trained_p95": 100,
        "length/long/trained_truncated_ratio": 1.0,
        "length/short/sampled_mean": 20,
        "length/short/sampled_p95": 30,
        "length/short/sampled_truncated_ratio": 0.0,
        "length/short/trained_mean": 10,
        "length/short/trained_p95": 10,
        "length/short/trained_truncated_ratio": 0.0,
        "length/unbiased_mean": 20.0,  # of first attempts: one ended at 10, the other is longer than 30
        "length/bias": pytest.approx(55 / 20),
    }
    rewards = discard_metrics(window, by_kind=True)
    assert rewards == {
        "reward/discarded_samples": 0,
        "round/short/kept_reward_mean": 1.0,
        "round/long/kept_reward_mean": 1.0,
    }
    assert unregistered([*metrics, *rewards]) == []


# ---- the report ----------------------------------------------------------------------------------


class Story:
    """A report on a clock that the test moves, and a rollout whose figures the test sets."""

    def __init__(self, trace: TrajectoryTrace | None = None, *, resumption: Resumption | None = None) -> None:
        self.clock = SetClock(100.0)
        self.serving = 2
        self.busy = self.working = 0.0
        self.tokens = 0
        self.emitted: list[RunEvent] = []
        self.control = make_control(SETTINGS)
        self.store = TrajectoryStore()
        self.report = RunReport(
            self.emit,
            self.control,
            self.store,
            FigureSources(rollout=self.rollout, serving=lambda: self.serving),
            4,
            trace=trace,
            clock=self.clock,
            resumption=resumption,
        )
        self.timed: list[ControlEvent] = []
        self.report._notify = self.timed.append

    async def emit(self, event: RunEvent) -> None:
        self.emitted.append(event)

    def rollout(self) -> RolloutStatistics:
        counts = {"launched": 0, "finished": 0, "running": 0, "generated_tokens": self.tokens}
        return RolloutStatistics(
            **counts, busy_seconds=self.busy, working_seconds=self.working, environment_seconds=self.busy / 2
        )

    def runs(self, seconds: float, running: float) -> None:
        """Time passes with ``running`` trajectories in the engines."""
        self.clock.now += seconds
        self.busy += seconds * running
        self.working += seconds if running else 0.0

    async def step(self, version: int, kind: str, batch: list[ScoredTrajectory]) -> dict[str, float]:
        """Rollout 2 s at 4 running and 2 s at 1; training 3 s; 0.5 s of waiting; a push of 0.5 s."""
        ids = tuple(s.trajectory.id for s in batch)
        await self.launched(launch(ids, version - 1, kind))
        self.runs(2.0, 4.0)
        self.runs(2.0, 1.0)
        for member in batch:
            self.report.on_outcome(Scored(outcome=member))
        close = StepOptimizer(
            batch_id=0, policy_version=version, groups=1, samples=len(batch), trained_tokens=1, round_kind=kind
        )
        await self.report.on_action(close)
        self.runs(3.0, 0.0)
        self.report.on_trained(version, batch, {"time/forward_backward_s": 1.5})
        self.runs(0.5, 0.0)
        await self.report.on_action(PublishWeights(policy_version=version))
        self.runs(0.5, 0.0)
        self.tokens += sum(s.trajectory.generated_tokens for s in batch)
        push = PushReport(
            policy_version=version,
            staged_s=0.1,
            paused_s=0.2,
            total_s=0.4,
            payload_bytes=10,
            changed_share=0.1,
            reanchored=0,
        )
        await self.report.on_weights_live(push, last=False)
        [metrics] = [
            event.metrics for event in self.emitted if isinstance(event, StepFinished) and event.step == version
        ]
        return metrics

    async def launched(self, action: LaunchGroup) -> None:
        self.store.add_prompts([Prompt(i.prompt_id, token_array([1, 2, 3])) for i in action.ids])
        await self.report.on_action(action)


def batch_of(groups: int, size: int, tokens: int, first: int = 0) -> list[ScoredTrajectory]:
    return [scored(identity(first + g, s), tokens, reward=float(s)) for g in range(groups) for s in range(size)]


async def test_a_step_is_reported_as_it_was(tmp_path: Path) -> None:
    trace = TrajectoryTrace(tmp_path / "t", trace_header())
    story = Story(trace)
    await story.report.on_began(ANCHOR)
    extra = identity(7, 0)
    await story.launched(launch([extra], 0, "short"))
    story.report.on_outcome(Scored(outcome=scored(extra, 50, reward=0.25)))
    await story.report.on_action(Drop(ids=(extra,), reason=DropReason.LOST_RACE))
    metrics = await story.step(1, "short", batch_of(2, 2, 20))

    # 10 request-seconds: of 4 s and of 8 s, at the same capacity of 4.
    assert metrics["util/rollout_bubble_ratio"] == pytest.approx(1 - 10 / 16)
    assert metrics["util/environment_bubble_ratio"] == pytest.approx(5 / 16)
    assert metrics["util/free_slot_ratio"] == pytest.approx(1 - 10 / 32)
    assert metrics["util/engine_idle_ratio"] == pytest.approx(1 - 4 / 8), "one request is enough to keep it busy"
    assert metrics["util/capacity"] == 4
    assert metrics["perf/train_tok_s"] == pytest.approx(80 / 8)
    assert metrics["perf/groups_s"] == pytest.approx(2 / 8)
    assert metrics["perf/generated_per_trained_tok"] == pytest.approx(130 / 80)
    assert metrics["perf/wasted_tok_ratio"] == pytest.approx(50 / 130)
    assert metrics["perf/wasted_tok_lost_race_total"] == 50
    assert metrics["length/sampled_mean"] == pytest.approx(130 / 5)
    assert (metrics["reward/mean"], metrics["reward/discarded_mean"]) == (0.5, 0.25)
    assert metrics["reward/discarded_samples"] == 1
    assert (metrics["round/short/group_size"], metrics["round/short/total"]) == (2, 1)
    assert not [name for name in metrics if name.startswith("length/short")], "one kind so far: nothing to tell apart"
    [timed] = story.timed
    assert (timed.rollout_s, timed.training_s, timed.push_s) == pytest.approx((4.0, 3.0, 0.5))

    second = await story.step(2, "long", batch_of(1, 4, 90, first=10))
    assert (second["round/short/total"], second["round/long/total"], second["round/long/group_size"]) == (1, 1, 4)
    assert "round/short/group_size" not in second
    assert second["length/long/trained_mean"] == 90
    assert second["round/long/kept_reward_mean"] == pytest.approx(1.5)
    assert "round/short/kept_reward_mean" not in second
    assert second["reward/discarded_samples"] == 0, "the window began anew"
    assert unregistered([*metrics, *second]) == []
    assert [e.step for e in story.emitted if isinstance(e, StepFinished)] == [1, 2]

    story.report.close()
    run = read_trace(tmp_path / "t")
    assert [line.outcome for line in run.trajectories] == ["lost_race"] + ["trained"] * 8
    first_step, second_step = run.steps
    assert (first_step.round_kind, first_step.group_size, first_step.trained_tokens) == ("short", 2.0, 80)
    assert (first_step.step_s, first_step.rollout_s, first_step.forward_backward_s) == (8.0, 4.0, 1.5)
    assert (second_step.round_kind, second_step.policy_version, second_step.generated_tokens) == ("long", 2, 360)


async def test_engines_are_measured_since_the_last_time(tmp_path: Path) -> None:
    trace = TrajectoryTrace(tmp_path / "t", trace_header())
    report = Story(trace).report

    def load(steps: int, seconds: float, tokens: int, preemptions: int) -> EngineLoad:
        return EngineLoad(
            running=3,
            waiting=1,
            kv_cache_usage=0.5,
            generated_tokens=tokens,
            preemptions=preemptions,
            decode_steps=steps,
            decode_s=seconds,
            decode_tokens=tokens,
        )

    report.engines_measured(load(100, 0.2, 1000, 2))
    measured = report.engines_measured(load(300, 1.0, 1800, 5))
    assert measured.token_s == pytest.approx(0.8 / 200)
    assert measured.running == pytest.approx(800 / 200 * 2), "of two engines together"
    assert (measured.preemptions, measured.waiting, measured.kv_usage) == (3, 1, 0.5)
    idle = report.engines_measured(load(300, 1.0, 1800, 5))
    assert (idle.token_s, idle.running, idle.preemptions) == (0.0, 3.0, 0)
    left = report.engines_measured(load(250, 0.9, 900, 4))  # one of two was drained, and its counters went with it
    assert (left.token_s, left.preemptions) == (0.0, 0)
    report.close()
    lines = read_trace(tmp_path / "t").engines
    assert len(lines) == 2, "nothing happened: no line"
    assert (lines[1].token_s, lines[1].mean_running, lines[1].generated_tokens) == (0.004, 8.0, 800)


async def test_restored_runs_wait_for_recovery() -> None:
    """A run that is restored, and one without engines, wait for recovery."""
    base = JournalBase(schema=JOURNAL_SCHEMA, control=make_control(SETTINGS).snapshot(), events=0, elapsed_s=2.0)
    recovered = RecoveredRun(base, lambda snapshot: make_control(SETTINGS, snapshot), 0)
    story = Story(resumption=Resumption(recovered, SimpleNamespace(policy_version=0), Waits()))
    story.control.handle(RunBegan())
    story.control.handle(PromptsDrawn(prompt_ids=("a", "b"), exhausted=False))
    waits = story.report.waits
    waits.update(story.control.state)
    assert waits.waits_for()[0] is WaitReason.RECOVERY
    await story.report.on_began(ANCHOR)
    waits.update()
    assert waits.waits_for()[0] is WaitReason.SAMPLING
    story.serving = 0
    waits.update()
    assert waits.waits_for()[0] is WaitReason.RECOVERY
