"""A publisher, a receiver, and a real socket between them that loses, repeats, swaps, cuts and flips what passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from streamrl.base.messages import WeightAnnouncement, announcement_of
from streamrl.weights.codec.bits import bit_type
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.server import ServedPart
from streamrl.weights.pull.fetch import KeptParts, fetch_version
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion

Bits = dict[str, np.ndarray]
Frames = list[bytes]
Fault = Callable[[int, Frames], Sequence[Frames]]
"""What the link makes of one reply: its number, counted from 0, and its frames (header, payload)."""

TENSORS = {"norm": ("bfloat16", (40,)), "layer": ("bfloat16", (60, 50)), "head": ("float32", (11, 30))}
LOST: Sequence[Frames] = ()


class Cut(Exception):
    """Raised by a fault: the connection breaks, what is under way is gone, and the link comes back."""


def random_bits(seed: int) -> Bits:
    """Every pattern is possible, among them NaN payloads, infinities and -0.0."""
    random = np.random.default_rng(seed)
    bits = {}
    for name, (dtype, shape) in TENSORS.items():
        width = bit_type(dtype, name)
        bits[name] = random.integers(0, 2 ** (8 * width.itemsize), int(np.prod(shape)), dtype=np.uint64).astype(width)
    return bits


def changed(bits: Bits, seed: int, density: float = 0.05) -> Bits:
    """Some elements move by one unit in the last place."""
    random = np.random.default_rng(seed)
    return {name: b ^ (random.random(b.size) < density).astype(b.dtype) for name, b in bits.items()}


class SmallPush:
    """One rank's publisher and one receiver's replica, at the same version after ``begin``."""

    def __init__(self, directory: Path, *, run_id: str = "run", endpoint: str = "", **options: Any) -> None:
        shards = [ShardSpec(name, dtype, shape, 0, int(np.prod(shape))) for name, (dtype, shape) in TENSORS.items()]
        endpoint = endpoint or f"ipc://{directory}/{run_id}"
        self.publisher = WeightPublisher(endpoint, run_id=run_id, rank=0, shards=shards, **options)
        self.publisher.start()
        self.replica = CheckpointReplica()
        self.bits = random_bits(0)

    def begin(self, seed: int = 0) -> None:
        self.bits = random_bits(seed)
        self.commit(self.publish(0, self.bits))

    def publish(self, version: int, bits: Bits) -> WeightAnnouncement:
        return announcement_of(version, [self.publisher.publish(version, bits)])

    def anchor(self, version: int) -> WeightAnnouncement:
        return announcement_of(version, [self.publisher.publish_anchor(version)])

    def fetch(
        self,
        announced: WeightAnnouncement,
        *,
        kept: KeptParts | None = None,
        retry_seconds: float = 0.05,
        credit_bytes: int = 1 << 20,
        progress_seconds: float = 10.0,
        stop: threading.Event | None = None,
    ) -> FetchedVersion:
        return fetch_version(
            announced,
            held=self.replica,
            kept=kept,
            progress_seconds=progress_seconds,
            retry_seconds=retry_seconds,
            credit_bytes=credit_bytes,
            stop=stop,
        )

    def commit(self, announced: WeightAnnouncement, *, acknowledge: bool = True) -> None:
        self.replica.advance(self.replica.stage(self.fetch(announced)))
        if acknowledge:
            self.publisher.acknowledge(announced.policy_version)

    def assert_holds(self, version: int, bits: Bits) -> None:
        assert self.replica.policy_version == version
        for name, expected in bits.items():
            assert np.array_equal(self.replica.bits(name), expected), name

    def close(self) -> None:
        self.publisher.close()


def flip(frame: bytes, bit: int) -> bytes:
    flipped = bytearray(frame)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def served(publisher: WeightPublisher, announced: WeightAnnouncement) -> ServedPart:
    """What the publisher serves of an announced version."""
    return publisher._server._parts[announced.sources[0].manifest_digest]


class FaultyLink:
    """Stands before a publisher, as a thread. ``through`` gives the announcement that leads over it."""

    def __init__(self, directory: Path, target: str, fault: Fault) -> None:
        self.endpoint = f"ipc://{directory}/link"
        self.requests: list[bytes] = []
        self.replies = 0
        self._target, self._fault = target, fault
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._open()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def through(self, announced: WeightAnnouncement) -> WeightAnnouncement:
        (source,) = announced.sources
        moved = msgspec.structs.replace(source, endpoint=self.endpoint)
        return msgspec.structs.replace(announced, sources=(moved,))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)
        assert self._failure is None, self._failure

    def __enter__(self) -> FaultyLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._front.bind(self.endpoint)
        self._back.connect(self._target)
        self._peer = b""

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._pass_on()
        except BaseException as failure:
            self._failure = failure
            raise

    def _pass_on(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        ready = dict(poller.poll(20))
        if self._front in ready:
            self._peer, *frames = self._front.recv_multipart()
            self.requests += frames
            self._back.send_multipart(frames)
        if self._back in ready:
            frames = self._back.recv_multipart()
            number, self.replies = self.replies, self.replies + 1
            try:
                for passed in self._fault(number, frames):
                    self._front.send_multipart([self._peer, *passed])
            except Cut:
                self._front.close(linger=0)
                self._back.close(linger=0)
                self._open()
