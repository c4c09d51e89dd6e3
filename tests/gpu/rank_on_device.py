"""A trainer rank in a process of its own, for a check that maps its memory: ``rank_on_device.py DEVICE FOLDER``,
with the tests and the checkout on PYTHONPATH.

For each line on stdin it publishes the next version, writes the announcement to FOLDER, and prints the number."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
from builders.weights import changed

from streamrl.base.messages import announcement_of
from streamrl.weights.distance import Mover
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.torch_tensors import DeviceTensors
from tests.weights.vllm.test_device_writes import SHAPES, SharedTensors, first_bits


def main(device: str, directory: Path) -> None:
    shards = [ShardSpec(name, "bfloat16", shape, 0, int(np.prod(shape))) for name, shape in SHAPES.items()]
    source = DeviceTensors(torch.device("cuda", 0)) if device == "cuda" else SharedTensors(torch.device("cpu"))
    options = {"run_id": "run", "rank": 0, "shards": shards, "source": source, "movers": (Mover.DEVICE,)}
    publisher = WeightPublisher(f"ipc://{directory}/weights", **options)
    publisher.start()
    bits = first_bits()
    for version, _ in enumerate(sys.stdin):
        values = {n: torch.from_numpy((b.astype(np.uint32) << 16).view(np.float32)) for n, b in bits.items()}
        published = publisher.publish(version, {name: value.to(device) for name, value in values.items()})
        (directory / str(version)).write_bytes(msgspec.msgpack.encode(announcement_of(version, [published])))
        print(version, flush=True)
        bits = changed(bits, version)
    publisher.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
