"""``auto``: what it makes of advice, and the adviser beside a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from oracle.control_world import control_settings

from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control.events import RoundsAdvised, RoundTimed
from streamrl.control.policies.auto import SYNCHRONOUS, AutoRounds
from streamrl.control.round_policy import RoundView
from streamrl.control.settings import ControlSettings
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.scheduling import GroupSizing, RoundKind, SizingKind, StalePolicy, TailBatching
from streamrl.recipe.toml_text import toml_document
from streamrl.simulate import adviser
from streamrl.simulate.fleet import DEMO, HEAVY, FleetModel
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.simulation import Simulation
from tests.simulate.recorder import Recorder

RACE, SMALL_RACE = "tail_batching 1.25", "tail_batching 1.125"
SECONDS = {SYNCHRONOUS: {"synchronous": 1.0}, RACE: {"short": 0.5, "long": 1.2}}


def settings(prompts: int = 8, **changes: Any) -> ControlSettings:
    tail, auto = TailBatching(**changes), RoundKind.AUTO
    return control_settings(steps=10_000, batch_groups=prompts, group_size=8, rounds=auto, tail_batching=tail)


def advice(race: float, *, small: float = 0.9) -> RoundsAdvised:
    """Races promise so many times the goodput of synchronous rounds."""
    return RoundsAdvised(goodput={SYNCHRONOUS: 100.0, SMALL_RACE: 100 * small, RACE: 100 * race}, seconds=SECONDS)


class Rounds:
    """Plays rounds of ``policy``: a race of ten prompts for eight places defers two; eight of them have a long round.
    ``slower``: by which factor steps take longer than ``SECONDS`` says."""

    def __init__(self, policy: AutoRounds, slower: float = 1.0) -> None:
        self.policy, self.slower = policy, slower
        self.version = self.queued = 0
        self.kinds: list[str] = []
        self.reasons: list[str] = []

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            name_before = self.policy.current
            plan = self.policy.launch(self.view())
            assert plan is not None
            again = self.policy.launch(self.view())
            assert again == msgspec.structs.replace(plan, because=None), "a decision is reported once"
            if plan.because is not None:
                self.reasons.append(plan.because.reason)
                assert plan.because.figures[f"goodput {self.policy.current}"] > 0
            if self.policy.current != name_before:
                assert name_before == SYNCHRONOUS or self.kinds[-1] == "long", "deferred prompts are left behind"
            self.kinds.append(plan.round_kind)
            self.queued += plan.groups - 8 if plan.round_kind == "short" else -min(self.queued, plan.groups)
            self.version += 1
            predicted = SECONDS.get(self.policy.current, {}).get(plan.round_kind, 0.0)
            self.policy.observe(RoundTimed(self.version, predicted * self.slower, 0.0, 0.0))

    def view(self) -> RoundView:
        return RoundView(
            trainer_version=self.version, live_version=self.version, batch_trajectories=64, group_size=8, target=64,
            missing=64, joined=0, batch_closed=False, round_kind="", untrained=0, untrained_trajectories=0, paused=0,
            queue=(PromptRef(prompt_id="p"),) * self.queued,
            exhausted=False, free_slots=10_000, steps_left=10_000 - self.version,
            when_stale=StalePolicy.WAIT, due=(),
        )  # fmt: skip


def test_synchronous_until_a_race_promises_enough() -> None:
    rounds = Rounds(AutoRounds(settings()))
    rounds.play(5)
    rounds.policy.observe(advice(1.04))
    rounds.play(3)
    assert set(rounds.kinds) == {"synchronous"} and "a change needs 5%" in rounds.reasons[-1]
    rounds.policy.observe(advice(1.4))
    rounds.play(5)
    assert rounds.policy.current == RACE and rounds.kinds[8:] == ["short"] * 4 + ["long"]
    assert rounds.reasons[-1].startswith("from synchronous to tail_batching 1.25")


def test_a_race_is_left_after_its_long_round() -> None:
    """A race is left only after the long round of the prompts that it deferred."""
    rounds = Rounds(AutoRounds(settings()))
    rounds.policy.observe(advice(1.4))
    rounds.play(2)
    rounds.policy.observe(advice(0.9))
    rounds.play(5)
    assert rounds.kinds == ["short"] * 4 + ["long"] + ["synchronous"] * 2
    assert "promises no more than synchronous" in rounds.reasons[-1] or "more trained tokens" in rounds.reasons[-1]


@pytest.mark.long
def test_a_race_of_several_sizes_is_left_too() -> None:
    """A race with several group sizes is left as well, and deferred prompts go first at their own size. Some prompts
    always wait where sizes vary; they were waited for, for ever. Advice changes every 30 steps."""
    race, steps, waiting = "tail_batching 1.25 x4", 180, list[int]()
    sizes = GroupSizing(kind=SizingKind.RANDOM, shares=(1.0, 1.0, 1.0))
    options = TailBatching(long_round_batches=4)
    chosen = {"rounds": RoundKind.AUTO, "group_sizing": sizes, "tail_batching": options}
    varied = control_settings(batch_groups=8, group_size=8, steps=steps, **chosen)
    simulation = Simulation(varied, DEMO, ModelledLengths(DEMO.lengths, 0))

    def advise(version: int) -> None:
        if version % 30 == 0:
            if simulation.core.rules.policy.snapshot()["current"] == SYNCHRONOUS:
                waiting.append(len(simulation.core.state.prompts.queue))
            favours = [SYNCHRONOUS, race][version // 30 % 2]
            simulation.core.handle(RoundsAdvised(goodput={SYNCHRONOUS: 1.0, race: 1.0} | {favours: 2.0}))

    report = simulation.run(0, advise)
    assert {kind.round_kind for kind in report.kinds if kind.steps > steps / 4} == {"short", "synchronous"}
    assert waiting == [0] * 3 and report.length_ratio == pytest.approx(1.0, abs=0.02)


def test_a_broken_promise_counts_less_next_time() -> None:
    """A forecast that did not come true counts less the next time."""
    rounds = Rounds(AutoRounds(settings()), slower=3.0)
    rounds.policy.observe(advice(1.4))
    rounds.play(10)
    rounds.slower = 1.0
    rounds.policy.observe(advice(1.4))
    rounds.play(2)
    assert rounds.policy.current == SYNCHRONOUS


def test_unknown_candidates_begin_with_synchronous_rounds() -> None:
    """A snapshot decides as the policy would, and unknown candidates begin with synchronous rounds."""
    rounds = Rounds(AutoRounds(settings(long_round_batches=2)))
    rounds.policy.observe(RoundsAdvised(goodput={SYNCHRONOUS: 1.0, "tail_batching 1.25 x2": 2.0}))
    rounds.play(2)
    assert rounds.policy.current == "tail_batching 1.25 x2"
    kept = msgspec.json.decode(msgspec.json.encode(rounds.policy.snapshot()))
    same, other = AutoRounds(settings(long_round_batches=2)), AutoRounds(settings())
    same.restore(kept)
    other.restore(kept)
    assert same.snapshot() == rounds.policy.snapshot() and same.launch(rounds.view()) == rounds.policy.launch(
        rounds.view()
    )
    assert other.current == SYNCHRONOUS


def test_slots_suffice_for_every_candidate() -> None:
    """The slots suffice for every candidate, and rounds are on-policy."""
    assert AutoRounds(settings()).slots() >= math.ceil(1.5 * 8) * 8
    assert AutoRounds(settings()).replays


def write_run(directory: Path, model: FleetModel, prompts: int, rounds: int = 12) -> Any:
    """A run directory of synchronous rounds on ``model``."""
    run = Recorder(model, rounds, seed=4, batch_groups=prompts).recorded()
    lines = [run.header, *run.trajectories, *run.steps, *run.engines]
    (directory / "trace.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    keys = {"prompts_per_batch": prompts, "group_size": 8}
    overrides = ['rollout.rounds="auto"', *(f"rollout.{name}={value}" for name, value in keys.items())]
    overrides += [f"sampling.max_tokens={model.lengths.cap}", "engines.max_num_seqs=1024", "engines.max_model_len=4096"]
    recipe = load_recipe(Path("examples/sort/recipe.toml"), tuple(overrides))
    (directory / "recipe.toml").write_text(toml_document(recipe))
    return recipe


@pytest.mark.long
@pytest.mark.parametrize(("model", "prompts", "races"), [(HEAVY, 16, True), (DEMO, 32, False)])
def test_the_adviser_knows_where_a_race_pays(model: FleetModel, prompts: int, races: bool, tmp_path: Path) -> None:
    """Bound by the tail: 1.7 times as fast; bound by tokens: slower (docs/scheduling.md)."""
    recipe = write_run(tmp_path, model, prompts)
    found = adviser.advice_for(adviser.read_trace(tmp_path / "trace.jsonl"), recipe)
    gain = found.goodput[RACE] / found.goodput[SYNCHRONOUS]
    assert (1.4 < gain < 2.1) if races else (gain < 0.97), found
    assert 0.2 < found.seconds[RACE]["short"] / found.seconds[RACE]["long"] < 0.9
    policy = AutoRounds(settings(prompts))
    policy.observe(found)
    view = msgspec.structs.replace(Rounds(policy).view(), batch_trajectories=8 * prompts, missing=8 * prompts)
    policy.launch(view)
    assert (policy.current != SYNCHRONOUS) is races


@pytest.mark.long
@pytest.mark.parametrize(("model", "prompts", "races"), [(HEAVY, 16, True), (DEMO, 32, False)])
@pytest.mark.parametrize("reports", [1, 100])
def test_one_round_says_where_a_race_pays(
    model: FleetModel, prompts: int, races: bool, reports: int, tmp_path: Path
) -> None:
    """The first advice comes from one round, also where the engines reported hardly a decode step."""
    recipe = write_run(tmp_path, model, prompts, rounds=1)
    run = adviser.read_trace(tmp_path / "trace.jsonl")
    found = adviser.advice_for(msgspec.structs.replace(run, engines=run.engines[:reports]), recipe)
    gain = found.goodput[RACE] / found.goodput[SYNCHRONOUS]
    assert gain > 1.15 if races else gain < 1.05, found


@pytest.mark.started
@pytest.mark.long
def test_the_adviser_runs_beside_a_run_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first advice comes after the first round."""
    monkeypatch.setattr(adviser, "POLL_S", 0.01)
    recipe, told = write_run(tmp_path, HEAVY, 16, rounds=1), list[RoundsAdvised]()

    async def main() -> None:
        async with anyio.create_task_group() as group:

            def tell(one: RoundsAdvised) -> None:
                told.append(one)
                group.cancel_scope.cancel()

            group.start_soon(adviser.advise, tmp_path, recipe, lambda: 1, tell)

    anyio.run(main)
    assert told[0].goodput[RACE] > 1.2 * told[0].goodput[SYNCHRONOUS]


def test_a_run_that_recorded_too_little_gets_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, DEMO, 8)
    header, *_ = (tmp_path / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "trace.jsonl").write_bytes(header)
    monkeypatch.setattr(adviser.sys, "argv", ["adviser", str(tmp_path)])
    monkeypatch.setattr(adviser.os, "nice", lambda _: 0)
    assert adviser.main() == 1
