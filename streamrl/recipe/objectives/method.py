"""Base classes of the parts of an objective, and ``Method``, which combines them. Trainer ranks call the formulas
(``learning.objective``); every command reads the names, so this file imports no torch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from msgspec import Struct

from streamrl.recipe.field_types import Section

# numpy takes 0.1 s to import: it is imported within the functions that compute.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor as Tensor

    Vector = NDArray[np.float32]
else:
    Tensor = Vector = Any

Value = float | Vector
"""An advantage or a reward: of a sample, or of each of its trained tokens."""


class LossNormalization(StrEnum):
    """Divisor of a step's loss. ``token_mean``: trained tokens of the batch (DAPO, arXiv 2503.14476);
    ``sequence_mean``: tokens of each sample, then samples (GRPO, arXiv 2402.03300); ``sequence_sum``: samples (RLOO);
    ``constant``: samples times ``sampling.max_tokens``, with an environment ``environment.max_tokens`` (Dr. GRPO, arXiv
    2503.20783)."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"
    CONSTANT = "constant"


class KlPlace(StrEnum):
    """Term to which the KL to the reference model is added: the loss, or the reward of each token."""

    LOSS = "loss"
    REWARD = "reward"


class Clip(NamedTuple):
    """Bounds of r, the ratio of two policies: ``1 - low``, ``1 + high``, and ``dual`` where A < 0 (0: none).
    ``divergence_mask`` bounds the difference of two probabilities: ``-low``, ``high``."""

    low: float
    high: float
    dual: float


class SurrogateTokens(NamedTuple):
    """Trained tokens of whole sequences, or a part of them. Float32 [N] unless noted.

    ``logprobs_N``: log pi, differentiable.
    ``proximal_N``: log pi_proximal.
    ``behavior_N``: logprobs that the engine reported.
    ``ratio_N``: r = pi / pi_proximal, differentiable, at most exp(20).
    ``staleness_N``: int64, versions between the one that sampled the token and the one that is differentiated.
    ``sequence_N``: int64, index of the token's trajectory.
    ``sequences``: number of trajectories."""

    logprobs_N: Tensor
    proximal_N: Tensor
    behavior_N: Tensor
    ratio_N: Tensor
    advantages_N: Tensor
    staleness_N: Tensor
    sequence_N: Tensor
    sequences: int
    clip: Clip

    def sequence_sum(self, values_N: Tensor) -> Tensor:
        """Sum of ``values_N`` over the trajectory of each token, differentiable. [N]."""
        sums_S = values_N.new_zeros(self.sequences).index_add(0, self.sequence_N, values_N)
        return sums_S[self.sequence_N]

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Mean of ``values_N`` over the trajectory of each token, differentiable. [N]."""
        return self.sequence_sum(values_N) / self.sequence_sum(values_N.new_ones(values_N.shape))


class Surrogate(Section, frozen=True):
    """Loss of a token, given its advantage A and r = pi / pi_proximal. The docstring of a subclass is its text in
    docs/recipe.md; its fields are keys below ``[objective.NAME]`` (``Objective`` then has a field NAME).

    ``clips``: whether ``clip_low`` and ``clip_high`` have an effect;
    ``dual_clips``: whether ``dual_clip`` has an effect;
    ``whole_sequences``: whether r is the geometric mean of the ratios of a trajectory, the same for each token;
    ``reads_trajectory``: whether the loss of a token reads other tokens of its trajectory."""

    name: ClassVar[str]
    clips: ClassVar[bool] = True
    dual_clips: ClassVar[bool] = True
    whole_sequences: ClassVar[bool] = False
    reads_trajectory: ClassVar[bool] = False

    def loss(self, tokens: SurrogateTokens) -> tuple[Tensor, Tensor]:
        """Return (loss of each token, differentiable; whether the clip changed it, bool). [N] each."""
        raise NotImplementedError


class Advantages(Section, frozen=True):
    """Baseline and scale of an advantage. Text and keys as for a ``Surrogate``.

    ``of_rewards``: whether rewards make advantages at all;
    ``compares_siblings``: whether rewards of a group are compared, so that a group of one, or of equal rewards, has no
    advantage;
    ``varies_with_size``: whether the size of the group scales the advantages, so that groups of several sizes would
    have different weights;
    ``whole_batch``: whether advantages are whitened over the batch, so that they are known when it is complete;
    ``of_cohort``: whether they are whitened over ``cohort_batches`` batches;
    ``of_critic``: whether they are computed from values of a critic;
    ``positive_rewards``: whether no reward may be below 0;
    ``tracks_prompts``: whether they are relative to a ``base.types.Baseline`` of the prompt, which control keeps."""

    name: ClassVar[str]
    of_rewards: ClassVar[bool] = True
    compares_siblings: ClassVar[bool] = False
    varies_with_size: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    of_cohort: ClassVar[bool] = False
    of_critic: ClassVar[bool] = False
    positive_rewards: ClassVar[bool] = False
    tracks_prompts: ClassVar[bool] = False

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        """Return the advantages of siblings whose rewards differ, float64 [S]; called where ``compares_siblings``.
        ``centred_S``: rewards minus their mean."""
        return centred_S

    def of_tokens(
        self, value: Value, penalties_N: Vector, values_N: Vector | None, *, discount: float, gae_lambda: float
    ) -> tuple[Vector, Vector | None]:
        """Return (advantages of a sample's tokens before they are whitened, the critic's returns or None). Float32 [N]
        each; called where ``whole_batch``.

        ``value``: advantage of the sample within its group, or its reward where siblings are not compared; also of each
        token;
        ``penalties_N``: KL to the reference;
        ``values_N``: values of the critic (None: there is no critic).

        Sequences of a trajectory follow each other, the one with the last sampled token at the end."""
        import numpy as np

        if self.compares_siblings:  # rewards minus the penalties of the sample were compared: ``value`` has them
            penalties_N = np.zeros_like(penalties_N)
        return token_returns(value, penalties_N), None


def token_returns(reward: Value, penalties_N: Vector) -> Vector:
    """Compute the return of each token: the reward minus the penalties (KL to the reference) of this and later
    tokens."""
    later_N = penalties_N[::-1].cumsum(dtype="float64")[::-1]
    returns_N: Vector = (reward - later_N).astype("float32")
    return returns_N


class Method(Struct, frozen=True):
    """A published method: values for the keys of ``[objective]`` that a recipe does not set, and for
    ``rollout.dynamic_sampling``."""

    name: str
    surrogate: Surrogate
    advantages: Advantages
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_in: KlPlace = KlPlace.LOSS
    dynamic_sampling: bool = False
    distillation_coefficient: float = 0.0
