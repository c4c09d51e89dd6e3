"""Preparation of scored groups: samples with advantages, and a rank's open batch. No model is called here.

``trainer`` and ``updates`` call it in each trainer rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import TRAINED, TrainingGroup, TrainingSample, TrajectoryId, WeightedRewards, float_array
from streamrl.learning.batches.gradients import BatchSums, TokenSums
from streamrl.learning.batches.packing import PreparedSample
from streamrl.learning.objective.advantages import (
    FloatVector,
    Moments,
    group_advantages,
    moments_of,
    separate_advantages,
    step_advantages,
    tracked_advantages,
    turn_advantages,
    whiten,
)
from streamrl.learning.objective.custom import estimator_of, trains_without_advantage
from streamrl.learning.objective.objectives import reference_kl, token_weight
from streamrl.learning.options import TrainerOptions
from streamrl.learning.process_group import all_gather_bytes
from streamrl.recipe.environment import Credit
from streamrl.recipe.objectives.method import Value
from streamrl.recipe.objectives.teacher import TEACHER
from streamrl.recipe.rewards import WHOLE_REWARD, RewardCredit, credit_of


class SampleScores(Struct, frozen=True, kw_only=True):
    """Scores of the trained tokens of a sample before it is trained: one float32 entry a token.

    ``proximal``: logprobs under the policy at the start of the update.
    ``reference``: logprobs under the reference model.
    ``values``: values of the critic."""

    proximal: FloatVector | None = None
    reference: FloatVector | None = None
    values: FloatVector | None = None


UNSCORED = SampleScores()


def shaped_reward(sample: TrainingSample, options: TrainerOptions) -> float:
    """Return the reward of the whole sample that the objective sees: with DAPO's soft overlong punishment where the
    objective has one, without numbers of steps and tokens."""
    _, reward = sample.separate_rewards.get(WHOLE_REWARD, (1.0, sample.reward))
    return reward + _overlong(sample, options)


def _overlong(sample: TrainingSample, options: TrainerOptions) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 to ``-penalty``, linear in the buffer."""
    buffer = options.objective.overlong_buffer
    penalty = options.objective.overlong_penalty
    if not buffer:
        return 0.0
    limit = sample.max_tokens or options.max_tokens
    return -penalty * min(1.0, max(0.0, (sample.trained_tokens - (limit - buffer)) / buffer))


def has_signal(group: TrainingGroup, options: TrainerOptions) -> bool:
    """Return whether a group can have a gradient at all: whether its siblings have different rewards. Rewards that are
    compared separately, or by turns, may differ where totals are equal."""
    rewards = [_rewards_to_compare(sample, options) for sample in group.samples]
    always = options.objective.trains_without_signal or trains_without_advantage(options.objective)
    if always or any(sibling != rewards[0] for sibling in rewards):
        return True
    if options.learn_observations and any(sample.imitated_tokens for sample in group.samples):
        return True
    return any(advantages.any() for advantages in _numbered_advantages(group, options))


def _rewards_to_compare(
    sample: TrainingSample, options: TrainerOptions
) -> tuple[float, Mapping[str, tuple[float, float]], tuple[float, ...]]:
    turn_rewards: tuple[float, ...] = ()
    # Turns that all earned 0 compare like turns without rewards, whatever their number.
    if options.credit is not Credit.TRAJECTORY and any(sample.turn_rewards):
        turn_rewards = sample.turn_rewards
    return shaped_reward(sample, options), _separate_rewards(sample), turn_rewards


def counts_in_loss(sample: TrainingSample, options: TrainerOptions) -> bool:
    """Return whether the loss counts the tokens of a sample: truncated samples may be left out (DAPO's overlong
    filtering)."""
    return options.objective.train_truncated or not sample.truncated


def behavior_of_trained(sample: TrainingSample) -> FloatVector:
    """Behaviour logprobs of the trained tokens."""
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8) == TRAINED[0]
    trained: FloatVector = np.frombuffer(sample.behavior_logprobs, dtype=np.float32)[mask]
    return trained


