"""Promises of a run that a loss of the user may break, each checked over random batches: the process of
``objective_trial``, ``python -m streamrl.learning.custom_objective.promises``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.learning.custom_objective.objective_trial import ObjectiveTrial, Promise
from streamrl.learning.custom_objective.random_batches import (
    LONGEST,
    ROW_TOKENS,
    GradientRun,
    Gradients,
    RandomBatch,
    exact_gradients,
    random_batch,
    relative_difference,
)
from streamrl.learning.objective.custom import (
    UserAdvantages,
    UserLoss,
    estimator_of,
    surrogate_of,
    trains_without_advantage,
)
from streamrl.learning.options import TrainerOptions
from streamrl.recipe.environment import Credit
from streamrl.recipe.objective import (
    Mask,
    Objective,
    ObjectiveSettings,
    OffPolicy,
    Proximal,
    RatioLevel,
    objective_settings,
)
from streamrl.recipe.objectives.custom import CUSTOM
from streamrl.recipe.objectives.method import Clip, LossNormalization, SurrogateTokens
from streamrl.recipe.throwaway_process import answer_parent

ROUNDING = 1e-4
"""Largest relative difference of two float32 gradients that counts as rounding. Losses of the catalog have 1e-6."""
SOME_ADVANTAGES = (1.5, -0.5, 0.0, 2.0, -1.0, 0.3)
SOME_REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5)
OF_THE_ROW = (
    "the loss of a token depends on other tokens of its row: ask for sequence_mean, sequence_sum or sequence_ids, and "
    "read tokens of the same trajectory alone"
)


class Trial(NamedTuple):
    """A random batch, and the options by which it is trained. ``proximal``: whether ratios start from the logprobs
    before the step."""

    batch: RandomBatch
    options: TrainerOptions
    proximal: bool

    def gradients(self, way: GradientRun) -> Gradients:
        """Gradients as a trainer rank computes them."""
        return way.gradients(self.batch, self.options, proximal=self.proximal)

    def reference(self) -> Gradients:
        """Gradients in float64, trajectory by trajectory."""
        return exact_gradients(self.batch, self.options, proximal=self.proximal)


def examine(objective: Objective, off_policy: OffPolicy, *, sizes_vary: bool = False) -> ObjectiveTrial:
    """Load the user's object and check its promises."""
    settings = objective_settings(objective, sizes_vary=sizes_vary)
    parts: list[str] = []
    try:
        return ObjectiveTrial(promises=tuple(_promises(settings, off_policy, sizes_vary, parts)), parts=tuple(parts))
    except RecipeError as error:
        texts = error.problems
    except StreamRLError as error:
        texts = [str(error)]
    problems = tuple(text.removeprefix("objective.function").lstrip(": ") for text in texts)
    return ObjectiveTrial(problems=problems, parts=tuple(parts))


def _promises(
    settings: ObjectiveSettings, off_policy: OffPolicy, sizes_vary: bool, parts: list[str]
) -> Iterator[Promise]:
    """Yield the promises of the parts that ``settings`` take of the user's object, beside plain ones of the catalog.
    Appends the parts in words. Raises ``StreamRLError`` for an object that no run can use."""
    plain = replace(
        settings,
        surrogate=CUSTOM if settings.surrogate == CUSTOM else "token_clip",
        advantages=CUSTOM if settings.advantages == CUSTOM else "group_std",
        kl_coefficient=0.0,
        distillation_coefficient=0.0,
        entropy_coefficient=0.0,
        overlong_buffer=0,
    )
    advantages = estimator_of(plain)
    if isinstance(advantages, UserAdvantages):
        parts.append("advantages of the rewards of siblings")
        yield from _promises_of_advantages(advantages, sizes_vary)
    loss = surrogate_of(plain)
    if isinstance(loss, UserLoss):
        parts.append("a loss that reads whole trajectories" if loss.reads_trajectory else "a loss of each token")
        _refuse_loss(loss, plain.clip)
    options = TrainerOptions(
        model_path="",
        run_id="",
        weights_endpoint="",
        max_tokens=2 * LONGEST,
        micro_batch_tokens=ROW_TOKENS,
        objective=plain,
        off_policy=off_policy,
    )
    yield from _promises_of_gradients(list(_trials(options)))
    if isinstance(loss, UserLoss):
        yield from _notes_of_loss(loss, plain, off_policy)


