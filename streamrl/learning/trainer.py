"""``TorchTrainer``: one rank. Groups in, optimizer steps and one published version out.

All methods are synchronous and called from one thread. A batch is open from its first group to ``close_batch``. While
it is open, groups without signal are only counted; the others wait until a few rows of ``micro_batch_tokens`` are
pending (or ``train_pending`` is called), then run forward and backward, adding up un-normalised gradients. The close
divides once, which makes the gradient that of the whole batch. Where that cannot be exact
(``algorithms.why_not_streaming``), everything waits for the close.

With ``streaming`` the rows depend on when groups arrive, so weights repeat to rounding only; without it all work
is done at the close, in canonical order, and the same groups give the same bits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch.distributed as dist

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
)
from streamrl.base.types import TrainingGroup
from streamrl.learning import process_group
from streamrl.learning.batches.gradients import BatchSums, accumulate
from streamrl.learning.batches.packing import PreparedSample, empty_micro_batch, packed_rows
from streamrl.learning.batches.preparation import (
    OpenBatch,
    prepare_group,
    token_moments,
    whitened,
    worth_training,
)
from streamrl.learning.batches.scoring import probe_logprobs, score_samples
from streamrl.learning.model.loading import load_models
from streamrl.learning.model.policy import drop_unreduced_gradients, set_gradient_sync, set_sharded
from streamrl.learning.objective.advantages import Moments
from streamrl.learning.objective.objectives import loss_denominator
from streamrl.learning.options import TrainerOptions
from streamrl.learning.options import trainer_options as trainer_options
from streamrl.learning.state.host_memory import return_freed_memory
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import global_norm, make_weights
from streamrl.learning.state.publishing import publish, start_publisher
from streamrl.learning.step_metrics import check_totals, policy_metrics, publishing_metrics
from streamrl.prompts.tokenizer import tokenizer_digest
from streamrl.recipe.algorithms import WHOLE_BATCH
from streamrl.recipe.objective import AdvantageKind
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import MODULUS, ShardSpec
from streamrl.weights.publish.publisher import Published

STREAMED_ROWS = 2
"""Rows that must be pending before they are trained while more groups are ready: sorted together they run faster."""


class TorchTrainer:
    """One trainer rank: masters in float32, forward on the published bfloat16 bits."""

    def __init__(self, options: TrainerOptions) -> None:
        self._options = options
        self._device = process_group.choose_device(options)
        self._policy_version = self._skipped_steps = 0
        self._published: Published | None = None
        self._anchors_asked = False
        # The batch before this one and so on: with the open one they are the cohort.
        self._cohort: deque[Moments] = deque(maxlen=max(1, options.objective.cohort_batches) - 1)
        self._threads = options.threads
        self._enough_tokens = STREAMED_ROWS * options.micro_batch_tokens

    @property
    def policy_version(self) -> int:
        """The version that the model holds."""
        return self._policy_version

    @property
    def idle_work(self) -> bool:
        """Whether a part row is worth training while no order waits. Small rows are slow: a quarter of one at least."""
        alone = self._options.streaming and not self._by_layer
        return alone and 4 * self._batch.waiting_tokens >= self._options.micro_batch_tokens

    # ---- life ------------------------------------------------------------------------------------

    @process_group.needs_peers("starting")
    def start(self) -> TrainerReady:
        """Meet the other ranks, load the model, start to serve weights. Publishes nothing. Raises ``StreamRLError``."""
        options = self._options
        return_freed_memory()
        process_group.use_threads(options.threads)
        process_group.join(options, self._device)
        self._policy, self._reference, self._critic, self._by_layer = load_models(options, self._device)
        self._together_tokens = options.ranks * self._enough_tokens if self._by_layer and options.streaming else 0
        self._weights = make_weights(options, self._policy)
        self._optimizer = MasterOptimizer(options, self._weights.masters, self._weights.decayed)
        if options.resume_from:
            self._resume(Path(options.resume_from))
        self._publisher = start_publisher(options, self._weights)
        self._open_batch()
        return TrainerReady(
            rank=self._options.rank,
            ranks=self._options.ranks,
            policy_version=self._policy_version,
            parameters=self._weights.total_elements,
            state_hash=self._state_hash(),
            tokenizer_digest=tokenizer_digest(self._options.model_path),
            trained_parameters=self._weights.adapter_elements,
            together_tokens=self._together_tokens,
        )

    def _resume(self, directory: Path) -> None:
        from streamrl.learning.state import checkpoint  # 3 MiB of imports that few runs need before their first save

        extra = self._critic.tensors() if self._critic else None
        state = checkpoint.load(directory, self._weights, self._optimizer, extra=extra)
        self._policy_version, self._skipped_steps = state.policy_version, state.skipped_steps
        self._cohort.extend(Moments(*moments) for moments in state.cohort)
        self._weights.refresh_forward()

    def close(self) -> None:
        """Stop serving weights, free the model, leave the process group. Idempotent; safe when ``start`` failed."""
        if hasattr(self, "_publisher"):
            self._publisher.close()
        for name in ("_optimizer", "_weights", "_policy", "_reference", "_critic"):
            if hasattr(self, name):
                delattr(self, name)
        process_group.leave()

    def _state_hash(self) -> int:
        bits = self._weights.bits()
        return sum(hash_range(s.name, s.offset, bits[s.name]) for s in self._weights.shards) % MODULUS

    def _open_batch(self) -> None:
        self._batch = OpenBatch(self._options)
        self._open_gradients()
        self._probed: tuple[float, ...] = ()

    def _open_gradients(self) -> None:
        self._weights.clear_gradient()
        if self._critic is not None:
            self._critic.clear_gradient()
        if self._by_layer:
            return
        # While a batch is open ranks run different numbers of rows, so no row may be a collective: parameters are
        # gathered here, once, and gradients are reduced by the one synced backward of the close.
        set_sharded(self._policy, False)
        set_gradient_sync(self._policy, False)
        drop_unreduced_gradients(self._policy)

    def engines_freed(self, count: int) -> None:
        """``count`` engines of the host do nothing until the next round: their cores are for training."""
        self._threads = self._options.threads_while(count)
        process_group.use_threads(self._threads)

    # ---- a batch ---------------------------------------------------------------------------------

    def train_group(self, group: TrainingGroup) -> None:
        """Take a group into the open batch; when streaming, train what is waiting once it fills a row."""
        options, batch = self._options, self._batch
        batch.take(group)
        if self._by_layer:
            return  # ranks wait for TrainTogether
        self._probe()
        if options.streaming and batch.waiting_tokens >= self._enough_tokens:
            self.train_pending()

    def _probe(self) -> None:
        # While engines sample: doing it at the close of the batch would delay the engines.
        if self._options.canary and not self._probed:
            self._probed = probe_logprobs(self._policy, self._options)

    @process_group.needs_peers("training what waited")
    def train_pending(self) -> None:
        """Forward and backward of everything that waits. Nothing else changes: gradients stay un-normalised.
        Collective where parameters are gathered by layer."""
        started = time.perf_counter()
        if self._by_layer:
            self._probe()
        self._accumulate(self._prepare(self._batch.take_waiting(), proximal=False))
        self._batch.sums.seconds += time.perf_counter() - started

    def _prepare(self, groups: Sequence[TrainingGroup], *, proximal: bool) -> list[PreparedSample]:
        """Samples of ``groups`` worth training, with their advantages. Collective for ``WHOLE_BATCH`` kinds."""
        options = self._options
        scores = score_samples(
            [sample for group in groups for sample in group.samples],
            self._policy,
            options,
            self._device,
            reference=self._reference,
            critic=self._critic,
            proximal=proximal,
            together=self._by_layer,
        )
        prepared = [item for group in groups for item in prepare_group(group, scores, options)]
        if options.objective.advantages in WHOLE_BATCH:
            moments = Moments(*process_group.all_reduce(list(token_moments(prepared)), self._device))
            seen = Moments(*map(sum, zip(moments, *self._cohort, strict=True)))
            if options.objective.advantages is AdvantageKind.COHORT:
                self._cohort.append(moments)
            prepared = whitened(prepared, seen)
        return [item for item in prepared if worth_training(item, options)]

    def _accumulate(self, samples: Sequence[PreparedSample]) -> None:
        tokens, version = self._options.micro_batch_tokens, self._policy_version
        for row in packed_rows(samples, tokens, version, self._device, together=self._by_layer):
            critic, sums = (self._critic, self._batch.sums) if row.sample_ids else (None, BatchSums())
            accumulate(self._policy, critic, row, self._options, sums, self._batch.batch_id or 0)

    @process_group.needs_peers("closing a batch")
    def close_batch(self, close: CloseBatch) -> StepReport:
        """Finish the batch: reduce, divide, clip, step, publish ``close.policy_version``. Collective.

        Raises ``StreamRLError`` when groups are missing or the gradient is not finite.
        """
        if close.policy_version != self._policy_version + 1 or self._batch.batch_id not in (None, close.batch_id):
            raise StreamRLError(
                f"close of batch {close.batch_id} as version {close.policy_version}, "
                f"but batch {self._batch.batch_id} is open at version {self._policy_version}"
            )
        check_totals(self._batch.sums, close, self._device)
        process_group.use_threads((self._options.idle_threads if close.engines_idle else 0) or self._threads)
        if self._options.updates_per_batch > 1:
            stepped = self._update_several_times(close)
        else:
            self.train_pending()
            sums = self._batch.sums
            started = time.perf_counter()
            stepped = self._step(close, sums.loss_tokens, sums.samples, sums.tokens.computed_tokens)
            stepped["time/optim_s"] = time.perf_counter() - started
        metrics = policy_metrics(self._batch.sums, self._options, self._device) | stepped
        metrics["optim/skipped_steps_total"] = float(self._skipped_steps)
        self._policy_version = close.policy_version
        started = time.perf_counter()
        published = self._publish(close.policy_version)
        metrics["time/publish_s"] = time.perf_counter() - started
        metrics |= publishing_metrics(published.source, self._device)
        process_group.use_threads(self._threads)
        probed = self._probed
        self._open_batch()
        return StepReport(
            rank=self._options.rank,
            batch_id=close.batch_id,
            policy_version=close.policy_version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            source=published.source,
            metrics=metrics,
            probe_logprobs=probed,
        )

    def _update_several_times(self, close: CloseBatch) -> dict[str, float]:
        """``updates_per_batch`` steps, each on its share of the batch, all against the logprobs before the first."""
        updates = self._options.updates_per_batch
        started = time.perf_counter()
        sums = self._batch.sums
        prepared = self._prepare(self._batch.take_waiting(), proximal=True)
        sums.seconds += time.perf_counter() - started
        # Every token of the batch weighs the same, in whichever update it is.
        loss_tokens, samples = sums.loss_tokens / updates, sums.samples / updates
        # Numbered over all ranks: if each began with 0, the first update would have the first group of every rank.
        groups = sorted({item.sample.id.group_id for item in prepared})
        first = process_group.count_before(len(groups), self._device)
        order = {group: index for index, group in enumerate(groups, first)}
        steps, optimizing = [], 0.0
        for update in range(updates):
            share = [item for item in prepared if order[item.sample.id.group_id] % updates == update]
            started = time.perf_counter()
            self._accumulate(share)
            trained = time.perf_counter()
            computed = sum(item.sample.trained_tokens for item in share)
            steps.append(self._step(close, loss_tokens, samples, computed))
            if update < updates - 1:
                self._open_gradients()
            sums.seconds += trained - started
            optimizing += time.perf_counter() - trained
        means = {name: sum(step[name] for step in steps) / updates for name in steps[0]}
        return means | {"time/optim_s": optimizing}

    def _step(self, close: CloseBatch, loss_tokens: float, samples: float, computed: float) -> dict[str, float]:
        """Reduce the gradients of all ranks, divide, clip, step. The counts are this rank's. Collective."""
        options = self._options
        if options.ranks > 1 and not self._by_layer:
            # One synced backward of an empty row reduces what every rank added up.
            set_gradient_sync(self._policy, True)
            accumulate(self._policy, None, empty_micro_batch(self._device), options, BatchSums(), 0)
        set_sharded(self._policy, True)
        tokens, samples, computed = process_group.all_reduce([loss_tokens, samples, computed], self._device)
        denominator = loss_denominator(
            options.objective.loss_normalization,
            samples=samples,
            trained_tokens=tokens,
            max_tokens=options.max_tokens,
        )
        gradient_L = self._weights.collect_gradient()
        mean_of_ranks = dist.get_world_size()  # FSDP2 averages over the ranks
        norm = global_norm(gradient_L) * mean_of_ranks / denominator
        value_norm = self._critic.reduce() / denominator if self._critic else 0.0
        if not math.isfinite(norm + value_norm):
            names = ", ".join(self._batch.sample_ids[:8])
            raise StreamRLError(
                f"the gradient norm of batch {close.batch_id} is {norm}; samples of rank {options.rank}: {names} "
                f"({len(self._batch.sample_ids)} in all); lower training.learning_rate if policy/kl_rollout grew before"
            )
        rate = options.learning_rate * min(1.0, close.policy_version / max(options.warmup_steps, 1))
        if computed > 0:
            clip = min(1.0, options.max_grad_norm / (norm + 1e-6)) / denominator
            gradient_L.mul_(mean_of_ranks * clip)
            for _ in range(batches := options.batches_in(close.samples)):
                self._optimizer.step(gradient_L, rate)
            if self._critic is not None:
                self._critic.step(min(1.0, options.max_grad_norm / (value_norm + 1e-6)) / denominator, batches)
            self._weights.refresh_forward()
        else:
            # No group had a signal: a step would only move along old momentum.
            self._skipped_steps += 1
        return {"optim/grad_norm": norm, "optim/lr": rate}

    # ---- weights and checkpoints -----------------------------------------------------------------

    def _publish(self, policy_version: int) -> Published:
        self._published = publish(self._publisher, policy_version, self._weights)
        return self._published

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        """Publish the current version complete; the first time as it is published, which may be a delta on the
        checkpoint that engines load. Raises ``StreamRLError`` for another version."""
        if policy_version != self._policy_version:
            raise StreamRLError(
                f"anchor of version {policy_version} was asked for; the trainer holds {self._policy_version}"
            )
        first, self._anchors_asked = not self._anchors_asked, True
        if first:
            published = self._published or self._publish(policy_version)
        else:
            published = self._publisher.publish_anchor(policy_version)
        return AnchorPublished(
            rank=self._options.rank,
            policy_version=policy_version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            source=published.source,
        )

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds this version: later deltas may be made against it."""
        self._publisher.acknowledge(policy_version)

    @process_group.needs_peers("saving a checkpoint")
    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        """Write ``order.directory``: trainer state and a Hugging Face directory ``hf``. Collective; between batches."""
        from streamrl.learning.state import checkpoint

        started = time.perf_counter()
        checkpoint.save(
            Path(order.directory),
            self._weights,
            self._optimizer,
            state=checkpoint.TrainerState(
                policy_version=self._policy_version,
                cohort=tuple((m.number, m.total, m.square) for m in self._cohort),
                skipped_steps=self._skipped_steps,
            ),
            model_path=Path(self._options.model_path),
            extra=self._critic.tensors() if self._critic else None,
            min_free_bytes=order.min_free_bytes,
            beside=order.beside,
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
        masters_L = self._weights.masters.whole().cpu().numpy()
        return {shard.name: masters_L[shard.place] for shard in self._weights.master_shards}

    def published_bits(self) -> dict[str, np.ndarray]:
        """A copy of this rank's published bits, by tensor, for audits and tests."""
        return {name: bits.copy() for name, bits in self._weights.bits().items()}