def prepare_group(
    group: TrainingGroup, scores: Mapping[TrajectoryId, SampleScores], options: TrainerOptions
) -> list[PreparedSample]:
    """Samples of one group with their advantages. Advantages relative to the whole batch are not final yet."""
    penalties = [_penalties(sample, scores.get(sample.id, UNSCORED), options) for sample in group.samples]
    values = _compare_siblings(group, penalties, options)
    return [
        _prepare(sample, value, token_penalties, scores.get(sample.id, UNSCORED), options)
        for sample, value, token_penalties in zip(group.samples, values, penalties, strict=True)
        if sample.trained_tokens and counts_in_loss(sample, options)  # a sample without trained tokens has no scores
    ]


def _compare_siblings(
    group: TrainingGroup, penalties: Sequence[FloatVector], options: TrainerOptions
) -> Sequence[Value]:
    """Advantage of each sibling, or of each of its tokens: that of its whole rewards, and those of its steps and tokens
    where rewards give numbers to them.

    ``penalties``: KL penalties of the tokens of each sample."""
    values = _compare_whole(group, penalties, options)
    numbered = _numbered_advantages(group, options)
    return [value + advantages for value, advantages in zip(values, numbered, strict=True)] if numbered else values


def _numbered_advantages(group: TrainingGroup, options: TrainerOptions) -> list[FloatVector]:
    """Advantages of the trained tokens of each sibling by the numbers that rewards gave to steps and tokens, each times
    the weight of its reward. Empty: no reward gave numbers."""
    samples = group.samples
    names = sorted({name for sample in samples for name in sample.token_values if credit_of(name)[1]})
    sums: list[FloatVector] = []
    for name in names:
        credit, label = credit_of(name)
        missing = float_array([math.nan])
        numbers_S = [
            np.array(sample.token_values.get(name, missing * sample.trained_tokens), dtype=np.float32)
            for sample in samples
        ]
        advantages_S = [np.nan_to_num(numbers_N) for numbers_N in numbers_S]
        if credit is RewardCredit.STEPS:
            advantages_S = step_advantages(numbers_S, estimator_of(options.objective))
        # The weight of a shadow is missing: its numbers are not trained.
        weights = [sample.separate_rewards.get(label, (0.0, 0.0))[0] for sample in samples]
        sums = sums or [np.zeros_like(advantages_N) for advantages_N in advantages_S]
        for index, weight in enumerate(weights):
            sums[index] += np.float32(weight) * advantages_S[index]
    return sums


def _compare_whole(group: TrainingGroup, penalties: Sequence[FloatVector], options: TrainerOptions) -> Sequence[Value]:
    """Advantage of each sibling: by its total reward, by turns (an advantage a token), or by each reward separately.
    The total reward of each sample where the estimator compares it with nothing.

    ``penalties``: KL penalties of the tokens of each sample."""
    estimator = estimator_of(options.objective)
    samples = group.samples
    if not estimator.of_rewards:
        return [0.0] * len(samples)
    # Samples are compared by their totals, so the penalties of a sample are added up.
    has_totals = estimator.compares_siblings or estimator.tracks_prompts
    sums = [float(token_penalties.sum()) if has_totals else 0.0 for token_penalties in penalties]
    totals = [shaped_reward(sample, options) - penalty for sample, penalty in zip(samples, sums, strict=True)]
    if options.credit is not Credit.TRAJECTORY:
        turns_ST = turn_advantages(totals, [_turn_rewards(sample) for sample in samples], options.credit, estimator)
        turns = [np.array(sample.turns, dtype=np.int64).reshape(-1, 2).T for sample in samples]
        return [
            np.repeat(turns_T[numbers], tokens)
            for turns_T, (numbers, tokens) in zip(turns_ST.numpy(), turns, strict=True)
        ]
    if estimator.tracks_prompts:
        if group.baseline is None:
            raise RecipeError(
                f"group {group.group_id} has no baseline of its prompt: it was sampled for another objective; start "
                "from a checkpoint"
            )
        return list(tracked_advantages(torch.tensor(totals, dtype=torch.float64), group.baseline).tolist())
    if not estimator.compares_siblings:
        return totals
    separate = [_separate_rewards(sample) for sample in samples]
    if not any(separate):
        return list(group_advantages(torch.tensor(totals, dtype=torch.float64), estimator).tolist())
    rewards = [
        separate_rewards | _shaping(sample, penalty, options)
        for separate_rewards, sample, penalty in zip(separate, samples, sums, strict=True)
    ]
    return list(separate_advantages(rewards, estimator).tolist())


