"""Groups of random samples for the tiny model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from streamrl.base.messages import CloseBatch
from streamrl.base.types import TrainingGroup, TrainingSample, TrajectoryId, float_array, token_array

VOCABULARY = 32


def make_groups(
    batch_id: int,
    sizes: list[int],
    *,
    seed: int = 0,
    version: int = 0,
    rewards: list[list[float]] | None = None,
    prompts: int = 6,
) -> list[TrainingGroup]:
    """Groups of these sizes with random tokens, lengths 2 to 40 after 1 to ``prompts``, and random rewards unless
    given."""
    rng = random.Random(seed)
    groups = []
    for group_id, size in enumerate(sizes):
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, prompts))]
        samples = []
        for sample in range(size):
            count = rng.randint(2, 40)
            completion = [rng.randrange(3, VOCABULARY) for _ in range(count)]
            samples.append(
                TrainingSample(
                    id=TrajectoryId(prompt_id=f"p{group_id}", group_id=group_id, sample=sample),
                    token_ids=token_array(prompt + completion),
                    loss_mask=b"\0" * len(prompt) + b"\1" * count,
                    behavior_logprobs=float_array([0.0] * len(prompt) + [-3.0 - 2 * rng.random() for _ in completion]),
                    reward=rewards[group_id][sample] if rewards else float(rng.randint(0, 3)),
                    oldest_version=version,
                    newest_version=version,
                )
            )
        groups.append(TrainingGroup(group_id=group_id, batch_id=batch_id, samples=tuple(samples)))
    return groups


def close_of(groups: list[TrainingGroup], policy_version: int, batches: int = 1) -> CloseBatch:
    """The order that closes a batch of exactly these groups."""
    return CloseBatch(
        batch_id=groups[0].batch_id,
        policy_version=policy_version,
        groups=len(groups),
        samples=sum(len(group.samples) for group in groups),
        trained_tokens=sum(sample.trained_tokens for group in groups for sample in group.samples),
        batches=batches,
    )


def master_values(trainer: Any) -> dict[str, np.ndarray]:
    """A trainer's float32 masters as flat vectors, by tensor."""
    weights = trainer._updates.weights
    masters_L = weights.masters.full().cpu().numpy()
    return {shard.name: masters_L[shard.place] for shard in weights.master_shards}


def published_bits(trainer: Any) -> dict[str, np.ndarray]:
    """A copy of a trainer's published bits, by tensor."""
    return {name: bits.copy() for name, bits in trainer._updates.weights.bits().items()}


def train_batch(trainer: Any, groups: list[TrainingGroup], version: int, batches: int = 1) -> Any:
    """Train the groups as one batch, which becomes ``version``. Returns the report."""
    for group in groups:
        trainer.train_group(group)
    return trainer.close_batch(close_of(groups, version, batches))
