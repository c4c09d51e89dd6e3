"""Groups to prepared samples: rewards that are compared alone, what shapes them, samples without trained tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders.base import trajectory
from msgspec.structs import replace

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from sample_groups import make_groups  # noqa: E402

from streamrl.base.types import (  # noqa: E402
    Baseline,
    ScoredTrajectory,
    Segment,
    TrainingGroup,
    TrajectoryId,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.learning.batches.packing import pack, plan_micro_batches  # noqa: E402
from streamrl.learning.batches.preparation import (  # noqa: E402
    OpenBatch,
    SampleScores,
    behavior_of_trained,
    has_signal,
    prepare_group,
    shaped_reward,
    token_moments,
    whitened,
    worth_training,
)
from streamrl.learning.objective.advantages import separate_advantages  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.recipe.environment import Credit  # noqa: E402
from streamrl.recipe.objective import KlEstimator, Objective, ObjectiveSettings, objective_settings  # noqa: E402
from streamrl.recipe.objectives.catalog import ADVANTAGES  # noqa: E402
from streamrl.recipe.objectives.method import KlPlace, LossNormalization  # noqa: E402

pytestmark = pytest.mark.torch


def options_of(**objective: object) -> TrainerOptions:
    settings = ObjectiveSettings(**objective)  # type: ignore[arg-type]
    return TrainerOptions(model_path="", run_id="", weights_endpoint="", max_tokens=40, objective=settings)


def group_of(rewards: list[dict[str, float]], *, separate: bool = True) -> TrainingGroup:
    """Siblings with these rewards of weight 1, compared each alone or by their sum."""
    (group,) = make_groups(0, [len(rewards)], seed=3)
    samples = [
        msgspec.structs.replace(
            sample,
            reward=sum(parts.values()),
            separate_rewards={name: (1.0, value) for name, value in parts.items()} if separate else {},
        )
        for sample, parts in zip(group.samples, rewards, strict=True)
    ]
    return msgspec.structs.replace(group, samples=tuple(samples))


def advantages(group: TrainingGroup, options: TrainerOptions, scores: dict[TrajectoryId, SampleScores]) -> list[float]:
    return [item.advantage for item in prepare_group(group, scores, options)]


def test_rewards_compared_alone_signal_at_equal_totals() -> None:
    """Rewards that are compared alone are a signal where their totals are equal."""
    rewards = [
        {"right": 1.0, "form": 0.0, "short": 1.0},
        {"right": 1.0, "form": 1.0, "short": 0.0},
        {"right": 1.0, "form": 1.0, "short": 0.0},
        {"right": 0.0, "form": 1.0, "short": 1.0},
    ]
    options = options_of()
    assert has_signal(group_of(rewards), options)
    assert any(advantages(group_of(rewards), options, {}))
    assert not has_signal(group_of(rewards, separate=False), options)
    equal = group_of([rewards[0]] * 4)
    assert not has_signal(equal, options)
    turns = [msgspec.structs.replace(s, turn_rewards=(float(n),)) for n, s in enumerate(equal.samples)]
    equal = msgspec.structs.replace(equal, samples=tuple(turns))
    assert not has_signal(equal, options)
    assert has_signal(equal, msgspec.structs.replace(options, credit=Credit.TURN))


@pytest.mark.parametrize("penalty", [0.01, 0.1, 1.0, 10.0])
def test_the_overlong_penalty_has_the_recipes_weight(penalty: float) -> None:
    """The overlong penalty has the recipe's weight beside rewards that are compared alone."""
    rewards = [{"right": float(index % 2)} for index in range(4)]
    group, buffer = group_of(rewards), 30
    shaped = [-min(1.0, max(0.0, (s.trained_tokens - (40 - buffer)) / buffer)) for s in group.samples]
    assert len(set(shaped)) > 1
    parts = [{"right": (1.0, r["right"]), "long": (penalty, v)} for r, v in zip(rewards, shaped, strict=True)]
    expected = separate_advantages(parts, ADVANTAGES["group_std"]).tolist()
    found = advantages(group, options_of(overlong_buffer=buffer, overlong_penalty=penalty), {})
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_overlong_penalty_begins_before_the_limit_of_the_set() -> None:
    """A set may have a lower limit than the run, and a completion beside episodes the limit of a completion."""
    shaped = []
    for limit in (0, 20):
        made = trajectory(tokens=tuple(range(3, 18)))
        made = replace(made, prompt=replace(made.prompt, max_tokens=limit))
        sample = to_training_sample(ScoredTrajectory(trajectory=made, reward=1.0))
        shaped.append(shaped_reward(sample, options_of(overlong_buffer=10)))
    assert shaped == [1.0, 0.5], "15 tokens: 30 of 40 are free, or 10 of 20"
    episode = replace(made, prompt=replace(made.prompt, token_ids=token_array()))
    assert to_training_sample(ScoredTrajectory(trajectory=episode, reward=1.0)).max_tokens == 0