def _trials(options: TrainerOptions) -> Iterator[Trial]:
    """Yield batches of every normalization: a first step and a later one, stale, with credit of turns, truncated
    trajectories left out, with the recipe's correction or against the policy that sampled."""
    corrections = (options.off_policy, OffPolicy(proximal=Proximal.BEHAVIOR))
    cases = itertools.product(LossNormalization, (False, True))
    for number, (normalization, moved) in enumerate(cases):
        off_policy = corrections[number // 2 % 2]
        settings = replace(options.objective, loss_normalization=normalization, train_truncated=number % 3 == 0)
        credit = Credit.TURN if number % 3 == 1 else Credit.TRAJECTORY
        changed = replace(options, objective=settings, off_policy=off_policy, credit=credit)
        yield Trial(random_batch(number, moved=moved), changed, moved)


def _promises_of_gradients(trials: Sequence[Trial]) -> Iterator[Promise]:
    """Yield the promises about the gradients of batches."""
    whole_batches = [trial.gradients(GradientRun()) for trial in trials]
    errors: dict[str, list[float]] = {}
    for trial, gradients in zip(trials, whole_batches, strict=True):
        difference = relative_difference(gradients, trial.reference())
        errors.setdefault(trial.options.objective.loss_normalization, []).append(difference)
    yield _promise(
        "gradient of float64",
        min(map(max, errors.values())),
        f"{len(trials)} batches: stale tokens, turns, truncated trajectories, later steps",
        OF_THE_ROW,
    )
    yield _promise(
        "denominators",
        max(map(max, errors.values())),
        ", ".join(errors),
        "the loss is no sum over tokens: return one number a token, and divide by no number of tokens",
    )
    ways = {
        "streaming = whole batch": (GradientRun(streamed=True), "groups are trained as they come"),
        "packing = single rows": (GradientRun(single=True), "trajectories share rows"),
        "order of rows": (GradientRun(backwards=True), "trajectories of a row stand in any order"),
    }
    for name, (way, meaning) in ways.items():
        pairs = zip(trials, whole_batches, strict=True)
        error = max(relative_difference(trial.gradients(way), gradients) for trial, gradients in pairs)
        yield _promise(name, error, meaning, OF_THE_ROW)
    repeated = reversed([trial.gradients(GradientRun()) for trial in reversed(trials)])
    equal = all(
        torch.equal(gradient, gradients[name])
        for gradients, again in zip(whole_batches, repeated, strict=True)
        for name, gradient in again.items()
    )
    text = "equal batches have equal bits, in any order"
    if not equal:
        text = "equal batches have different gradients: draw no random numbers, and remember nothing between calls"
    yield Promise(name="resume", holds=equal, text=text)


def _promise(name: str, error: float, meaning: str, remedy: str) -> Promise:
    holds = error <= ROUNDING
    return Promise(name=name, holds=holds, error=error, text=meaning if holds else remedy)


def _tokens(clip: Clip, difference: float) -> SurrogateTokens:
    """Tokens of one trajectory with a log ratio of ``difference``, in float32."""
    advantages_N = torch.tensor(SOME_ADVANTAGES)
    logprobs_N = torch.linspace(-2.5, -0.2, len(SOME_ADVANTAGES)).requires_grad_()
    proximal_N = logprobs_N.detach() - difference
    numbers_N = torch.zeros(len(SOME_ADVANTAGES), dtype=torch.int64)
    ratio_N = (logprobs_N - proximal_N).clamp(max=20.0).exp()
    behavior_N = proximal_N - 0.05
    return SurrogateTokens(logprobs_N, proximal_N, behavior_N, ratio_N, advantages_N, numbers_N, numbers_N, 1, clip)


def _gradient(loss: UserLoss, tokens: SurrogateTokens) -> Tensor:
    """Gradient of the logprobs; NaN where the loss is not finite."""
    losses_N, _ = loss.loss(tokens)
    torch.autograd.backward(losses_N.sum())
    gradient_N = tokens.logprobs_N.grad
    assert gradient_N is not None
    return gradient_N.masked_fill(~losses_N.isfinite(), torch.nan)


def _refuse_loss(loss: UserLoss, clip: Clip) -> None:
    """Raise ``StreamRLError`` for a loss that no run can use: of a wrong form, not finite, of the wrong sign, or one
    that changes its inputs."""
    for difference in (0.1, -0.1, 0.0):
        tokens = _tokens(clip, difference)
        inputs = {name: value for name, value in tokens._asdict().items() if isinstance(value, Tensor)}
        copies = {name: value.detach().clone() for name, value in inputs.items()}
        gradient_N = _gradient(loss, tokens)
        for name, value in inputs.items():
            if not torch.equal(value, copies[name]):
                raise StreamRLError(f'"{loss.spec}" changes {name.removesuffix("_N")} in place: work on a clone()')
        if not bool(gradient_N.isfinite().all()):
            ratio = float(tokens.ratio_N[0].detach())
            raise StreamRLError(
                f'"{loss.spec}" gives NaN or infinity for ordinary tokens (ratio {ratio:.3g}, advantages '
                f"{list(SOME_ADVANTAGES)}): look for a division, a log or a root of 0"
            )
    if float((gradient_N * tokens.advantages_N).sum()) > 0:
        raise StreamRLError(
            f'"{loss.spec}" makes tokens with a positive advantage less likely: a loss is minimised, so return '
            "-ratio * advantages, and not ratio * advantages"
        )


def _notes_of_loss(loss: UserLoss, settings: ObjectiveSettings, off_policy: OffPolicy) -> Iterator[Promise]:
    """Yield properties of a loss with which a run may begin."""
    weighs = off_policy.truncate is not RatioLevel.NONE or off_policy.mask is Mask.ICEPOP
    if weighs and off_policy.proximal is not Proximal.BEHAVIOR and "behavior_logprobs" in loss.inputs:
        text = (
            "are weighted by [off_policy], too: where the loss corrects for the policy that sampled them by itself, "
            'set off_policy.truncate = "none", and another mask than "icepop"'
        )
        yield Promise(name="stale tokens", holds=False, text=text, needed=False)
    text = "has no gradient: groups of equal rewards are not computed"
    if trains_without_advantage(settings):
        text = "has a gradient: groups of equal rewards are computed, too"
    yield Promise(name="advantage 0", holds=True, text=text, needed=False)
    gradients = [_gradient(loss, _tokens(settings.clip, difference)) for difference in (-1000.0, -50.0, 50.0, 1000.0)]
    finite = bool(torch.stack(gradients).isfinite().all())
    text = "are finite"
    if not finite:
        text = (
            "give NaN or infinity where a logprob moves by 50 or more, which ends a run: bound the difference, such as "
            "(logprobs - old_logprobs).clamp(-20, 20)"
        )
    yield Promise(name="extreme ratios", holds=finite, text=text, needed=False)


def _promises_of_advantages(advantages: UserAdvantages, sizes_vary: bool) -> Iterator[Promise]:
    """Yield the promises of advantages. Raises ``StreamRLError`` for a wrong form of the result."""

    def of_rewards(rewards_S: Tensor) -> Tensor:
        return advantages.of_group(rewards_S, rewards_S - rewards_S.mean())

    rewards_S = torch.tensor(SOME_REWARDS, dtype=torch.float64)
    order_S = torch.tensor([4, 0, 3, 1, 2])
    advantages_S = of_rewards(rewards_S)
    yield _promise(
        "order of siblings",
        float((of_rewards(rewards_S[order_S]) - advantages_S[order_S]).abs().max()),
        "siblings come in any order",
        "compare a reward with those of all siblings, and not by its place",
    )
    yield _promise(
        "equal rewards",
        float(of_rewards(torch.full((4,), 0.5, dtype=torch.float64)).abs().max()),
        "have advantages of 0, and are not computed",
        "must have advantages of 0, because such groups are not trained: subtract a baseline of the siblings",
    )
    rises = float((advantages_S * (rewards_S - rewards_S.mean())).sum()) > 0
    larger = "larger" if rises else "smaller"
    yield Promise(name="direction", holds=rises, text=f"a larger reward has a {larger} advantage")
    doubled_S = of_rewards(rewards_S.repeat(2))[: len(SOME_REWARDS)]
    same_scale = float((doubled_S - advantages_S).abs().max()) <= ROUNDING
    text = "do not scale advantages"
    if not same_scale:
        text = "scale advantages, so that groups of several sizes would have different weights"
    yield Promise(name="group sizes", holds=same_scale, text=text, needed=sizes_vary)


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    objective, off_policy, sizes_vary = msgspec.json.decode(arguments[0], type=tuple[Objective, OffPolicy, bool])
    answers.write(msgspec.msgpack.encode(examine(objective, off_policy, sizes_vary=sizes_vary)))


if __name__ == "__main__":
    answer_parent(_answer)
