"""The rank's end of the weight path."""

from __future__ import annotations

from pathlib import Path

from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.published_weights import PublishedWeights
from streamrl.weights.publish.publisher import Published, WeightPublisher


def start_publisher(options: TrainerOptions, weights: PublishedWeights) -> WeightPublisher:
    """Serve this rank's shards to engines. Raises ``WeightError`` when the endpoint cannot be bound.

    What changed is found where the weights lie: on a GPU by torch, with a baseline of 2 bytes an element there.
    """
    source = None
    if weights.on_device:
        # Only here: it is torch's way, and slow on a CPU.
        from streamrl.learning.state.device_split import DeviceTensors

        source = DeviceTensors()
    publisher = WeightPublisher(
        options.weights_endpoint,
        run_id=options.run_id,
        rank=options.rank,
        shards=weights.shard_specs,
        checkpoint=Path(options.model_path),
        source=source,
    )
    publisher.start()
    return publisher


def publish(publisher: WeightPublisher, policy_version: int, weights: PublishedWeights) -> Published:
    """Publish what the weights are now, by a publisher that was started for them."""
    return publisher.publish(policy_version, weights.values() if weights.on_device else weights.bits())
