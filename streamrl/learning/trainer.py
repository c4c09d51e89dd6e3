"""``TorchTrainer``, a trainer rank: it trains on groups, takes optimizer steps and publishes a version for each batch.

``stages.training`` calls it in each trainer process, by order of the controller; all methods are synchronous and called
from one thread. A batch is open from its first group to ``close_batch``. While it is open, groups without signal are
only counted. The other groups wait until a few rows of ``micro_batch_tokens`` are pending (or ``train_pending`` is
called), then run forward and backward, adding up un-normalised gradients. The close divides the sum once, which makes
it the gradient of the whole batch. Where this cannot be exact (``why_not_streaming``), all groups wait for the close.

With ``streaming`` the rows depend on when groups arrive, so weights repeat to rounding only. Without it all work is
done at the close, in canonical order, and the same groups give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch
from msgspec.structs import asdict

from streamrl.base.errors import ModelRefused, StreamBroken, StreamRLError
from streamrl.base.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    FirstProbe,
    Published,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
)
from streamrl.base.types import Metrics, TrainingGroup
from streamrl.contracts import Publisher
from streamrl.learning import process_group
from streamrl.learning.batches.preparation import OpenBatch
from streamrl.learning.batches.scoring import first_probe, probe_logprobs
from streamrl.learning.model.local_shards import LocalShard
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.host_memory import HostMemory
from streamrl.learning.step_metrics import check_totals, policy_metrics, publishing_metrics
from streamrl.learning.updates import Updates

_TRANSIENT_ERRORS = (StreamBroken, OSError, torch.OutOfMemoryError)
_LASTING_OS_ERRORS = (FileNotFoundError, NotADirectoryError, PermissionError)
STREAMED_ROWS = 2
"""Rows that must be pending before they are trained while more groups are ready: rows sorted together run faster."""

StartPublisher = Callable[[TrainerOptions, Sequence[LocalShard], torch.device], Publisher]
"""Starts to serve the weights of a rank: its shards, whose values lie on the device. Raises ``StreamRLError``."""


class TorchTrainer:
    """One trainer rank: masters in float32, forward on the published bfloat16 bits.

    ``start_publisher``: starts to serve this rank's weights.
    ``tokenizer_digest``: computes the digest of the tokenizer in a model's directory, which the controller compares;
    None: nothing to compare."""

    def __init__(
        self,
        options: TrainerOptions,
        start_publisher: StartPublisher,
        tokenizer_digest: Callable[[str], str] | None = None,
    ) -> None:
        self._options = options
        self._start_publisher = start_publisher
        self._tokenizer_digest = tokenizer_digest
        self._device = process_group.choose_device(options)
        self._published: Published | None = None
        self._anchor_was_requested = False
        self._threads = options.threads
        self._host_memory = HostMemory(self._device)

    @property
    def policy_version(self) -> int:
        """The version that the model holds."""
        return self._updates.policy_version

    @property
    def idle_work(self) -> bool:
        """Whether a partial row is worth training while no order waits. Small rows are slow: it must be at least a
        quarter full."""
        trains_alone = self._options.streaming and not self._updates.by_layer
        return trains_alone and 4 * self._batch.waiting_tokens >= self._updates.row_tokens

    # ---- life ------------------------------------------------------------------------------------

    @process_group.needs_peers("starting")
    def start(self) -> TrainerReady:
        """Meet the other ranks, load the model, start to serve weights. Publishes nothing. Raises ``StreamRLError``;
        its subclass ``ModelRefused`` where model, recipe and checkpoint do not fit each other."""
        options = self._options
        process_group.return_freed_memory()
        process_group.use_threads(options.threads)
        process_group.join(options, self._device)
        try:
            self._updates = Updates(options, self._device)
        except StreamRLError as error:
            if any(_is_transient(cause) for cause in _causes(error)):
                raise
            raise ModelRefused(str(error)) from error
        weights = self._updates.weights
        self._publisher = self._start_publisher(options, weights.shards, self._device)
        process_group.empty_cache(self._device)  # what loading has freed: up to 4 bytes a parameter
        self._open_batch()
        if options.in_turns:
            self._host_memory.offload()
        together = self._updates.by_layer and options.streaming
        data_ranks = options.ranks // options.tensor_parallel_size
        tokenizer_digest = ""
        if self._tokenizer_digest is not None:
            tokenizer_digest = self._tokenizer_digest(options.model_path)
        return TrainerReady(
            rank=options.rank,
            ranks=options.ranks,
            policy_version=self.policy_version,
            parameters=weights.total_elements,
            tokenizer_digest=tokenizer_digest,
            trained_parameters=weights.adapter_elements,
            together_tokens=data_ranks * STREAMED_ROWS * self._updates.row_tokens if together else 0,
            ranks_per_group=options.ranks_per_group,
        )

    def close(self) -> None:
        """Stop serving weights, free the model, leave the process group. Idempotent; safe when ``start`` failed."""
        if hasattr(self, "_publisher"):
            self._publisher.close()
        if hasattr(self, "_updates"):
            del self._updates
        process_group.leave()

    def _open_batch(self) -> None:
        self._batch = OpenBatch(self._options)
        self._canary_logprobs: tuple[float, ...] = ()

    def engines_freed(self, count: int) -> None:
        """Use the cores of ``count`` engines of this host, which are idle until the next round."""
        self._threads = self._options.threads_while(count)
        process_group.use_threads(self._threads)

    # ---- a batch ---------------------------------------------------------------------------------

    def train_group(self, group: TrainingGroup) -> None:
        """Take a group into the open batch; when streaming, train the waiting groups once they fill enough rows."""
        options = self._options
        batch = self._batch
        batch.take(group)
        if self._updates.by_layer or self._host_memory.holds_state:
            return  # all ranks train at the order TrainTogether, or at the close, when their state is back
        self._probe()
        if options.streaming and batch.waiting_tokens >= STREAMED_ROWS * self._updates.row_tokens:
            self.train_pending()

    def _probe(self) -> None:
        # Score the probe tokens while engines sample: at the close of the batch it would delay the engines.
        if self._options.canary and not self._canary_logprobs:
            self._canary_logprobs = probe_logprobs(self._updates.policy, self._options)

    @process_group.needs_peers("training what waited")
    def train_pending(self) -> None:
        """Run forward and backward of all waiting groups. Gradients stay un-normalised, and nothing else changes.
        Collective where parameters are gathered by layer."""
        if self._updates.by_layer:
            self._probe()
        self._updates.train_waiting(self._batch)

    @process_group.needs_peers("closing a batch")
    def close_batch(self, close: CloseBatch) -> StepReport:
        """Finish the batch: reduce, divide, clip, step, publish ``close.policy_version``. Collective. Raises
        ``StreamRLError`` when groups are missing or the gradient is not finite."""
        batch = self._batch
        device = self._device
        if close.policy_version != self.policy_version + 1 or batch.batch_id not in (None, close.batch_id):
            raise StreamRLError(
                f"close of batch {close.batch_id} as version {close.policy_version}, "
                f"but batch {batch.batch_id} is open at version {self.policy_version}"
            )
        check_totals(batch.sums, close, device, self._options.ranks_per_group)
        threads = self._threads
        if close.engines_idle:
            threads = self._options.idle_threads or threads
        process_group.use_threads(threads)
        turn_metrics: Metrics = {}
        if self._options.in_turns:
            turn_metrics["time/state_in_s"] = self._host_memory.reload()
        self._probe()
        step_metrics = self._updates.finish(batch, close)
        metrics = policy_metrics(batch.sums, self._options, device) | step_metrics
        started = perf_counter()
        published = self._publish(close.policy_version)
        metrics["time/publish_s"] = perf_counter() - started
        metrics |= publishing_metrics(published.source, device)
        process_group.use_threads(self._threads)
        canary_logprobs = self._canary_logprobs
        self._open_batch()
        self._updates.open_gradients()
        if self._options.in_turns:
            turn_metrics["time/state_out_s"] = self._host_memory.offload()
        return StepReport(
            rank=self._options.rank,
            batch_id=close.batch_id,
            policy_version=close.policy_version,
            metrics=metrics | turn_metrics,
            probe_logprobs=canary_logprobs,
            **asdict(published),
        )

    # ---- weights and checkpoints -----------------------------------------------------------------

    def _publish(self, policy_version: int) -> Published:
        self._published = self._publisher.publish(policy_version, self._updates.weights.values())
        return self._published

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        """Publish the complete weights of the current version. The first call returns the version as it is published
        already, which may be a delta on the checkpoint that engines load. Raises ``StreamRLError`` for another
        version."""
        if policy_version != self.policy_version:
            raise StreamRLError(
                f"anchor of version {policy_version} was asked for; the trainer holds {self.policy_version}"
            )
        anchor = None
        probe = None
        if self._anchor_was_requested:
            anchor = self._publisher.publish_anchor(policy_version)
        elif self._options.canary:
            probe = self._first_probe()
        self._anchor_was_requested = True
        published = anchor or self._published or self._publish(policy_version)
        return AnchorPublished(
            rank=self._options.rank, policy_version=policy_version, first_probe=probe, **asdict(published)
        )

    @process_group.needs_peers("scoring the first tokens")
    def _first_probe(self) -> FirstProbe:
        return first_probe(self._updates.policy, self._options)

    def acknowledge(self, policy_version: int) -> None:
        """Note that every engine holds this version: later deltas may be made against it."""
        self._publisher.acknowledge(policy_version)

    @process_group.needs_peers("saving a checkpoint")
    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        """Write ``order.directory``: trainer state and a Hugging Face directory ``hf``. Collective; between batches."""
        started = perf_counter()
        self._updates.save(order)
        return CheckpointSaved(
            rank=self._options.rank,
            directory=order.directory,
            policy_version=self.policy_version,
            seconds=perf_counter() - started,
        )


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, _LASTING_OS_ERRORS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
