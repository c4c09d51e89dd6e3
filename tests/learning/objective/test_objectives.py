"""Parts of the objectives by hand, at the edges of float32, and on policy."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from streamrl.learning.objective.objectives import (  # noqa: E402
    TokenInputs,
    TokenLoss,
    loss_denominator,
    needs_whole_sequences,
    reference_kl,
    token_loss,
    token_weight,
    value_loss,
)
from streamrl.learning.options import trainer_options  # noqa: E402
from streamrl.recipe.objective import KlEstimator, ObjectiveSettings, OffPolicy, Proximal, RatioLevel  # noqa: E402
from streamrl.recipe.objectives.catalog import SURROGATES  # noqa: E402
from streamrl.recipe.objectives.method import LossNormalization  # noqa: E402
from streamrl.recipe.rules.explain import explain  # noqa: E402
from streamrl.recipe.rules.load_recipe import load_recipe  # noqa: E402

pytestmark = pytest.mark.torch

LENGTHS = [1, 4, 0, 6, 3, 2, 5]
"""Of the sequences of a row; one has no trained token."""
STALENESS = [0, 1, 0, 2, 0, 4, 1]


class Token(NamedTuple):
    """One trained token. ``own``: the trainer's logprob before the first update on the batch; None: ``logprob``."""

    logprob: float
    behavior: float
    advantage: float
    staleness: int
    sequence: int
    entropy: float = 0.0
    own: float | None = None
    reference: float | None = None


def row_of_tokens(seed: int, *, fresh: bool = False, spread: float = 0.4) -> list[Token]:
    """Tokens of sequences of several lengths and ages."""
    rng = random.Random(seed)
    tokens = []
    for sequence, (length, staleness) in enumerate(zip(LENGTHS, STALENESS, strict=True)):
        for _ in range(length):
            logprob = -3 * rng.random() - 0.1
            tokens.append(
                Token(
                    logprob=logprob,
                    behavior=logprob + rng.gauss(0, spread),
                    advantage=rng.gauss(0, 1),
                    staleness=0 if fresh else staleness,
                    sequence=sequence,
                    entropy=rng.random(),
                    reference=logprob + rng.gauss(0, spread),
                )
            )
    return tokens


def inputs_of(tokens: list[Token], dtype: Any = torch.float64) -> TokenInputs:
    def column(name: str) -> Any:
        values = [getattr(token, name) for token in tokens]
        return None if None in values else torch.tensor(values, dtype=dtype)

    return TokenInputs(
        behavior_N=column("behavior"),
        advantages_N=column("advantage"),
        weights_N=torch.ones(len(tokens), dtype=dtype),
        staleness_N=torch.tensor([token.staleness for token in tokens], dtype=torch.int64),
        sequence_N=torch.tensor([token.sequence for token in tokens], dtype=torch.int64),
        sequences=max([len(LENGTHS), *(token.sequence + 1 for token in tokens)]),
        proximal_N=column("own"),
        reference_N=column("reference"),
    )


