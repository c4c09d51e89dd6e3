"""``TorchTrainer``: one rank. Groups in, one optimizer step and one published version out.

All methods are synchronous and called from one thread. A batch is open from its first group to ``close_batch``. While
it is open, groups without signal are only counted; the others wait until a few rows of ``micro_batch_tokens`` are
pending (or ``train_pending`` is called), then run forward and backward, adding up un-normalised gradients. The close
divides once, which makes the gradient that of the whole batch.

With ``streaming`` the rows depend on when groups arrive, so weights repeat to rounding only; without it all work
is done at the close, in canonical order, and the same groups give the same bits.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from streamrl.comm.weights.manifest import ShardSpec
from streamrl.comm.weights.publisher import Published, WeightPublisher
from streamrl.comm.weights.state_hash import MODULUS, hash_range
from streamrl.errors import StreamRLError
from streamrl.learning import checkpoint, process_group
from streamrl.learning.advantages import group_advantages
from streamrl.learning.gradients import BatchSums, accumulate
from streamrl.learning.losses import loss_denominator, token_weight
from streamrl.learning.options import TrainerOptions
from streamrl.learning.options import trainer_options as trainer_options
from streamrl.learning.packing import WeightedSample, empty_micro_batch, pack, plan_micro_batches
from streamrl.learning.policy import load_policy, set_gradient_sync, set_sharded, shard
from streamrl.learning.published_weights import PublishedWeights, global_norm
from streamrl.learning.step_metrics import policy_metrics, publishing_metrics
from streamrl.messages import AnchorPublished, CheckpointSaved, CloseBatch, SaveCheckpoint, StepReport, TrainerReady
from streamrl.tokenizer import load_tokenizer
from streamrl.types import TrainingGroup

STREAMED_ROWS = 2
"""Rows that must be pending before they are trained while more groups are ready: sorted together they run faster."""


class TorchTrainer:
    """One trainer rank: masters in float32, forward on the published bfloat16 bits, AdamW, GRPO."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self._device = process_group.choose_device(options)
        self._policy_version = 0
        self._published_once = False
        self._skipped_steps = 0
        self._batch_id: int | None = None
        self._sums = BatchSums()
        self._pending: list[WeightedSample] = []
        self._pending_tokens = 0
        self._sample_ids: list[str] = []

    @property
    def policy_version(self) -> int:
        """The version that the model holds."""
        return self._policy_version

    @property
    def idle_work(self) -> bool:
        """Whether a part row is worth training while no order waits. Small rows are slow: a quarter of one at least."""
        return self._options.streaming and 4 * self._pending_tokens >= self._options.micro_batch_tokens

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> TrainerReady:
        """Meet the other ranks, load the model, start to serve weights. Publishes nothing. Raises ``StreamRLError``."""
        options = self._options
        process_group.use_threads(options.threads)
        process_group.join(options, self._device)
        self._policy = load_policy(options.model_path, self._device)
        parameters = self._policy.checkpoint_parameters()
        if options.ranks > 1:
            shard(self._policy, process_group.mesh(self._device))
            parameters = self._policy.checkpoint_parameters()
        self._weights = PublishedWeights(parameters)
        self._optimizer = torch.optim.AdamW(
            [self._weights.masters_L],
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._weights.masters_L.grad = self._weights.gradient_L
        if options.resume_from:
            self._policy_version = checkpoint.load(Path(options.resume_from), self._weights, self._optimizer)
            self._weights.refresh_forward()
        self._open_batch()
        self._publisher = WeightPublisher(
            options.weights_endpoint, run_id=options.run_id, rank=options.rank, shards=self._weights.shard_specs
        )
        self._publisher.start()
        return TrainerReady(
            rank=options.rank,
            ranks=options.ranks,
            policy_version=self._policy_version,
            parameters=self._weights.total_elements,
            state_hash=self._state_hash(),
            tokenizer_digest=load_tokenizer(options.model_path).digest,
        )

    def close(self) -> None:
        """Stop serving weights, free the model, leave the process group. Idempotent; safe when ``start`` failed."""
        if hasattr(self, "_publisher"):
            self._publisher.close()
        for name in ("_optimizer", "_weights", "_policy"):
            if hasattr(self, name):
                delattr(self, name)
        process_group.leave()

    def _state_hash(self) -> int:
        bits = self._weights.bits()
        return sum(hash_range(s.name, s.offset, bits[s.name]) for s in self._weights.shards) % MODULUS

    def _open_batch(self) -> None:
        self._weights.clear_gradient()
        self._sums = BatchSums()
        self._batch_id = None
        self._pending, self._pending_tokens, self._sample_ids = [], 0, []
        # While a batch is open ranks run different numbers of rows, so no row may be a collective: parameters are
        # gathered here, once, and gradients are reduced by the one synced backward of the close.
        set_sharded(self._policy, False)
        set_gradient_sync(self._policy, False)

    # ---- a batch ---------------------------------------------------------------------------------

    def train_group(self, group: TrainingGroup) -> None:
        """Take a group into the open batch; when streaming, train what is pending once it fills a row."""
        if self._batch_id is None:
            self._batch_id = group.batch_id
        if group.batch_id != self._batch_id:
            raise StreamRLError(
                f"group {group.group_id} is of batch {group.batch_id} while batch {self._batch_id} is open"
            )
        options, sums = self._options, self._sums
        sums.groups += 1
        sums.samples += len(group.samples)
        sums.trained_tokens += sum(sample.trained_tokens for sample in group.samples)
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        advantages = group_advantages(rewards, options.advantage_normalization).tolist()
        if not any(advantages):
            sums.groups_without_signal += 1
            return
        for sample, advantage in zip(group.samples, advantages, strict=True):
            self._sample_ids.append(str(sample.id))
            if advantage and sample.trained_tokens:
                weight = token_weight(options.loss_normalization, sample.trained_tokens)
                self._pending.append(WeightedSample(sample, advantage, weight))
                self._pending_tokens += len(sample.token_ids)
        if options.streaming and self._pending_tokens >= STREAMED_ROWS * options.micro_batch_tokens:
            self.train_pending()

    def train_pending(self) -> None:
        """Forward and backward of everything that waits. Nothing else changes: gradients stay un-normalised."""
        if not self._pending:
            return
        started = time.perf_counter()
        for planned in plan_micro_batches(self._pending, self._options.micro_batch_tokens):
            row = pack(planned, self._policy_version, self._device)
            accumulate(self._policy, row, self._options, self._sums, self._batch_id or 0)
        self._pending, self._pending_tokens = [], 0
        self._sums.seconds += time.perf_counter() - started

    def close_batch(self, close: CloseBatch) -> StepReport:
        """Finish the batch: reduce, divide, clip, step, publish ``close.policy_version``. Collective.

        Raises ``StreamRLError`` when groups are missing or the gradient is not finite.
        """
        if close.policy_version != self._policy_version + 1 or self._batch_id not in (None, close.batch_id):
            raise StreamRLError(
                f"close of batch {close.batch_id} as version {close.policy_version}, "
                f"but batch {self._batch_id} is open at version {self._policy_version}"
            )
        self.train_pending()
        metrics, trained = policy_metrics(self._sums, self._options, close, self._device)
        started = time.perf_counter()
        self._reduce_gradient()
        metrics |= self._step(close, trained)
        metrics["time/optim_s"] = time.perf_counter() - started
        started = time.perf_counter()
        published = self._publish(close.policy_version)
        metrics["time/publish_s"] = time.perf_counter() - started
        metrics |= publishing_metrics(published.source, self._device)
        self._open_batch()
        return StepReport(
            rank=self._options.rank,
            batch_id=close.batch_id,
            policy_version=close.policy_version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            source=published.source,
            metrics=metrics,
        )

    def _reduce_gradient(self) -> None:
        """With several ranks: one synced backward of an empty row, which reduces what every rank added up."""
        if self._options.ranks > 1:
            set_gradient_sync(self._policy, True)
            accumulate(self._policy, empty_micro_batch(self._device), self._options, BatchSums(), 0)
            set_sharded(self._policy, True)

    def _step(self, close: CloseBatch, computed_tokens: float) -> dict[str, float]:
        options = self._options
        denominator = loss_denominator(
            options.loss_normalization,
            samples=close.samples,
            trained_tokens=close.trained_tokens,
            max_tokens=options.max_tokens,
        )
        gradient_L = self._weights.collect_gradient()
        scale = dist.get_world_size() / denominator  # FSDP2 averages over the ranks
        norm = global_norm(gradient_L) * scale
        if not math.isfinite(norm):
            names = ", ".join(self._sample_ids[:8])
            raise StreamRLError(
                f"the gradient norm of batch {close.batch_id} is {norm}; samples of rank {options.rank}: {names} "
                f"({len(self._sample_ids)} in all); lower training.learning_rate if policy/kl_rollout grew before"
            )
        warm_up = min(1.0, close.policy_version / options.warmup_steps) if options.warmup_steps else 1.0
        rate = options.learning_rate * warm_up
        if computed_tokens > 0:
            gradient_L.mul_(scale * min(1.0, options.max_grad_norm / (norm + 1e-6)))
            self._optimizer.param_groups[0]["lr"] = rate
            self._optimizer.step()
            self._weights.refresh_forward()
        else:
            # No group had a signal: a step would only move along old momentum.
            self._skipped_steps += 1
        self._policy_version = close.policy_version
        return {"optim/grad_norm": norm, "optim/lr": rate, "optim/skipped_steps_total": float(self._skipped_steps)}

    # ---- weights and checkpoints -----------------------------------------------------------------

    def _publish(self, policy_version: int) -> Published:
        self._published_once = True
        return self._publisher.publish(policy_version, self._weights.bits())

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        """Publish the current version complete. Raises ``StreamRLError`` for another version."""
        if policy_version != self._policy_version:
            raise StreamRLError(
                f"anchor of version {policy_version} was asked for; the trainer holds {self._policy_version}"
            )
        if self._published_once:
            published = self._publisher.publish_anchor(policy_version)
        else:
            published = self._publish(policy_version)
        return AnchorPublished(
            rank=self._options.rank,
            policy_version=policy_version,
            state_hash=published.state_hash,
            source=published.source,
        )

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds this version: later deltas may be made against it."""
        self._publisher.acknowledge(policy_version)

    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        """Write ``order.directory``: trainer state and a Hugging Face directory ``hf``. Collective; between batches."""
        started = time.perf_counter()
        checkpoint.save(
            Path(order.directory),
            self._weights,
            self._optimizer,
            policy_version=self._policy_version,
            model_path=Path(self._options.model_path),
        )
        return CheckpointSaved(
            rank=self._options.rank,
            directory=order.directory,
            policy_version=self._policy_version,
            seconds=time.perf_counter() - started,
        )

    @property
    def shard_specs(self) -> list[ShardSpec]:
        """What this rank serves."""
        return self._weights.shard_specs

    def master_values(self) -> dict[str, np.ndarray]:
        """This rank's float32 masters as flat vectors, by tensor, for audits and tests."""
        masters_L = self._weights.masters_L.detach().cpu().numpy()
        return {shard.name: masters_L[shard.place] for shard in self._weights.shards}

    def published_bits(self) -> dict[str, np.ndarray]:
        """This rank's published bits, by tensor, for audits and tests."""
        return self._weights.bits()