def _separate_rewards(sample: TrainingSample) -> WeightedRewards:
    """(weight, value) of each reward of the whole sample that is compared separately."""
    numbered = {credit_of(name)[1] for name in sample.token_values}
    return {
        name: value for name, value in sample.separate_rewards.items() if name != WHOLE_REWARD and name not in numbered
    }


def _turn_rewards(sample: TrainingSample) -> tuple[float, ...]:
    """Reward of each turn of a sample, which has one turn at least; 0 for turns without a reward."""
    turns = 1 + max((number for number, _ in sample.turns), default=0)
    return sample.turn_rewards + (0.0,) * (turns - len(sample.turn_rewards))


def _shaping(sample: TrainingSample, penalty: float, options: TrainerOptions) -> dict[str, tuple[float, float]]:
    """(weight, value) of each term that shapes the reward, where rewards are compared separately. The comparison
    normalises values, so the coefficient is the weight. No reward has these names: recipes refuse names with "/"."""
    settings = options.objective
    shaping: dict[str, tuple[float, float]] = {}
    if settings.overlong_buffer and settings.overlong_penalty:
        value = _overlong(sample, options) / settings.overlong_penalty
        shaping["/overlong"] = settings.overlong_penalty, value
    if settings.penalizes_reward:
        shaping["/kl"] = settings.kl_coefficient, -penalty / settings.kl_coefficient
    return shaping


def _penalties(sample: TrainingSample, scores: SampleScores, options: TrainerOptions) -> FloatVector:
    settings = options.objective
    behavior = behavior_of_trained(sample)
    if scores.reference is None or not settings.penalizes_reward:
        return np.zeros_like(behavior)
    kl = reference_kl(torch.from_numpy(behavior.copy()), torch.from_numpy(scores.reference), settings.kl_estimator)
    return (settings.kl_coefficient * kl).numpy()


def _prepare(
    sample: TrainingSample, value: Value, penalties: FloatVector, scores: SampleScores, options: TrainerOptions
) -> PreparedSample:
    settings = options.objective
    advantages = value if isinstance(value, np.ndarray) else None
    returns = None
    if settings.estimator.whole_batch:
        advantages, returns = settings.estimator.of_tokens(
            value, penalties, scores.values, discount=settings.discount, gae_lambda=settings.gae_lambda
        )
    weight = token_weight(settings.loss_normalization, sample.trained_tokens)
    return PreparedSample(
        sample,
        advantage=value if isinstance(value, float) else 0.0,
        weight=weight,
        imitation=options.learn_observations * weight,
        token_advantages=advantages,
        proximal=scores.proximal,
        reference=scores.reference if settings.kl_coefficient > 0 else None,
        teacher=_teacher_logprobs(sample, scores, options),
        old_values=scores.values,
        returns=returns,
    )


def _teacher_logprobs(sample: TrainingSample, scores: SampleScores, options: TrainerOptions) -> FloatVector | None:
    """Logprobs of the trained tokens under the teacher: a served one, or the reference. None where the loss needs none.
    Raises ``RecipeError`` for a sample that no teacher has scored."""
    settings = options.objective
    if not settings.distils or settings.exact_divergence:
        return None
    if not options.served_teacher:
        return scores.reference
    logprobs = np.array(sample.token_values.get(TEACHER, ()), dtype=np.float32)
    if len(logprobs) != sample.trained_tokens:
        raise RecipeError(
            f"sample {sample.id} has {len(logprobs)} logprobs of the teacher for {sample.trained_tokens} trained "
            "tokens: it was scored without [teacher]; start from a checkpoint"
        )
    return logprobs


def token_moments(samples: Sequence[PreparedSample]) -> Moments:
    """Moments of the token advantages of this rank's samples."""
    vectors = [item.token_advantages for item in samples if item.token_advantages is not None]
    return moments_of(np.concatenate(vectors)) if vectors else Moments()


