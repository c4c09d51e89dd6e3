"""The optimizer steps of one rank, with its models, its masters and its optimizer.

``trainer.TorchTrainer`` makes one ``Updates`` in each trainer rank, and calls it for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from time import perf_counter

import torch
from msgspec.structs import replace
from torch.distributed import get_world_size

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CloseBatch, ImitatedSet, SaveCheckpoint
from streamrl.base.types import Metrics, TrainingGroup
from streamrl.learning import process_group
from streamrl.learning.batches.gradients import BatchSums, ScoredRow, accumulate
from streamrl.learning.batches.packing import PreparedSample, packed_rows
from streamrl.learning.batches.preparation import (
    OpenBatch,
    prepare_group,
    split_for_updates,
    token_moments,
    whitened,
    worth_training,
)
from streamrl.learning.batches.scoring import row_logprobs, score_samples
from streamrl.learning.model.loading import load_models
from streamrl.learning.model.policy import (
    PackedPolicy,
    compute_context,
    drop_unreduced_gradients,
    empty_micro_batch,
    set_gradient_sync,
    set_sharded,
)
from streamrl.learning.objective.advantages import Moments
from streamrl.learning.objective.objectives import loss_denominator
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.durable_files import surviving_directory
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import FullWeights, PublishedWeights, global_norm
from streamrl.learning.state.tensor_meaning import other_meanings
from streamrl.learning.step_metrics import expert_metrics, update_lengths
from streamrl.recipe.schedules.schedule import rate_factor
from streamrl.recipe.sections import OptimizerKind


class Updates:
    """State and work of the optimizer steps of one rank. Its constructor is a collective, and raises ``StreamRLError``.

    ``by_layer``: whether FSDP2 gathers the parameters of a layer when the layer runs, so that every forward is a
    collective, and all ranks must run equally many rows;
    ``row_tokens``: tokens of a packed row."""

    def __init__(self, options: TrainerOptions, device: torch.device) -> None:
        self.policy, self.reference, self.critic, self.by_layer = load_models(options, device)
        self.weights = make_weights(options, self.policy)
        options = replace(options, parameters=self.weights.total_elements)
        self._options = options
        self._device = device
        self.row_tokens = options.row_tokens(device.type, options.parameters)
        self.optimizer = MasterOptimizer(options, self.weights.masters, self.weights.decayed_places)
        self.policy_version = 0
        self.skipped_steps = 0
        # Moments of the ``cohort_batches`` - 1 batches before the open one: REINFORCE++ whitens over all of them.
        self.cohort: deque[Moments] = deque(maxlen=max(1, options.objective.cohort_batches) - 1)
        if options.resume_from:
            self._load(Path(options.resume_from))
        self.open_gradients()

    def open_gradients(self) -> None:
        """Set gradients to 0 before the first row of a step."""
        self.weights.clear_gradient()
        if self.critic is not None:
            self.critic.clear_gradient()
        if self.by_layer:
            return
        # While a batch is open ranks run different numbers of rows, so no row may be a collective: parameters are
        # gathered here, once, and gradients are reduced by one backward with gradient sync in ``_step``.
        set_sharded(self.policy, False)
        set_gradient_sync(self.policy, False)
        drop_unreduced_gradients(self.policy)

    def train_waiting(self, batch: OpenBatch) -> None:
        """Run forward and backward of all waiting groups. Gradients stay un-normalised, and nothing else changes.
        Collective with ``by_layer``."""
        started = perf_counter()
        self._accumulate(self._prepare(batch.take_waiting(), proximal=False), batch)
        batch.sums.seconds += perf_counter() - started

    def finish(self, batch: OpenBatch, close: CloseBatch) -> Metrics:
        """Train the waiting groups and take the optimizer steps of a batch. Returns metrics. Collective.

        Each of ``epochs_per_batch`` passes takes ``updates_per_batch`` steps, each on its share of the batch. All steps
        use the logprobs and the values from before the first one.

        Raises ``StreamRLError`` when the gradient is not finite."""
        updates = self._options.updates_per_batch
        number_of_steps = updates * self._options.epochs_per_batch
        started = perf_counter()
        sums = batch.sums
        prepared = self._prepare(batch.take_waiting(), proximal=number_of_steps > 1)
        sums.seconds += perf_counter() - started
        # Every token of the batch has the same weight in each of the updates. Tokens are counted when a group arrives.
        loss_tokens = sums.loss_tokens / updates
        samples = sums.samples / updates
        shares = [prepared]
        lengths: Metrics = {}
        if updates > 1:
            shares = split_for_updates(prepared, self._options)
            lengths = update_lengths(shares[0], shares[-1], self._sum)
        metrics_of_steps = []
        optimizing = 0.0
        computed = 0.0
        for update in range(number_of_steps):
            started = perf_counter()
            self._accumulate(shares[update % updates], batch)
            for rows in close.imitated:
                self._imitate(rows, update % updates, batch, self._denominator(loss_tokens, samples))
            trained = perf_counter()
            computed_before = computed
            computed = sums.tokens.computed_tokens + sums.tokens.imitated_tokens + batch.imitation.imitated_tokens
            metrics_of_steps.append(self._step(batch, close, loss_tokens, samples, computed - computed_before))
            if update < number_of_steps - 1:
                self.open_gradients()
            sums.seconds += trained - started
            optimizing += perf_counter() - trained
        self.policy_version = close.policy_version
        first_step = metrics_of_steps[0]
        means = {name: sum(metrics[name] for metrics in metrics_of_steps) / number_of_steps for name in first_step}
        totals = {"time/optim_s": optimizing, "optim/skipped_steps_total": float(self.skipped_steps)}
        if self._options.objective.estimator.tracks_prompts:
            totals["policy/step_change"] = self._step_change(sums.first_row)
        if close.imitated:
            totals |= self._imitation_metrics(batch)
        return means | lengths | totals | expert_metrics(self.policy, sums.tokens.unreplayed_tokens, self._options)

    def _prepare(self, groups: Sequence[TrainingGroup], *, proximal: bool) -> list[PreparedSample]:
        """Samples of ``groups`` that are worth training, with their advantages. Collective where advantages depend on
        the whole batch."""
        options = self._options
        scores = score_samples(
            [sample for group in groups for sample in group.samples],
            self.policy,
            options,
            self._device,
            reference=self.reference if options.objective.scores_by_reference else None,
            critic=self.critic,
            proximal=proximal,
            together=self.by_layer,
        )
        prepared = [item for group in groups for item in prepare_group(group, scores, options)]
        if options.objective.estimator.whole_batch:
            moments = Moments(*self._sum(list(token_moments(prepared))))
            cohort_moments = Moments(*map(sum, zip(moments, *self.cohort, strict=True)))
            if options.objective.estimator.of_cohort:
                self.cohort.append(moments)
            prepared = whitened(prepared, cohort_moments)
        return [item for item in prepared if worth_training(item, options)]

    @torch.no_grad()
    def _step_change(self, first_row: ScoredRow | None) -> float:
        """Return by how much the steps on a batch have changed the logprob of a token: the mean over one row of each
        rank. ``first_row``: row that was scored before the steps (None: this rank had none). Collective."""
        row = empty_micro_batch(self._device)
        before_N = row.inputs.behavior_N
        if first_row is not None:
            row, before_N = first_row
        with compute_context(self._options, self._device):
            after_N = row_logprobs(self.policy, self.policy(row), row, self._options)
        set_sharded(self.policy, True)
        change = float((after_N - before_N).abs().double().sum())
        copies = self._options.tensor_parallel_size
        total, tokens = process_group.all_reduce([change, float(before_N.numel())], self._device, copies=copies)
        return total / max(tokens, 1.0)

    def _sum(self, values: list[float]) -> list[float]:
        """Sums of ``values`` over the ranks; tensor and context parallel ranks, which have the same rows, count once.
        Collective."""
        return process_group.all_reduce(values, self._device, copies=self._options.ranks_per_group)

    def _imitate(self, rows: ImitatedSet, update: int, batch: OpenBatch, denominator: float) -> None:
        """Add the gradient of one set's share of an update: ``rows.weight`` times the mean cross-entropy of its
        imitated tokens in the step. Collective with ``by_layer``.

        ``denominator``: divisor of the loss of the update, by which the step divides these rows, too."""
        options = self._options
        updates = options.updates_per_batch
        tokens = sum(sample.imitated_tokens for sample in rows.samples) / updates
        weight = rows.weight * denominator / max(1.0, tokens)
        of_update = rows.samples[update::updates]
        of_rank = of_update[options.rank // options.ranks_per_group :: options.ranks // options.ranks_per_group]
        sums = BatchSums()
        self._accumulate([PreparedSample(sample, imitation=weight) for sample in of_rank], batch, imitation=sums)
        batch.sums.tokens.loss += sums.tokens.loss
        batch.sums.tokens.packed_tokens += sums.tokens.packed_tokens
        batch.imitation.imitated_tokens += sums.tokens.imitated_tokens
        batch.imitation.imitation += sums.tokens.imitation

    def _imitation_metrics(self, batch: OpenBatch) -> Metrics:
        """Metrics of the imitated rows, over all passes and ranks. Collective."""
        values = [batch.imitation.imitated_tokens, batch.imitation.imitation]
        tokens, loss = process_group.all_reduce(values, self._device, copies=self._options.tensor_parallel_size)
        return {"imitation/tokens": tokens, "imitation/loss": loss / max(1.0, tokens)}

    def _denominator(self, loss_tokens: float, samples: float) -> float:
        """Divisor of the loss of an update. Collective. ``loss_tokens``, ``samples``: counts of this rank."""
        tokens, all_samples = self._sum([loss_tokens, samples])
        return loss_denominator(
            self._options.objective.loss_normalization,
            samples=all_samples,
            trained_tokens=tokens,
            max_tokens=self._options.max_tokens,
        )

    def _accumulate(
        self, samples: Sequence[PreparedSample], batch: OpenBatch, imitation: BatchSums | None = None
    ) -> None:
        """Run forward and backward of ``samples``. ``imitation``: sums of rows that are imitated, without critic and
        teacher (None: they are of trajectories)."""
        rows = packed_rows(
            samples,
            self._options,
            self.policy_version,
            self._device,
            together=self.by_layer,
            context=self.policy.context,
        )
        teacher = None
        if self._options.objective.exact_divergence and imitation is None:
            teacher = self.reference
        for row in rows:
            critic = self.critic if imitation is None else None
            sums = imitation or batch.sums
            if not row.sample_ids:
                # A row without samples only takes part in collectives.
                critic = None
                sums = BatchSums()
            accumulate(self.policy, critic, row, self._options, sums, batch.batch_id or 0, teacher)
        if self.by_layer:
            set_sharded(teacher, True)

    def _step(
        self, batch: OpenBatch, close: CloseBatch, loss_tokens: float, samples: float, computed: float
    ) -> Metrics:
        """Reduce the gradients of all ranks, divide, clip, step. Returns metrics. Collective.

        ``loss_tokens``, ``samples``: counts of this rank by which the loss is normalised;
        ``computed``: tokens of this rank that had a forward and a backward in this step."""
        options = self._options
        if options.ranks > 1 and not self.by_layer:
            # One synced backward of an empty row reduces the gradients that every rank added up.
            set_gradient_sync(self.policy, True)
            accumulate(self.policy, None, empty_micro_batch(self._device), options, BatchSums(), 0)
        set_sharded(self.policy, True)
        [computed] = self._sum([computed])
        denominator = self._denominator(loss_tokens, samples)
        gradient_L = self.weights.collect_gradient()
        # FSDP2 averages over the ranks that have different rows: this factor makes a sum of the mean.
        mean_of_ranks = get_world_size() // options.tensor_parallel_size
        norm = global_norm(gradient_L, self.weights.counted_places) * mean_of_ranks / denominator
        value_norm = self.critic.reduce() / denominator if self.critic else 0.0
        if not isfinite(norm + value_norm):
            names = ", ".join(batch.sample_ids[:8])
            raise StreamRLError(
                f"the gradient norm of batch {close.batch_id} is {norm}; samples of rank {options.rank}: {names} "
                f"({len(batch.sample_ids)} in all); lower training.learning_rate if policy/kl_rollout grew before"
            )
        rate = options.learning_rate if close.learning_rate is None else close.learning_rate
        rate *= rate_factor(options, close.policy_version, close.steps or options.steps)
        if computed > 0:
            clip = min(1.0, options.max_grad_norm / (norm + 1e-6)) / denominator
            gradient_L.mul_(mean_of_ranks * clip)
            # Several batches that are closed at once take as many steps along their mean gradient.
            for _ in range(close.batches):
                self.optimizer.step(gradient_L, rate)
            if self.critic is not None:
                self.critic.step(min(1.0, options.max_grad_norm / (value_norm + 1e-6)) / denominator, close.batches)
            self.weights.refresh_forward()
        else:
            # No group had a signal: a step would only move along old momentum.
            self.skipped_steps += 1
        return {"optim/grad_norm": norm, "optim/lr": rate}

    def _load(self, directory: Path) -> None:
        from streamrl.learning.state import checkpoint  # 3 MiB of imports that few runs need before their first save

        extra = self.critic.tensors() if self.critic else None
        if problems := list(
            other_meanings(surviving_directory(directory), self._options.lora, self._options.model_path)
        ):
            raise StreamRLError("\n".join(problems))
        state = checkpoint.load(directory, self.weights, self.optimizer, extra=extra)
        self.policy_version = state.policy_version
        self.skipped_steps = state.skipped_steps
        self.cohort.extend(Moments(*moments) for moments in state.cohort)
        self.weights.refresh_forward()

    def save(self, order: SaveCheckpoint) -> None:
        """Write ``order.directory``. Collective; between batches. Raises ``StreamRLError``."""
        from streamrl.learning.state import checkpoint

        checkpoint.save(
            Path(order.directory),
            self.weights,
            self.optimizer,
            state=checkpoint.TrainerState(
                policy_version=self.policy_version,
                cohort=tuple((moments.number, moments.total, moments.square) for moments in self.cohort),
                skipped_steps=self.skipped_steps,
            ),
            model_path=Path(self._options.model_path),
            extra=self.critic.tensors() if self.critic else None,
            min_free_bytes=order.min_free_bytes,
            sidecar_digests=order.sidecar_digests,
        )


def make_weights(options: TrainerOptions, policy: PackedPolicy) -> PublishedWeights:
    """Make the weights that ``options`` train: all weights of the policy, or adapters. The policy must be loaded, and
    sharded where it will be.

    Collective. Raises ``StreamRLError`` for targets of an adapter that the model does not have, and for adapters whose
    masters should be in CPU memory."""
    on_cpu = options.optimizer is OptimizerKind.ADAMW_OFFLOADED
    if options.lora.rank:
        if on_cpu:
            raise StreamRLError(
                f'training.optimizer is "{options.optimizer}" with lora.rank {options.lora.rank}: masters and moments '
                'of adapters are small and stay on the device; set it to "adamw"'
            )
        # Imported only where it is needed: peft takes more than a second to import.
        from streamrl.learning.state.lora import AdapterWeights
        from streamrl.learning.state.unmerged import UnmergedAdapters

        adapter_weights = UnmergedAdapters if options.lora.syncs_adapter else AdapterWeights
        return adapter_weights(options, policy)
    weights = FullWeights(
        policy.trained_parameters(), policy.entries, policy.float32_parameters(), masters_on_cpu=on_cpu
    )
    weights.reduce_over(policy.tensor_group, policy.partial_gradients)
    return weights
