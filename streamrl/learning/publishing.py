"""The rank's end of the weight path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamrl.comm.weights.manifest import ShardSpec
from streamrl.comm.weights.publisher import WeightPublisher
from streamrl.learning.options import TrainerOptions


def start_publisher(options: TrainerOptions, shards: Sequence[ShardSpec]) -> WeightPublisher:
    """Serve this rank's ``shards`` to engines. Raises ``WeightError`` when the endpoint cannot be bound."""
    publisher = WeightPublisher(
        options.weights_endpoint,
        run_id=options.run_id,
        rank=options.rank,
        shards=shards,
        bandwidth_mbit=options.weights_bandwidth_mbit,
        checkpoint=Path(options.model_path),
    )
    publisher.start()
    return publisher
