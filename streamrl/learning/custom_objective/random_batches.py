"""Random batches for the trial of a loss, and the gradients of their logprobs: by the way of a trainer rank in float32,
and trajectory by trajectory in float64. A table of logprobs takes the place of the model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from streamrl.base.types import (
    TRAINED,
    TrainingGroup,
    TrainingSample,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)
from streamrl.learning.batches.packing import PreparedSample, pack, packed_rows, sequences_of
from streamrl.learning.batches.preparation import OpenBatch, SampleScores, prepare_group, worth_training
from streamrl.learning.model.policy import MicroBatch
from streamrl.learning.objective.objectives import loss_denominator, needs_whole_sequences, token_loss, token_weight
from streamrl.learning.options import TrainerOptions
from streamrl.recipe.objectives.method import LossNormalization

SIZES = (4, 3, 1, 5, 2, 4)
LONGEST = 24
CHUNK = 16
"""Tokens of a part of a row, where the loss of a token needs no other."""
ROW_TOKENS = 64
Gradients = dict[str, Tensor]
"""Gradient of the logprobs of each sequence by its name, float64."""


class RandomBatch(NamedTuple):
    """Groups, and logprobs of the trained tokens of each trajectory by its id: before the step (float32 values), and
    now. The device of all is the CPU."""

    groups: list[TrainingGroup]
    before: dict[TrajectoryId, Tensor]
    now: dict[TrajectoryId, Tensor]


def random_batch(seed: int, *, moved: bool) -> RandomBatch:
    """Make groups of several sizes, one with equal rewards: trajectories of one sequence or two, of turns with rewards,
    of four versions, some truncated. ``moved``: whether the policy has taken a step on the batch."""
    rng = random.Random(seed)
    batch = RandomBatch([], {}, {})
    for group_id, size in enumerate(SIZES):
        samples = []
        for number in range(size):
            identity = TrajectoryId(prompt_id=f"p{group_id}", group_id=group_id, sample=number)
            lengths = [rng.randint(1, LONGEST) for _ in range(1 + (rng.random() < 0.3))]
            tokens = sum(lengths)
            logprobs = [-3 * rng.random() - 0.05 for _ in range(tokens)]
            batch.before[identity] = torch.tensor(logprobs, dtype=torch.float32)
            drift = torch.tensor([rng.gauss(0, 0.3) for _ in logprobs]) if moved else torch.zeros(tokens)
            batch.now[identity] = (batch.before[identity] + drift).clamp(max=0.0)
            reward = 1.0 if group_id == 3 else float(rng.randint(0, 3))
            samples.append(_sample(identity, lengths, logprobs, reward, rng))
        batch.groups.append(TrainingGroup(group_id=group_id, batch_id=0, samples=tuple(samples)))
    return batch


def _sample(
    identity: TrajectoryId, lengths: Sequence[int], logprobs: Sequence[float], reward: float, rng: random.Random
) -> TrainingSample:
    """Make a trajectory with a sequence for each of ``lengths``, each behind a prompt of its own and a turn of its
    own."""
    ids: list[int] = []
    mask = b""
    behavior: list[float] = []
    starts: list[int] = []
    spans: list[VersionSpan] = []
    logprobs_left = iter(logprobs)
    for length in lengths:
        prompt = rng.randint(1, 4)
        starts.append(len(ids))
        ids += [rng.randrange(32) for _ in range(prompt + length)]
        mask += bytes(prompt) + TRAINED * length
        behavior += [0.0] * prompt + [logprob + rng.gauss(0, 0.3) for logprob in islice(logprobs_left, length)]
        cut = len(ids) - rng.randint(0, length)
        first = len(ids) - length
        edges = ((first, cut, -rng.randint(0, 3)), (cut, len(ids), -rng.randint(0, 3)))
        spans += [VersionSpan(start, end, version) for start, end, version in edges if start < end]
    if len(starts) == 1:
        starts = []
    return TrainingSample(
        id=identity,
        token_ids=token_array(ids),
        loss_mask=mask,
        behavior_logprobs=float_array(behavior),
        reward=reward,
        oldest_version=min(span.policy_version for span in spans),
        newest_version=max(span.policy_version for span in spans),
        truncated=rng.random() < 0.2,
        version_spans=tuple(spans),
        sequence_starts=tuple(starts),
        turn_rewards=tuple(rng.randint(0, 2) / 2 for _ in lengths),
        turns=tuple(enumerate(lengths)),
    )


class GradientRun(NamedTuple):
    """Gradients of a batch as a trainer rank computes them, float32, without a model.

    ``streamed``: whether each group is trained alone, as soon as it is there;
    ``single``: whether each trajectory has rows of its own;
    ``backwards``: whether the trajectories of a row stand in the opposite order."""

    streamed: bool = False
    single: bool = False
    backwards: bool = False

    def gradients(self, batch: RandomBatch, options: TrainerOptions, *, proximal: bool) -> Gradients:
        """Gradients of ``batch``, divided as a closed batch is. ``proximal``: whether ratios start from the logprobs
        before the step, as in the later ones of several updates on a batch."""
        open_batch = OpenBatch(options)
        prepared: list[PreparedSample] = []
        gradients: Gradients = {}
        for group in batch.groups:
            open_batch.take(group)
            for waiting in open_batch.take_waiting():
                scores = scores_of(waiting, batch, proximal=proximal)
                prepared += [item for item in prepare_group(waiting, scores, options) if worth_training(item, options)]
            if self.streamed:
                self._train(prepared, batch, options, gradients)
                prepared = []
        for share in [[item] for item in prepared] if self.single else [prepared]:
            self._train(share, batch, options, gradients)
        sums = open_batch.sums
        denominator = loss_denominator(
            options.objective.loss_normalization,
            samples=sums.samples,
            trained_tokens=sums.loss_tokens,
            max_tokens=options.max_tokens,
        )
        return {name: gradient / denominator for name, gradient in gradients.items()}

    def _train(
        self, samples: Sequence[PreparedSample], batch: RandomBatch, options: TrainerOptions, gradients: Gradients
    ) -> None:
        """Add the gradients of ``samples``."""
        logprobs: dict[str, Tensor] = {}
        for item in samples:
            sequences = sequences_of(item)
            counts = [sequence.sample.trained_tokens for sequence in sequences]
            parts = batch.now[item.sample.id].split_with_sizes(counts)
            logprobs |= {sequence.name: part for sequence, part in zip(sequences, parts, strict=True)}
        if not samples:
            return
        for row in packed_rows(samples, options, 0, torch.device("cpu"), together=False):
            leaf_N = torch.cat([logprobs[name] for name in row.sample_ids]).requires_grad_()
            for part in self._parts(row, options):
                losses = token_loss(
                    options.objective, options.off_policy, leaf_N[part], torch.zeros(len(part)), row.inputs.part(part)
                )
                torch.autograd.backward((losses.loss_N * row.inputs.weights_N[part]).sum())
            assert leaf_N.grad is not None
            for name, gradient_N in zip(row.sample_ids, leaf_N.grad.split_with_sizes(list(row.counts)), strict=True):
                gradients[name] = gradient_N.double()

    def _parts(self, row: MicroBatch, options: TrainerOptions) -> list[Tensor]:
        """Indices of the tokens of each part of a row."""
        order_N = torch.arange(row.targets_N.numel())
        if self.backwards:
            order_N = torch.cat(order_N.split_with_sizes(list(row.counts))[::-1])
        if needs_whole_sequences(options.objective, options.off_policy):
            return [order_N]
        return [order_N[start : start + CHUNK] for start in range(0, len(order_N), CHUNK)]


def scores_of(group: TrainingGroup, batch: RandomBatch, *, proximal: bool) -> dict[TrajectoryId, SampleScores]:
    """Logprobs before the step of the trajectories of a group, where ratios start from them."""
    if not proximal:
        return {}
    return {sample.id: SampleScores(proximal=batch.before[sample.id].numpy()) for sample in group.samples}


def exact_gradients(batch: RandomBatch, options: TrainerOptions, *, proximal: bool) -> Gradients:
    """Gradients of ``batch`` in float64, each trajectory by itself, none left out because its advantages are 0."""
    settings = options.objective
    trained_tokens = 0
    samples = 0
    gradients: Gradients = {}
    for group in batch.groups:
        for item in prepare_group(group, scores_of(group, batch, proximal=proximal), options):
            row = pack(sequences_of(item), 0, torch.device("cpu"))
            float64 = {name: value.double() for name, value in row.inputs._asdict().items() if _is_float(value)}
            leaf_N = batch.now[item.sample.id].double().requires_grad_()
            losses = token_loss(
                settings, options.off_policy, leaf_N, torch.zeros_like(leaf_N), row.inputs._replace(**float64)
            )
            weight = token_weight(settings.loss_normalization, leaf_N.numel())
            torch.autograd.backward(weight * losses.loss_N.sum())
            assert leaf_N.grad is not None
            gradients |= zip(row.sample_ids, leaf_N.grad.split_with_sizes(list(row.counts)), strict=True)
            trained_tokens += leaf_N.numel()
        samples += len(group.samples)
    divisors = {LossNormalization.TOKEN_MEAN: trained_tokens, LossNormalization.CONSTANT: samples * options.max_tokens}
    divisor = divisors.get(settings.loss_normalization, samples)
    return {name: gradient / divisor for name, gradient in gradients.items()}


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def relative_difference(gradients: Gradients, reference: Gradients) -> float:
    """Length of the difference of two gradients, relative to ``reference``. What one of them lacks is 0."""
    squares = 0.0
    for name in gradients.keys() | reference.keys():
        zero = torch.zeros(())
        squares += float((gradients.get(name, zero) - reference.get(name, zero)).square().sum())
    size = sum(float(gradient.square().sum()) for gradient in reference.values())
    if size == 0:
        return 0.0 if squares == 0 else float("inf")
    return float((squares / size) ** 0.5)