def run(
    settings: ObjectiveSettings, off_policy: OffPolicy, tokens: list[Token], dtype: Any = torch.float64
) -> tuple[TokenLoss, Any]:
    """``token_loss`` and the gradient of its sum."""
    inputs = inputs_of(tokens, dtype)
    logprobs = torch.tensor([token.logprob for token in tokens], dtype=dtype, requires_grad=True)
    entropy = torch.tensor([token.entropy for token in tokens], dtype=dtype)
    found = token_loss(settings, off_policy, logprobs, entropy, inputs)
    found.loss_N.sum().backward()
    return found, logprobs.grad


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_which_kl_gradient_an_estimator_has(estimator: KlEstimator) -> None:
    """Expectations over a whole vocabulary: as reference_kl's docstring says."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    expected_value = (policy.exp() * (policy - reference)).sum()
    estimates = reference_kl(policy, reference, estimator)
    [found] = torch.autograd.grad((policy.exp().detach() * estimates).sum(), logits, retain_graph=True)
    [reverse] = torch.autograd.grad(expected_value, logits, retain_graph=True)
    [forward] = torch.autograd.grad((reference.exp() * (reference - policy)).sum(), logits)
    value = (policy.exp() * estimates).sum().item()
    assert (value == pytest.approx(expected_value.item())) is (estimator is not KlEstimator.K2)
    gradient = {KlEstimator.K1: torch.zeros_like(found), KlEstimator.K2: reverse, KlEstimator.K3: forward}[estimator]
    torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_on_policy_takes_the_plain_path_whatever_off_policy_says(surrogate: str) -> None:
    settings = ObjectiveSettings(surrogate=surrogate, clip_low=1e-9, clip_high=1e-9)
    tokens = [token._replace(reference=None) for token in row_of_tokens(5, fresh=True, spread=3.0)]
    plain = [-token.advantage for token in tokens]
    if surrogate == "sequence_clip":  # each token has its share of the whole sequence
        groups = [[t.advantage for t in tokens if t.sequence == token.sequence] for token in tokens]
        plain = [-sum(group) / len(group) for group in groups]
    for proximal, level in itertools.product(Proximal, RatioLevel):
        off_policy = OffPolicy(
            proximal=proximal, truncate=level, cap=0.5, mask=level, mask_low=2, mask_high=3, staleness_discount=0.1
        )
        found, gradient = run(settings, off_policy, tokens, dtype=torch.float32)
        assert found.correction_N.tolist() == [1.0] * len(tokens)
        assert not (found.masked_N | found.clipped_N).any()
        advantages = torch.tensor([token.advantage for token in tokens])
        factor = torch.tensor([t.logprob for t in tokens]) if surrogate == "token_weight" else 1.0
        if surrogate == "soft_gate":  # 4 / t times the sigmoid of 0
            factor = torch.where(advantages > 0, 2 / 1.0, 2 / 1.05)
        torch.testing.assert_close(found.loss_N, -advantages * factor, rtol=2e-7, atol=0)
        assert gradient.tolist() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_extreme_differences_are_finite(surrogate: str) -> None:
    tokens = [
        Token(-1.0, -1.0 + behavior, advantage, staleness, sequence, own=-1.0 + own, reference=-1.0 + reference)
        for sequence, (behavior, own, reference) in enumerate(itertools.product([-1000.0, 1000.0], repeat=3))
        for advantage in (-1.0, 0.0, 1.0)
        for staleness in (0, 2)
    ]
    for proximal, level, estimator, own in itertools.product(Proximal, RatioLevel, KlEstimator, [True, False]):
        settings = ObjectiveSettings(surrogate=surrogate, kl_coefficient=0.1, kl_estimator=estimator)
        moved = tokens if own else [token._replace(own=None) for token in tokens]
        for mask in {level, RatioLevel.NONE}:
            off_policy = OffPolicy(proximal=proximal, truncate=level, mask=mask, mask_low=0, correct_mismatch=True)
            found, gradient = run(settings, off_policy, moved, dtype=torch.float32)
            assert torch.isfinite(torch.stack([found.loss_N, found.correction_N, found.reference_kl_N, gradient])).all()


def test_k3_keeps_its_direction_beyond_its_tangent() -> None:
    logprobs = torch.tensor([-9.999, -10.001, -500.0], requires_grad=True)
    value = reference_kl(logprobs, torch.zeros(3), KlEstimator.K3)
    value.sum().backward()
    slope = math.exp(10) - 1
    assert value.tolist() == pytest.approx(
        [math.exp(9.999) - 10.999, math.exp(10) - 11 + 0.001 * slope, slope * 490 + math.exp(10) - 11], rel=1e-5
    )
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(9.999), -slope, -slope], rel=1e-4)


def test_no_tokens() -> None:
    for surrogate, level, proximal in itertools.product(SURROGATES, RatioLevel, Proximal):
        settings = ObjectiveSettings(surrogate=surrogate, kl_coefficient=0.1, entropy_coefficient=0.1, dual_clip=3.0)
        found, gradient = run(settings, OffPolicy(truncate=level, mask=level, proximal=proximal), [])
        assert [part.numel() for part in found] == [0] * 6
        assert gradient.numel() == 0
    nothing = torch.zeros(0)
    index = torch.zeros(0, dtype=torch.int64)
    empty = TokenInputs(nothing, nothing, nothing, index, index, 0, returns_N=nothing, old_values_N=nothing)
    assert value_loss(ObjectiveSettings(), nothing, empty).numel() == 0
    assert token_loss(ObjectiveSettings(surrogate="sequence_clip"), OffPolicy(), nothing, nothing, empty)


@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_needs_whole_sequences_says_what_may_be_cut(surrogate: str) -> None:
    settings = ObjectiveSettings(surrogate=surrogate, clip_low=0.9, clip_high=10)
    tokens = row_of_tokens(6)
    for truncate, mask in itertools.product(RatioLevel, RatioLevel):
        off_policy = OffPolicy(
            proximal=Proximal.INTERPOLATED, truncate=truncate, cap=100, mask=mask, mask_low=0.9, mask_high=1.1
        )
        whole, _ = run(settings, off_policy, tokens)
        parts = [run(settings, off_policy, [token])[0] for token in tokens]
        same = torch.allclose(whole.loss_N, torch.cat([part.loss_N for part in parts]))
        assert same is not needs_whole_sequences(settings, off_policy)


def test_value_loss_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 0.0, 0.1], dtype=torch.float64, requires_grad=True)
    tokens = inputs_of([Token(0, 0, 0, 0, 0)] * 4)._replace(
        returns_N=torch.tensor([3.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        old_values_N=torch.tensor([0.0, 0.0, 0.0, 0.2], dtype=torch.float64),
    )
    # Clipped to 0.2 of the old: 0.2, 0.2, 0, 0.1. The larger error counts: it is the clipped one (no gradient) for the
    # first, the plain one for the second; the last two are not clipped.
    losses = value_loss(ObjectiveSettings(value_clip=0.2), values, tokens)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([2.8**2 / 2, 0.5, 0.5, 0.005])
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, -1.0, 0.1])
    for plain in (
        value_loss(ObjectiveSettings(value_clip=0.0), values, tokens),
        value_loss(ObjectiveSettings(), values, tokens._replace(old_values_N=None)),
    ):
        assert plain.tolist() == pytest.approx([2.0, 0.5, 0.5, 0.005])
    with pytest.raises(ValueError, match="returns_N is None"):
        value_loss(ObjectiveSettings(), values, tokens._replace(returns_N=None))


@pytest.mark.parametrize(
    ("normalization", "expected"),
    # two samples of 1 and 3 trained tokens with losses 2 and 1, 1, 1; max_tokens 10
    [
        (LossNormalization.TOKEN_MEAN, (2 + 3) / 4),
        (LossNormalization.SEQUENCE_MEAN, (2 / 1 + 3 / 3) / 2),
        (LossNormalization.SEQUENCE_SUM, (2 + 3) / 2),
        (LossNormalization.CONSTANT, (2 + 3) / 20),
    ],
)
def test_normalisations_by_hand(normalization: LossNormalization, expected: float) -> None:
    total = 2 * token_weight(normalization, 1) + 3 * token_weight(normalization, 3)
    assert total / loss_denominator(normalization, samples=2, trained_tokens=4, max_tokens=10) == expected
    assert loss_denominator(normalization, samples=0, trained_tokens=0, max_tokens=10) >= 1


def test_the_constant_of_an_environment_is_its_limit() -> None:
    """The divisor is the one that ``streamrl explain`` names: the limit of a whole conversation, not of a turn."""
    recipe = load_recipe(
        {
            "model": {"path": "m"},
            "prompts": {"train": "p.jsonl"},
            "environment": {"env": "m:Game", "max_tokens": 300},
            "sampling": {"max_tokens": 20},
            "objective": {"algorithm": "dr_grpo"},
        }
    )
    options = trainer_options(recipe, 0, "r", "")
    normalization = options.objective.loss_normalization
    divisor = loss_denominator(normalization, samples=3, trained_tokens=50, max_tokens=options.max_tokens)
    assert divisor == 3 * recipe.environment.max_tokens == 900
    assert "environment.max_tokens" in "".join(explain("objective.loss_normalization"))


@pytest.mark.parametrize("teacher", [{"model": "m"}, {"model": "m", "endpoint": "http://h/v1", "tokenizer": "t"}])
def test_ranks_expect_the_logprobs_of_a_served_teacher(teacher: dict[str, str]) -> None:
    """Whether the run serves it, or it is at an address; without them nothing would be distilled."""
    table = {"model": {"path": "m"}, "prompts": {"train": "p.jsonl"}, "objective": {"algorithm": "distillation"}}
    assert trainer_options(load_recipe(table | {"teacher": teacher}), 0, "r", "").served_teacher
    assert not trainer_options(load_recipe(table, ["objective.reference=other"]), 0, "r", "").served_teacher