@pytest.mark.parametrize("coefficient", [1e-3, 0.1, 1.0])
def test_kl_in_the_reward_has_its_coefficient(coefficient: float) -> None:
    """KL in the reward has its coefficient beside rewards that are compared alone."""
    rewards = [{"right": float(index % 2)} for index in range(4)]
    group, rng = group_of(rewards), np.random.default_rng(0)
    away = [rng.normal(0, 0.3, s.trained_tokens).astype(np.float32) for s in group.samples]
    scores = {
        s.id: SampleScores(reference=behavior_of_trained(s) - d) for s, d in zip(group.samples, away, strict=True)
    }
    options = options_of(
        kl_coefficient=coefficient,
        kl_estimator=KlEstimator.K1,
        kl_in=KlPlace.REWARD,
        overlong_buffer=30,
        overlong_penalty=0.5,
    )
    shaped = [-min(1.0, max(0.0, (s.trained_tokens - 10) / 30)) for s in group.samples]
    parts = [
        {"right": (1.0, r["right"]), "long": (0.5, v), "kl": (coefficient, -float(d.astype(np.float64).sum()))}
        for r, v, d in zip(rewards, shaped, away, strict=True)
    ]
    expected = separate_advantages(parts, ADVANTAGES["group_std"]).tolist()
    assert advantages(group, options, scores) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_sample_without_trained_tokens_is_left_out() -> None:
    """A sample without trained tokens is left out, also where a critic has no value for it."""
    group = group_of([{"right": 1.0}, {"right": 0.0}], separate=False)
    first, second = group.samples
    group = msgspec.structs.replace(
        group, samples=(msgspec.structs.replace(first, loss_mask=bytes(len(first.loss_mask))), second)
    )
    scores = {second.id: SampleScores(values=np.zeros(second.trained_tokens, dtype=np.float32))}
    (item,) = prepare_group(group, scores, options_of(advantages="gae"))
    assert item.sample is second


def test_ppo_credits_the_first_of_many_tokens_as_the_last() -> None:
    """With the defaults, a value head that knows nothing yet, and 200 tokens: only the reward tells samples apart."""
    (group,) = make_groups(0, [2], rewards=[[1.0, 0.0]])
    samples = [
        msgspec.structs.replace(
            sample,
            token_ids=token_array([3] * 201),
            loss_mask=b"\0" + b"\1" * 200,
            behavior_logprobs=float_array([0.0] * 201),
        )
        for sample in group.samples
    ]
    options = TrainerOptions(
        model_path="", run_id="", weights_endpoint="", objective=objective_settings(Objective(algorithm="ppo"))
    )
    scores = {sample.id: SampleScores(values=np.zeros(200, np.float32)) for sample in samples}
    prepared = prepare_group(msgspec.structs.replace(group, samples=tuple(samples)), scores, options)
    right, wrong = (item.token_advantages for item in whitened(prepared, token_moments(prepared)))
    assert right is not None
    assert wrong is not None
    assert right.tolist() == [1.0] * 200
    assert wrong.tolist() == [-1.0] * 200


