"""``auto`` on streams of observations as an engine of known costs would give them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from streamrl.control.actions import Explain
from streamrl.control.events import EnginesMeasured, RoundTimed
from streamrl.control.round_policy import GroupObserved, Launch, Remainder, RoundView, Source
from streamrl.control.settings import ControlSettings
from streamrl.policies.adviser.auto import FIRST_GROUPS, SYNCHRONOUS, AutoRounds
from streamrl.policies.adviser.prediction import Form
from streamrl.recipe.scheduling import DeferredPrompts, RoundKind, StalePolicy, TailBatching

Group = tuple[float, tuple[int, ...]]


def settings(prompts: int, group_size: int = 8, **changes: Any) -> ControlSettings:
    return ControlSettings(
        steps=10_000,
        batch_groups=prompts,
        group_size=group_size,
        rounds=RoundKind.AUTO,
        max_staleness=0,
        when_stale=StalePolicy.WAIT,
        dynamic_sampling=False,
        max_failed_share=0.1,
        failure_window=100,
        tail_batching=TailBatching(**changes),
    )


class Lengths:
    """A body of spread 1 around ``body`` tokens; a share of ``tail`` of the prompts has one member at ``cap``."""

    def __init__(self, body: int = 60, tail: float = 0.1, cap: int = 2000) -> None:
        self.body, self.tail, self.cap = body, tail, cap

    def group(self, chance: random.Random, size: int, latent: float) -> tuple[int, ...]:
        lengths = [max(round(self.body * math.exp(0.8 * latent + 0.6 * chance.gauss(0, 1))), 1) for _ in range(size)]
        if latent > self.threshold:
            lengths[0] = self.cap
        return tuple(min(length, self.cap) for length in lengths)

    @property
    def threshold(self) -> float:
        """A standard normal latent exceeds it with the chance ``tail``."""
        from statistics import NormalDist

        return NormalDist().inv_cdf(1 - self.tail)


class Engine:
    """Plays the rounds that a policy asks for and tells it what control would."""

    def __init__(self, policy: AutoRounds, lengths: Lengths, *, prompts: int, request_s: float, seed: int = 0) -> None:
        self.policy, self.lengths, self.prompts = policy, lengths, prompts
        self.step_s, self.request_s = 1e-3, request_s
        self.chance = random.Random(seed)
        self.queue: list[Group] = []
        self.version = 0
        self.kinds: list[str] = []
        self.explained: list[Explain] = []
        self.seconds = 0.0
        self.untimed: list[RoundTimed] = []
        self.race_penalty = 1.0
        self.resume: Callable[[AutoRounds], AutoRounds] = lambda policy: policy

    def view(self, **changes: Any) -> RoundView:
        batch = self.prompts * 8
        view = RoundView(
            trainer_version=self.version,
            live_version=self.version,
            batch_trajectories=batch,
            group_size=8,
            target=batch,
            seats=batch,
            joined=0,
            batch_closed=False,
            round_kind="",
            untrained=0,
            untrained_trajectories=0,
            held=0,
            queued=len(self.queue),
            exhausted=False,
            free_slots=10_000,
            steps_left=10_000 - self.version,
            when_stale=StalePolicy.WAIT,
            due=(),
        )
        return msgspec.structs.replace(view, **changes)

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()
            self.policy = self.resume(self.policy)

    def _round(self) -> None:
        racing: list[Group] = []
        kind = ""
        while plan := self.policy.launch(self.view(round_kind=kind, untrained=len(racing))):
            self._note(plan)
            self.policy = self.resume(self.policy)
            # Control asks again where prompts have to be drawn first, and nothing is to be told twice.
            asked_again = self.policy.launch(self.view(round_kind=kind, untrained=len(racing)))
            assert asked_again == msgspec.structs.replace(plan, because=None)
            self.policy = self.resume(self.policy)
            if plan.source is Source.COHORT:
                self.queue += [self._draw() for _ in range(plan.groups)]
                continue
            kind = kind or plan.round_kind
            racing += self._take(plan)
        assert racing, "a round without a launch"
        self.kinds.append(kind)
        self._finish(kind, sorted(racing, key=lambda group: max(group[1])))
        self.version += 1

    def _note(self, plan: Launch) -> None:
        if plan.because is not None:
            self.explained.append(plan.because)

    def _draw(self) -> Group:
        latent = self.chance.gauss(0, 1)
        return latent, self.lengths.group(self.chance, 8, latent)

    def _take(self, plan: Launch) -> list[Group]:
        if plan.source is Source.FRESH:
            return [self._draw() for _ in range(plan.groups)]
        taken, self.queue = self.queue[: plan.groups], self.queue[plan.groups :]
        return taken

    def _finish(self, kind: str, racing: list[Group]) -> None:
        places = self.prompts if kind == "short" else len(racing)
        won, lost = racing[:places], racing[places:]
        cut = max(won[-1][1])
        for _, lengths in won:
            self._tell(kind, lengths)
        tokens = sum(min(length, cut) for _, lengths in racing for length in lengths)
        if lost:
            assert self.policy.remainder(self.view(round_kind=kind)) is Remainder.REQUEUE
        for _, lengths in lost:
            self._tell(kind, tuple(length for length in lengths if length <= cut), cut=True, cut_at=cut)
        self.queue += lost
        for running in (1, 4, len(racing), 4 * len(racing), 8 * len(racing)):
            self.policy.observe(
                EnginesMeasured(
                    running=running,
                    waiting=0,
                    token_s=self.step_s + self.request_s * running,
                    kv_usage=0,
                    preemptions=0,
                )
            )
        rollout = self.step_s * cut + self.request_s * tokens + 5e-4 * 8 * len(racing)
        if lost:
            rollout *= self.race_penalty
        trained = sum(sum(lengths) for _, lengths in won)
        self.seconds += rollout + 1e-6 * trained + 0.05
        # The time of a round is known when its weights are live, and the next round may run by then.
        for timed in self.untimed:
            self.policy.observe(timed)
        self.untimed = [
            RoundTimed(policy_version=self.version + 1, rollout_s=rollout, training_s=1e-6 * trained, push_s=0.05)
        ]

    def _tell(self, kind: str, lengths: tuple[int, ...], *, cut: bool = False, cut_at: int = 0) -> None:
        self.policy.observe(
            GroupObserved(
                round_kind=kind, size=8, lengths=lengths, truncated=0, prompt_tokens=0, cut=cut, cut_at=cut_at
            )
        )


def tail_bound(seed: int = 0, prompts: int = 8) -> Engine:
    """Few prompts, one of ten has a completion of the cap, and a decode step costs about the same for any load."""
    return Engine(AutoRounds(settings(prompts)), Lengths(), prompts=prompts, request_s=5e-6, seed=seed)


def uneven(seed: int = 0) -> Engine:
    """Ten prompts: a race at 1.25 has three losers, and long rounds of ten leave some of them over."""
    return tail_bound(seed, prompts=10)


def token_bound(seed: int = 0) -> Engine:
    """Sixty-four prompts without a tail on an engine that every request slows down."""
    return Engine(AutoRounds(settings(64)), Lengths(tail=0.001, cap=400), prompts=64, request_s=2e-4, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_races_where_the_tail_binds(seed: int) -> None:
    engine = tail_bound(seed)
    engine.play(60)
    assert engine.policy.current.form is Form.TAIL_BATCHING
    assert engine.policy.current.prompt_oversampling >= 1.25, "one group of ten is long: 1.125 is too small a race"
    first_race = engine.kinds.index("short")
    assert set(engine.kinds[:first_race]) == {"synchronous"}
    assert first_race * 8 >= FIRST_GROUPS
    assert "long" in engine.kinds


@pytest.mark.parametrize("seed", range(4))
def test_stays_synchronous_where_tokens_bind(seed: int) -> None:
    engine = token_bound(seed)
    engine.play(30)
    assert set(engine.kinds) == {"synchronous"}
    assert engine.explained, "that it stays is a decision, too"
    assert all("stay with synchronous" in because.reason for because in engine.explained)


def test_a_race_that_it_chose_is_faster() -> None:
    engine, waiting = tail_bound(), tail_bound()
    engine.play(100)
    waiting.policy._held_until = 10_000
    waiting.play(100)
    assert set(waiting.kinds) == {"synchronous"}
    assert engine.seconds < 0.8 * waiting.seconds


def test_a_race_that_does_not_keep_its_promise_is_left() -> None:
    """Short rounds take three times what their load explains. That costs a few cycles, not the run."""
    engine, waiting = tail_bound(), tail_bound()
    engine.race_penalty = 3.0
    engine.play(120)
    waiting.policy._held_until = 10_000
    waiting.play(120)
    assert "short" in engine.kinds[:30]
    assert set(engine.kinds[60:]) == {"synchronous"}
    assert engine.seconds < 1.25 * waiting.seconds
    assert engine.explained[-1].figures["pace short"] > 1.2


def test_larger_long_rounds_are_candidates_where_the_recipe_allows_them() -> None:
    engine = Engine(AutoRounds(settings(8, long_round_batches=2)), Lengths(), prompts=8, request_s=5e-6)
    engine.play(40)
    change = next(because for because in engine.explained if because.reason.startswith("from synchronous to"))
    assert "goodput tail_batching 1.25 x2" in change.figures
    assert change.figures["goodput tail_batching 1.25 x2"] > change.figures["goodput tail_batching 1.25"]
    assert engine.policy.current.long_batches == 2


def test_every_comparison_is_explained_once_with_the_figures_of_all_candidates() -> None:
    engine = tail_bound()
    engine.play(40)
    change = next(because for because in engine.explained if because.reason.startswith("from synchronous to"))
    assert change.subject == "rounds"
    named = {name.removeprefix("goodput ") for name in change.figures if name.startswith("goodput ")}
    assert named == {"synchronous", "tail_batching 1.125", "tail_batching 1.25", "tail_batching 1.5"}
    chosen = change.reason.removeprefix("from synchronous to ").split(":")[0]
    goodput = {name: change.figures[f"goodput {name}"] for name in named}
    assert max(goodput, key=goodput.__getitem__) == chosen
    assert goodput[chosen] >= 1.05 * goodput["synchronous"]
    assert change.figures["length_share synchronous"] == 1
    assert change.figures["step_s"] == pytest.approx(1e-3, rel=0.05)
    assert len(engine.explained) < 20


@pytest.mark.parametrize(("make", "left"), [(tail_bound, 0), (uneven, 2)])
def test_a_choice_is_held_for_a_cycle_and_losers_are_drained_first(make: Callable[[], Engine], left: int) -> None:
    """Lengths change under it: whatever it does, a race is left only after its long round."""
    engine = make()
    previous, changes, since = engine.policy.current, 0, 0
    for number in range(500):
        if number % 97 == 30:
            engine.lengths = Lengths(tail=0.001, cap=100) if engine.lengths.tail > 0.05 else Lengths()
        waiting, before = len(engine.queue), engine.kinds[-1:]
        engine.play(1)
        since += 1
        if engine.policy.current == previous:
            continue
        if previous.form is Form.TAIL_BATCHING:
            changes += 1
            assert waiting <= left
            assert before == ["long"]
            assert since >= 3
        previous, since = engine.policy.current, 0
    assert changes >= 3


def test_its_predictions_come_true() -> None:
    """Also of a race, whose own losers and long rounds are most of what it learns from."""
    engine = tail_bound()
    engine.play(100)
    before, told = engine.seconds, len(engine.explained)
    engine.play(300)
    name = engine.policy.current.name
    predicted = [because.figures[f"seconds {name}"] for because in engine.explained[told:]]
    assert name.startswith("tail_batching")
    assert (engine.seconds - before) / 300 == pytest.approx(sum(predicted) / len(predicted), rel=0.1)


def test_follows_a_drift_into_the_tail_and_out_of_it() -> None:
    engine = tail_bound()
    engine.lengths = Lengths(tail=0.001, cap=100)
    engine.play(40)
    assert engine.policy.current == SYNCHRONOUS
    engine.lengths = Lengths()
    engine.play(60)
    assert engine.policy.current.form is Form.TAIL_BATCHING
    engine.lengths = Lengths(tail=0.001, cap=100)
    engine.request_s = 5e-4
    engine.play(150)
    assert engine.policy.current == SYNCHRONOUS
    assert not engine.queue


def test_a_small_gain_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.policies.adviser import auto

    monkeypatch.setattr(auto, "LEAST_GAIN", 9.0)
    engine = tail_bound()
    engine.play(60)
    assert set(engine.kinds) == {"synchronous"}
    assert any("a change needs 900%" in because.reason for because in engine.explained)


def test_a_fork_without_the_rounds_that_ran_begins_with_synchronous_ones() -> None:
    engine = Engine(AutoRounds(settings(8, long_round_batches=2)), Lengths(), prompts=8, request_s=5e-6)
    engine.play(40)
    assert engine.policy.current.long_batches == 2
    fork = AutoRounds(settings(engine.prompts))
    fork.restore(msgspec.json.decode(msgspec.json.encode(engine.policy.snapshot())))
    assert fork.current == SYNCHRONOUS
    engine.policy = fork
    engine.explained.clear()
    engine.play(1)
    assert "synchronous" in engine.explained[0].reason, "what was held before does not delay the first comparison"
    engine.play(20)


def test_slots_suffice_for_every_candidate() -> None:
    policy = AutoRounds(settings(8))
    assert policy.slots() >= math.ceil(1.5 * 8) * 8


def test_losers_that_would_be_off_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="off-policy"):
        AutoRounds(settings(8, deferred_prompts=DeferredPrompts.RESUME))
    assert AutoRounds(settings(8)).replays
    assert not AutoRounds(settings(8, deferred_prompts=DeferredPrompts.REGENERATE)).replays
