"""Evaluation: figures against hand-computed ones, what is asked of the engines, and the file of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from builders import base
from builders.files import SORT_RECIPE as DEMO
from builders.files import json_lines

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.run_events import RunEvent
from streamrl.base.stage_messages import EndedOutcome, LaunchTrajectory, Scored, TrajectoryLost
from streamrl.base.types import (
    Prompt,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    token_array,
)
from streamrl.cli.try_rewards.trial_completions import PlainText
from streamrl.contracts import TakeOutcome
from streamrl.observe.report.alarms import REPEAT_STEPS, AlarmRule, Alarms, alarm_rules
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Evaluation as EvaluationSettings
from streamrl.recipe.sections import EvaluationSet
from streamrl.run.evaluate.evaluation import (
    EvaluationRun,
    HeldOut,
    HeldOutEvaluations,
    evaluation_metrics,
    pass_at_k,
    pass_sizes,
    read_held_out,
)
from streamrl.run.evaluate.sample_files import write_evaluation


def trajectory(prompt: int, sample: int, tokens: int = 2) -> Trajectory:
    return base.trajectory(sample, -1 - prompt, prompt_id=f"p{prompt}", attempt=7, prompt=(9, 8), tokens=range(tokens))


def rewarded(prompt: int, *rewards: float) -> list[EndedOutcome]:
    return [
        Scored(
            outcome=ScoredTrajectory(trajectory=trajectory(prompt, sample), reward=reward, reward_parts={"r": reward})
        )
        for sample, reward in enumerate(rewards)
    ]


def failed(prompt: int, sample: int) -> Scored:
    return Scored(
        outcome=RewardFailure(
            trajectory=trajectory(prompt, sample), function="f", kind=RewardFailureKind.RAISED, message="planted"
        )
    )


def lost(prompt: int, sample: int) -> TrajectoryLost:
    return TrajectoryLost(id=trajectory(prompt, sample).id, cancelled=False, reason="too long")


# ---- figures -------------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solution() -> None:
    for samples in range(1, 7):
        for solved in range(samples + 1):
            for k in range(1, samples + 1):
                subsets = list(combinations(range(samples), k))
                holding = sum(any(i < solved for i in subset) for subset in subsets)
                assert pass_at_k(samples, solved, k) == pytest.approx(holding / len(subsets), abs=1e-12)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)  # C(7, 5) / C(10, 5)


@pytest.mark.parametrize(("samples", "solved", "k"), [(2, 0, 3), (2, 3, 1), (2, -1, 1), (2, 1, 0)])
def test_pass_at_k_refuses_what_is_not_defined(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(samples, solved, k)


def test_pass_sizes() -> None:
    assert [pass_sizes(samples) for samples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_figures_of_four_samples_each() -> None:
    outcomes = [
        *rewarded(0, 1.0, 0.0, 0.0, 1.5),  # 2 of 4 solved
        *rewarded(1, 0.5, 0.5, 0.5, 0.5),  # a reward below 1 is no success
        *rewarded(2, 1.0, 0.0),  # 1 of 2: in pass@1 and pass@2, not in pass@4
        failed(2, 2),
        lost(2, 3),
        *[lost(3, sample) for sample in range(4)],  # nothing is known of this prompt
    ]
    metrics = evaluation_metrics(outcomes, 4)
    assert metrics["eval/held_out/prompts"] == 3
    assert metrics["eval/held_out/failed"] == 6
    assert metrics["eval/held_out/avg@4"] == pytest.approx((0.625 + 0.5 + 0.5) / 3)
    assert metrics["eval/held_out/pass@1"] == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert metrics["eval/held_out/pass@2"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert metrics["eval/held_out/pass@4"] == pytest.approx((1 + 0) / 2)
    assert metrics["eval/held_out/length_mean"] == 2
    lenient = evaluation_metrics(outcomes, 4, success_reward=0.5)
    assert lenient["eval/held_out/pass@1"] == pytest.approx((0.5 + 1 + 0.5) / 3)


def test_rounded_weights_that_add_up_to_one_are_a_success() -> None:
    """Weights that add up to one, except for rounding, are a success."""
    total = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
    assert total < 1.0
    assert evaluation_metrics(rewarded(0, total), 1)["eval/held_out/pass@1"] == 1
    assert evaluation_metrics(rewarded(0, 1.0 - 1e-6), 1)["eval/held_out/pass@1"] == 0


def test_what_counts_as_solved_is_a_key_of_the_recipe() -> None:
    recipe = load_recipe(
        DEMO, ["evaluation.advanced.success_reward=0.25", "evaluation.prompts=''", "evaluation.every=0"]
    )
    held_out = anyio.run(read_held_out, recipe, None, 3)
    assert (held_out.settings.success_reward, held_out.in_flight) == (0.25, 3)


def shaped(prompt: int, exact: float | None, brief: float) -> Scored:
    parts = {"brief": brief} if exact is None else {"exact": exact, "brief": brief}
    total = sum(parts.values())
    scored = ScoredTrajectory(trajectory=trajectory(prompt, 0), reward=total, reward_parts=parts)
    return Scored(outcome=scored)


def test_a_shaping_reward_changes_no_score() -> None:
    """A reward that shapes changes neither the score nor the share of solved prompts."""
    outcomes = [shaped(0, 1.0, -0.27), shaped(1, 0.0, -0.1), shaped(2, 1.0, 0.3), shaped(3, None, 9.0)]
    metrics = evaluation_metrics(outcomes, 1, reward="exact")
    assert metrics["eval/held_out/avg@1"] == metrics["eval/held_out/pass@1"] == pytest.approx(2 / 3)
    assert metrics["eval/held_out/standard_error"] == pytest.approx(1 / 3)
    assert (metrics["eval/held_out/prompts"], metrics["eval/held_out/failed"]) == (3, 0), "one it does not apply to"
    assert metrics["eval/held_out/func/exact/mean"] == pytest.approx(2 / 3)
    assert metrics["eval/held_out/func/brief/mean"] == pytest.approx((-0.27 - 0.1 + 0.3 + 9) / 4)


def test_the_score_is_the_first_counted_or_named_reward(tmp_path: Path) -> None:
    """The score is the first reward that is no shadow, or the one that the recipe names."""
    text = "".join(f'[[rewards]]\nfunction = "m:{n}"\nshadow = {s}\n' for n, s in (("a", "true"), ("b", "false")))
    (tmp_path / "r.toml").write_text(
        f'[model]\npath = "m"\n[prompts]\ntrain = "t.jsonl"\n[evaluation]\nprompts = "h.jsonl"\n{text}'
    )
    for overrides, label in (([], "b"), (["evaluation.advanced.reward=a"], "a")):
        score = load_recipe(tmp_path / "r.toml", overrides).score_of("held_out")
        assert score and score.label == label
    with pytest.raises(RecipeError, match=r'"c" is no reward of this recipe: write one of a, b'):
        load_recipe(tmp_path / "r.toml", ["evaluation.advanced.reward=c"])


def test_a_run_without_rewards_has_no_score() -> None:
    """A teacher alone trains it: its evaluations say lengths, and no score of 0."""
    table = {"model": "m", "prompts": {"train": "t.jsonl"}, "evaluation": {"prompts": "h.jsonl"}, "rewards": []}
    recipe = load_recipe(table | {"objective": {"algorithm": "distillation", "reference": "t"}})
    assert recipe.score_of("held_out") is None
    metrics = evaluation_metrics(rewarded(0, 0.0), 1, reward=None)
    assert metrics["eval/held_out/length_mean"] == 2
    assert not any("@" in name for name in metrics)


def test_one_sample_is_the_mean_over_prompts() -> None:
    metrics = evaluation_metrics([*rewarded(0, 0.25), *rewarded(1, 1.0), failed(2, 0)], 1)
    assert metrics["eval/held_out/avg@1"] == pytest.approx(0.625)
    assert metrics["eval/held_out/pass@1"] == pytest.approx(0.5)


def test_an_evaluation_without_one_reward_has_no_figure() -> None:
    assert evaluation_metrics([failed(0, 0)], 1) == {"eval/held_out/prompts": 0, "eval/held_out/failed": 1}


# ---- what is asked of the engines ----------------------------------------------------------------


def held_out(prompts: int, samples: int, in_flight: int) -> HeldOut:
    rows = [Prompt(prompt_id=f"p{n}", token_ids=token_array([1])) for n in range(prompts)]
    settings = EvaluationSettings(samples=samples, temperature=0.5)
    return HeldOut(prompts=rows, settings=settings, in_flight=in_flight)


class Launched:
    """What an evaluation launches, and ``end``s when the test says so."""

    def __init__(self) -> None:
        self.launched: list[LaunchTrajectory] = []
        self.cancelled: set[TrajectoryId] = set()
        self.ended = 0

    def launch(self, order: LaunchTrajectory, take: TakeOutcome) -> None:
        self.launched.append(order)
        self.take = take

    def cancel(self, ids: Collection[TrajectoryId]) -> None:
        self.cancelled.update(ids)

    async def end(self, order: LaunchTrajectory) -> None:
        await self.take(TrajectoryLost(id=order.id, cancelled=False, reason="x"))

    async def note(self) -> None:
        self.ended += 1


async def test_open_requests_are_bounded_and_samples_distinct() -> None:
    """The number of open requests is bounded, and every sample is its own."""
    evaluation, orders = EvaluationRun(held_out(4, 3, in_flight=5), 7, limit=3, seed=1), Launched()
    figures: dict[str, float] = {}

    async def run() -> None:
        figures.update(await evaluation.run(orders, orders.note))  # type: ignore[arg-type]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        for ended in range(9):
            await anyio.wait_all_tasks_blocked()
            assert len(orders.launched) == min(ended + 5, 9)
            assert not figures
            assert orders.ended == ended
            await orders.end(orders.launched[ended])
    assert evaluation.completions == 9
    assert len({order.seed for order in orders.launched}) == len({str(order.id) for order in orders.launched}) == 9
    assert [(o.id.prompt_id, o.id.sample) for o in orders.launched] == [
        (f"p{p}", s) for p in range(3) for s in range(3)
    ]
    assert all(o.evaluation and o.group_size == 3 and o.sampling == {"temperature": 0.5} for o in orders.launched)
    assert figures["eval/held_out/failed"] == 9


def lines_below(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("version", "limit", "asked"),
    [
        (4, 2, {"a": ["p0", "p1"]}),
        (6, 2, {"b": ["p3", "p4"]}),
        (12, 2, {"a": ["p0", "p1"], "b": ["p3", "p4"]}),
        (5, 0, {"a": ["p0", "p1", "p2"], "b": ["p3", "p4"], "c": ["p5"]}),
        (2, 2, {}),
    ],
)
async def test_due_sets_are_asked_and_have_their_figures(
    version: int, limit: int, asked: dict[str, list[str]], tmp_path: Path
) -> None:
    """Of several sets the due ones are evaluated, each with its figures and its lines."""
    every = {"a": (4, 2, 3), "b": (6, 0, 2), "c": (0, 0, 1)}
    sets = {name: (EvaluationSet(prompts="x", every=e, limit=most), size) for name, (e, most, size) in every.items()}
    events: list[RunEvent] = []
    scores: list[float] = []

    async def emit(event: RunEvent) -> None:
        events.append(event)

    async def scored(at: int, figures: dict[str, float], limit: int) -> None:
        scores.append(figures.get("eval/a/avg@1", -1.0))

    evaluations = HeldOutEvaluations(
        msgspec.structs.replace(held_out(6, 1, in_flight=9), sets=sets),
        0,
        emit=emit,
        on_scored=scored,
        store=partial(write_evaluation, tmp_path, None),
    )
    evaluations.begin(version, limit)
    orders = Launched()

    async def answer() -> None:
        await anyio.wait_all_tasks_blocked()
        for order in orders.launched:
            number = -1 - order.id.group_id
            sampled = msgspec.structs.replace(trajectory(number, 0), id=order.id)
            reward = {"reward": float(number), "reward_parts": {"r": float(number)}}
            await orders.take(Scored(outcome=ScoredTrajectory(trajectory=sampled, **reward)))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            await (await evaluations.run(orders, orders.note))()  # type: ignore[arg-type]
    assert [order.prompt.prompt_id for order in orders.launched] == [one for ids in asked.values() for one in ids]
    figures = events[0].metrics if events else {}  # type: ignore[union-attr]
    means = {name: sum(int(one[1:]) for one in ids) / len(ids) for name, ids in asked.items()}
    assert {key[5:-6]: value for key, value in figures.items() if key.endswith("avg@1")} == means
    assert scores == ([means.get("a", -1.0)] if asked else [])
    lines = lines_below(tmp_path)
    assert [(line["set"], line["number"]) for line in lines] == [
        (name, number) for name, ids in asked.items() for number in range(len(ids))
    ]


async def test_a_cancelled_evaluation_ends_with_its_requests() -> None:
    """A cancelled evaluation ends when the requests that it launched have ended."""
    evaluation, orders = EvaluationRun(held_out(9, 1, in_flight=3), 7, limit=0, seed=1), Launched()
    ended = anyio.Event()

    async def run() -> None:
        await evaluation.run(orders, orders.note)  # type: ignore[arg-type]
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        evaluation.cancel(orders)  # type: ignore[arg-type]
        assert orders.cancelled == {order.id for order in orders.launched}
        for order in list(orders.launched):
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            await orders.end(order)
    assert len(orders.launched) == 3


async def test_the_samples_of_a_prompt_are_launched_together() -> None:
    """Rewards that compare siblings wait for all of them: with fewer requests at once, and when it is cancelled."""
    evaluation, orders = EvaluationRun(held_out(3, 3, in_flight=1), 7, limit=0, seed=1), Launched()

    async def run() -> None:
        await evaluation.run(orders, orders.note)  # type: ignore[arg-type]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        assert [order.id.sample for order in orders.launched] == [0, 1, 2]
        await orders.end(orders.launched[0])
        await anyio.wait_all_tasks_blocked()
        evaluation.cancel(orders)  # type: ignore[arg-type]
        for number in range(1, 6):
            await orders.end(orders.launched[number])
            await anyio.wait_all_tasks_blocked()
    assert [order.id.prompt_id for order in orders.launched] == ["p0"] * 3 + ["p1"] * 3
    assert orders.cancelled == {order.id for order in orders.launched[1:]}


async def test_an_evaluation_of_nothing_ends() -> None:
    orders = Launched()
    figures = await EvaluationRun(HeldOut(), 0, limit=0, seed=1).run(orders, orders.note)  # type: ignore[arg-type]
    assert figures["eval/held_out/prompts"] == 0


# ---- the file of samples -------------------------------------------------------------------------


async def test_every_sample_is_a_line_with_its_text(tmp_path: Path) -> None:
    write = partial(write_evaluation, tmp_path / "evaluations", PlainText())
    await write(7, [lost(1, 0), failed(0, 1), *rewarded(0, 0.5)])
    [path] = (tmp_path / "evaluations").iterdir()
    assert path.name == "step-000007.jsonl"
    whose = {"step": 7, "number": 0, "prompt_id": "p0"}
    texts = {
        "finish_reason": "stop",
        "prompt_token_ids": [9, 8],
        "token_ids": [0, 1],
        "prompt": "\t\b",
        "question": "",
        "tokens": 2,
        "text": "\0\x01",
    }
    assert json_lines(path) == [
        whose | {"sample": 0, "reward": 0.5, "rewards": {"r": 0.5}} | texts,
        whose | {"sample": 1, "reward": None, "failure": "f raised: planted"} | texts,
        {"step": 7, "number": 1, "prompt_id": "p1", "sample": 0, "reward": None, "failure": "too long"},
    ]


async def test_unwritable_samples_name_path_and_remedy(tmp_path: Path) -> None:
    """Samples that cannot be written lead to a message with the path and the remedy."""
    (tmp_path / "evaluations").write_text("a file in the way")
    with pytest.raises(StreamRLError, match=r"step 3 could not be written to .*store_samples = false"):
        await write_evaluation(tmp_path / "evaluations", None, 3, rewarded(0, 1.0))


# ---- alarms --------------------------------------------------------------------------------------


def told(rule: AlarmRule, values: list[float | None]) -> list[int]:
    """The steps (from 1) at which the alarm was raised."""
    alarms = Alarms([rule])
    metrics = [{} if value is None else {rule.metric: value} for value in values]
    return [step for step, figures in enumerate(metrics, start=1) if alarms.check(step, figures)]


RULE = AlarmRule(metric="m", bound=0.5, advice="look there")


def test_alarms_are_reported_at_begin_and_while_they_last() -> None:
    """An alarm is reported when it begins, and again while it lasts."""
    assert told(RULE, [0.4, 0.5, 0.6, 0.7] + [0.6] * 2 * REPEAT_STEPS) == [3, 3 + REPEAT_STEPS, 3 + 2 * REPEAT_STEPS]
    assert told(RULE, [0.6, 0.4] * REPEAT_STEPS) == [1, 1 + REPEAT_STEPS], "a value around the bound tells each time"
    assert told(RULE, [0.6] + [0.1] * REPEAT_STEPS + [0.6]) == [1, 2 + REPEAT_STEPS]


def test_rules_may_need_several_steps_in_a_row() -> None:
    """A rule may need several steps in a row, and an absent metric raises no alarm."""
    patient = AlarmRule(metric="m", bound=0.5, steps=3, advice="look there")
    assert told(patient, [0.6, 0.6, 0.4, 0.6, None, 0.6, 0.6]) == [7]


def test_what_is_not_a_number_is_above_every_bound() -> None:
    assert told(RULE, [math.nan]) == [1]


def test_the_message_has_the_value_the_bound_and_the_advice() -> None:
    alarms = Alarms(alarm_rules(0.05))
    [message] = alarms.check(1, {"policy/mismatch_abs_mean": 0.0712, "reward/zero_std_ratio": 1.0})
    assert message.startswith("policy/mismatch_abs_mean is 0.0712, above 0.05: engine and trainer disagree")
    for remedy in ("engines.dtype", "training.compute_dtype", "sampling.top_p", "weights.advanced.audit_interval"):
        assert remedy in message
    later = [message for step in range(2, 11) for message in alarms.check(step, {"reward/zero_std_ratio": 1.0})]
    assert len(later) == 1 and "above 0.95 for 10 steps: almost every prompt" in later[0]
    assert Alarms(alarm_rules(0)).check(1, {"policy/mismatch_abs_mean": 9.0}) == []
    tail = {"policy/mismatch_below_ratio": 0.011}
    assert "less than 1 / e as likely" in Alarms(alarm_rules(0.05)).check(1, tail)[0]
    assert Alarms(alarm_rules(0)).check(1, tail) == []


def test_failed_rewards_are_told_of_at_once_and_then_seldom() -> None:
    alarms = Alarms(())
    told = [alarms.reward_failed(step, f"f raised {step}") for step in (3, 3, 4, 22, 23)]
    assert told[0] == "a reward has failed; what they were for is not trained on. The last one: f raised 3"
    assert told[1:4] == ["", "", ""]
    assert told[4] == "5 rewards have failed so far; what they were for is not trained on. The last one: f raised 23"
