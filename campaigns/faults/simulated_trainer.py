"""What stands in for torch in a trainer rank. Its edges are tapped by the ledger."""

from __future__ import annotations

from pathlib import Path

import msgspec

from campaigns.faults.ledger import digest_of
from campaigns.faults.simulated_parts import TOKENIZER_DIGEST
from campaigns.faults.virtual_time import PROCESS
from campaigns.faults.world_state import PublishedPart, WorldState
from streamrl.base.atomic_files import take_sidecar
from streamrl.base.errors import StreamRLError
from streamrl.base.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
    WeightSource,
)
from streamrl.base.types import TrainingGroup
from streamrl.learning.state.durable_files import files_below, flush_and_digest, move_into_place, write_digests


class RankState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps of one rank."""

    version: int
    content: int


class SimulatedTrainer:
    """A trainer in place of ``learning.trainer.TorchTrainer``: its weights are a hash of all batches that made them."""

    def __init__(self, world: WorldState, rank: int, ranks: int, directory: Path | None) -> None:
        self.world, self.rank, self.ranks = world, rank, ranks
        self.life = PROCESS.get()
        self.version, self.content = 0, digest_of("initial", rank)
        if directory is not None:
            kept = msgspec.json.decode((directory / f"rank-{rank}.json").read_bytes(), type=RankState)
            self.version, self.content = kept.version, kept.content
        self.shadow: tuple[int, int] | None = None
        self.groups: list[TrainingGroup] = []
        self._incarnation = self.life.incarnation if self.life else 0

    @property
    def idle_work(self) -> bool:
        return False

    def start(self) -> TrainerReady:
        self._publish_hash()
        return TrainerReady(
            rank=self.rank,
            ranks=self.ranks,
            policy_version=self.version,
            parameters=1000,
            tokenizer_digest=TOKENIZER_DIGEST,
        )

    def train_group(self, group: TrainingGroup) -> None:
        self.world.ledger.given(self.rank, self._incarnation, self.version, group)
        self.groups.append(group)

    def train_pending(self) -> None:
        pass

    def close_batch(self, close: CloseBatch) -> StepReport:
        world = self.world
        world.ledger.closed(self.rank, self._incarnation, close, self.version, self.ranks)
        # Every rank holds a part of what the whole batch made.
        made = digest_of(self.content, close.policy_version, close.groups, close.samples, close.trained_tokens)
        self.groups = []
        self.version, self.content = close.policy_version, made
        self._publish_hash()
        base, base_content = self.shadow if self.shadow is not None else (None, None)
        return StepReport(
            rank=self.rank,
            batch_id=close.batch_id,
            policy_version=self.version,
            base_version=base,
            state_hash=digest_of(self.content),
            source=self._source(base_content),
            metrics={"optim/loss": 0.5},
        )

    def acknowledge(self, policy_version: int) -> None:
        self.world.ledger.acknowledged(policy_version)
        if policy_version == self.version:
            self.shadow = (self.version, self.content)

    def publish_anchor(self, policy_version: int) -> AnchorPublished:
        if policy_version != self.version:
            raise StreamRLError(f"anchor of version {policy_version} was asked for; the trainer holds {self.version}")
        return AnchorPublished(
            rank=self.rank, policy_version=policy_version, state_hash=digest_of(self.content), source=self._source(None)
        )

    def save_checkpoint(self, order: SaveCheckpoint) -> CheckpointSaved:
        directory = Path(order.directory)
        partial = directory.with_name(f".{directory.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        state = RankState(version=self.version, content=self.content)
        (partial / f"rank-{self.rank}.json").write_bytes(msgspec.json.encode(state))
        if self.rank == 0:
            take_sidecar(directory, partial, order.sidecar_digests)
        if len(list(partial.glob("rank-*.json"))) == self.ranks:
            write_digests(partial, [flush_and_digest(partial, files_below(partial))])
            move_into_place(partial, directory)
        return CheckpointSaved(
            rank=self.rank, directory=order.directory, policy_version=order.policy_version, seconds=0.0
        )

    def engines_freed(self, count: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _publish_hash(self) -> None:
        """Known once every rank made it."""
        self.world.rank_made(self.rank, self.version, digest_of(self.content))

    def _source(self, base: int | None) -> WeightSource:
        key = f"{digest_of(self.rank, base, self.content):016x}"
        self.world.published[key] = PublishedPart(base, self.content, self.life)
        return WeightSource(
            rank=self.rank,
            endpoint=f"trainer-{self.rank}.weights",
            manifest_digest=key,
            payload_bytes=100 if base is not None else 1000,
            changed_elements=10,
            total_elements=1000,
        )