def test_a_completion_of_one_token_is_trained() -> None:
    """A completion of one token is trained, and one without tokens is counted."""
    made = [trajectory(tokens, tokens=[2] * tokens, logprob=-0.5, version=0) for tokens in range(4)]
    scored = [ScoredTrajectory(trajectory=each, reward=float(tokens)) for tokens, each in enumerate(made)]
    group = TrainingGroup(group_id=0, batch_id=0, samples=tuple(map(to_training_sample, scored)))
    options = options_of()
    batch = OpenBatch(options)
    batch.take(group)
    assert (batch.sums.samples, batch.sums.trained_tokens, len(batch.sample_ids)) == (4, 6, 4)
    prepared = prepare_group(group, {}, options)
    assert [item.sample.trained_tokens for item in prepared] == [1, 2, 3]
    assert all(worth_training(item, options) for item in prepared)
    rows = plan_micro_batches(prepared, 64)
    assert sorted(item.sample.id.sample for row in rows for item in row) == [1, 2, 3]


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3]])
@pytest.mark.parametrize("normalization", LossNormalization)
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_multi_sequence_samples_compare_as_single_ones(
    kind: str, normalization: LossNormalization, rewards: list[float]
) -> None:
    """Trajectories of one, two and five sequences are compared as single sequences are."""
    punished = 0 if ADVANTAGES[kind].positive_rewards else 38
    options = options_of(
        advantages=kind, loss_normalization=normalization, overlong_buffer=punished, overlong_penalty=0.5
    )
    baseline = Baseline(total=1.0, weight=2.0, deviation=0.5)
    found = []
    for sequences in ([1, 1, 1], [1, 2, 5]):
        scored = []
        for member, (parts, reward) in enumerate(zip(sequences, rewards, strict=True)):
            segments = []
            for tokens in np.array_split(np.arange(10), parts):
                segments.append(Segment(token_array([3]), trained=False, follows=-1))
                logprobs = float_array(-10.0 * member - tokens)
                segments.append(Segment(token_array(tokens), trained=True, behavior_logprobs=logprobs))
            made = trajectory(member, segments=tuple(segments))
            scored.append(ScoredTrajectory(trajectory=made, reward=reward))
        samples = tuple(map(to_training_sample, scored))
        group = TrainingGroup(group_id=0, batch_id=0, samples=samples, baseline=baseline)
        batch = OpenBatch(options)
        batch.take(group)
        scores = {one.trajectory.id: SampleScores(values=np.linspace(0, 1, 10, dtype=np.float32)) for one in scored}
        prepared = prepare_group(group, scores, options)
        row = pack([item for cut in plan_micro_batches(prepared, 8) for item in cut], 0, torch.device("cpu")).inputs
        told = torch.stack([row.behavior_N, row.weights_N, row.advantages_N])[:, row.behavior_N.argsort()].tolist()
        found.append((has_signal(group, options), batch.sums, len(batch.sample_ids), told))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("numbers", "signal"),
    [
        ([[1.0, 1.0], [1.0]], False),  # totals differ, and no step is better than another
        ([[1.0, 0.0], [1.0, 0.0]], True),
        ([[], []], False),
    ],
)
def test_a_group_whose_steps_are_equal_has_no_signal(numbers: list[list[float]], signal: bool) -> None:
    """The same groups have advantages of 0, and are counted."""
    group = group_of([{"/whole": 2.0, "judge": sum(steps)} for steps in numbers])
    nan = float("nan")
    samples = [
        msgspec.structs.replace(
            sample, token_values={"steps/judge": float_array([*steps, *[nan] * (sample.trained_tokens - len(steps))])}
        )
        for sample, steps in zip(group.samples, numbers, strict=True)
    ]
    group = msgspec.structs.replace(group, samples=tuple(samples))
    options = options_of()
    assert has_signal(group, options) is signal
    assert any(worth_training(item, options) for item in prepare_group(group, {}, options)) is signal