def whitened(samples: Sequence[PreparedSample], moments: Moments) -> list[PreparedSample]:
    """Return the samples with advantages relative to the whole batch (or cohort)."""
    return [
        replace(item, token_advantages=whiten(item.token_advantages, moments))
        for item in samples
        if item.token_advantages is not None
    ]


def worth_training(item: PreparedSample, options: TrainerOptions) -> bool:
    """Return whether a sample can have a gradient: an advantage of 0 has no gradient without KL, entropy or critic."""
    settings = options.objective
    if settings.has_critic or settings.has_reference or settings.distils or settings.entropy_coefficient:
        return True
    if item.imitation and item.sample.imitated_tokens:
        return True
    if trains_without_advantage(settings):
        return True
    if item.token_advantages is None:
        return bool(item.advantage)
    return bool(item.token_advantages.any())


def split_for_updates(samples: Sequence[PreparedSample], options: TrainerOptions) -> list[list[PreparedSample]]:
    """Split this rank's samples into ``updates_per_batch`` updates. Collective.

    Each update trains the same whole groups for any number of ranks: the groups are dealt out by their numbers, or, if
    ``shortest_first``, sorted by mean length and split into equal shares."""
    lengths: dict[int, list[int]] = {}
    for item in samples:
        lengths.setdefault(item.sample.id.group_id, []).append(item.sample.trained_tokens)
    rank_groups = [
        (fmean(group_lengths) if options.shortest_first else 0.0, group) for group, group_lengths in lengths.items()
    ]
    encoded = all_gather_bytes(msgspec.msgpack.encode(rank_groups))[:: options.ranks_per_group]
    groups = sorted(pair for part in encoded for pair in msgspec.msgpack.decode(part, type=list[tuple[float, int]]))
    updates = options.updates_per_batch
    places = {group: index for index, (_, group) in enumerate(groups)}
    shares: list[list[PreparedSample]] = [[] for _ in range(updates)]
    for item in samples:
        place = places[item.sample.id.group_id]
        update = place % updates
        if options.shortest_first:
            update = place * updates // len(groups)
        shares[update].append(item)
    return shares


class OpenBatch:
    """A rank's batch from its first group to the close.

    ``batch_id``: number of the batch; None until its first group arrives.
    ``imitation``: sums of the rows that are imitated.
    ``waiting``: groups that are still to be computed.
    ``waiting_tokens``: number of tokens of the samples in ``waiting`` that the loss counts.
    ``sample_ids``: names of the samples that are or were in ``waiting`` and that the loss counts."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self.batch_id: int | None = None
        self.sums = BatchSums()
        self.imitation = TokenSums()
        self.waiting: list[TrainingGroup] = []
        self.waiting_tokens = 0
        self.sample_ids: list[str] = []

    def take(self, group: TrainingGroup) -> None:
        """Count a group, and let it wait if it needs computing. Raises ``StreamRLError`` for a group of another
        batch."""
        if self.batch_id is None:
            self.batch_id = group.batch_id
        if group.batch_id != self.batch_id:
            raise StreamRLError(
                f"group {group.group_id} is of batch {group.batch_id} while batch {self.batch_id} is open"
            )
        options = self._options
        sums = self.sums
        loss_samples = [sample for sample in group.samples if counts_in_loss(sample, options)]
        sums.groups += 1
        sums.samples += len(group.samples)
        sums.trained_tokens += sum(sample.trained_tokens for sample in group.samples)
        sums.loss_tokens += sum(sample.trained_tokens for sample in loss_samples)
        if not has_signal(group, options):
            sums.groups_without_signal += 1
            # Where advantages are relative to the batch, its deviation has to count the zeros of this group.
            if not options.objective.estimator.whole_batch:
                return
        self.waiting.append(group)
        self.waiting_tokens += sum(len(sample.token_ids) for sample in loss_samples)
        self.sample_ids += [str(sample.id) for sample in loss_samples]

    def take_waiting(self) -> list[TrainingGroup]:
        """Return the waiting groups, and clear ``waiting``."""
        groups = self.waiting
        self.waiting = []
        self.waiting_tokens = 0
        return groups
