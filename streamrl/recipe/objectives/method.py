"""Parts of an objective, and the method that names them. Readable without torch: tensors come from the caller."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from streamrl.recipe.fields import Section

# Every command reads recipes, and numpy takes 0.1 s: it is imported where it computes.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor as Tensor

    Vector = NDArray[np.float32]
else:
    Tensor = Vector = Any

Value = float | Vector
"""An advantage or a reward of a sample, or that of each trained token."""


class LossNormalization(StrEnum):
    """Divisor of a step's loss. ``token_mean``: all trained tokens of the batch (DAPO, arXiv 2503.14476);
    ``sequence_mean``: each sample's tokens, then samples (GRPO, arXiv 2402.03300); ``sequence_sum``: samples alone
    (RLOO); ``constant``: samples times ``sampling.max_tokens`` (Dr. GRPO, arXiv 2503.20783)."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_SUM = "sequence_sum"
    CONSTANT = "constant"


class KlPlace(StrEnum):
    """Term to which the KL to the reference model is added: the loss, or the reward of each token."""

    LOSS = "loss"
    REWARD = "reward"


class Clip(NamedTuple):
    """Bounds of r, the ratio of two policies: ``1 - low``, ``1 + high``, and ``dual`` where A < 0 (0: none)."""

    low: float
    high: float
    dual: float


class Surrogate(Section, frozen=True):
    """Loss of a token, given its advantage A and r = pi / pi_proximal. The docstring of a subclass is its text in
    docs/recipe.md; its fields are keys of its own, below ``[objective.NAME]`` (a field of ``Objective`` by that name).

    ``clips``: ``clip_low`` and ``clip_high`` have an effect; ``dual_clips``: ``dual_clip`` has one.
    ``whole_sequences``: r is the geometric mean of the ratios of a trajectory, the same for each of its tokens."""

    name: ClassVar[str]
    clips: ClassVar[bool] = True
    dual_clips: ClassVar[bool] = True
    whole_sequences: ClassVar[bool] = False

    def loss(self, ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, differentiable, and where the clip took effect (bool). [N] each."""
        raise NotImplementedError


class Advantages(Section, frozen=True):
    """Baseline and scale of an advantage. Text and keys as those of a ``Surrogate``.

    ``compares_siblings``: a group of one, or of equal rewards, has none. ``varies_with_size``: larger or smaller with
    the group, so that groups of several sizes would weigh differently. ``whole_batch``: whitened over the batch: known
    when it is complete, and not before. ``of_cohort``: over ``cohort_batches`` batches. ``of_critic``: from values."""

    name: ClassVar[str]
    compares_siblings: ClassVar[bool] = False
    varies_with_size: ClassVar[bool] = False
    whole_batch: ClassVar[bool] = False
    of_cohort: ClassVar[bool] = False
    of_critic: ClassVar[bool] = False

    def of_group(self, rewards_S: Tensor, centred_S: Tensor) -> Tensor:
        """Return the advantages of siblings whose rewards differ, if ``compares_siblings``. Float64 [S].
        ``centred_S``: the rewards minus their mean."""
        return centred_S

    def of_tokens(
        self, value: Value, penalties_N: Vector, values_N: Vector | None, *, discount: float, gae_lambda: float
    ) -> tuple[Vector, Vector | None]:
        """Return the advantages of a sample's tokens before they are whitened, and the critic's returns, if
        ``whole_batch``. Float32 [N] each. ``value``: its advantage within the group, or its reward where siblings are
        not compared, or those of each token; ``penalties_N``: KL to the reference; ``values_N``: of the critic, if any.
        Sequences of a trajectory come one after the other, the one with the last sampled token at the end."""
        # Siblings were compared by rewards minus penalties of the whole sample: these are in ``value`` then.
        import numpy as np

        return token_returns(value, np.zeros_like(penalties_N) if self.compares_siblings else penalties_N), None


def token_returns(reward: Value, penalties_N: Vector) -> Vector:
    """Return of each token: the reward minus the penalties (KL to the reference) of it and later tokens."""
    later_N = penalties_N[::-1].cumsum(dtype="float64")[::-1]
    returns_N: Vector = (reward - later_N).astype("float32")
    return returns_N


class Method(msgspec.Struct, frozen=True):
    """A paper's values of the fields that a recipe may leave out."""

    name: str
    surrogate: Surrogate
    advantages: Advantages
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_in: KlPlace = KlPlace.LOSS
    dynamic_sampling: bool = False
