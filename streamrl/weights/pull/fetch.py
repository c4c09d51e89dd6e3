"""The receiver's side of a push: pull one announced version from every rank, check it, decode it while it arrives.

Runs in a thread of the engine's worker process, which has no event loop: plain blocking ZeroMQ with polls
and deadlines. Nothing here touches a model, or changes the base that a delta is decoded against.

A version that was announced as a delta on something else than the receiver holds is asked for as one delta on what it
does hold (a *fold*): on an earlier version, or on the checkpoint files where no version was committed yet.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import msgspec
import zmq

from streamrl.base.errors import StreamRLError, WeightError
from streamrl.base.messages import WeightAnnouncement, WeightSource
from streamrl.comm.zmq_sockets import ConnectionMonitor, connect
from streamrl.remote.transport_keys import KeyRole
from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.codec import WeightPatch, decode_patch
from streamrl.weights.manifest import MANIFEST_LIMIT, MODULUS, Manifest, ShardSpec, TensorEntry
from streamrl.weights.publish.loaded_checkpoint import CheckpointBase, LoadedCheckpoint
from streamrl.weights.pull.held_weights import HeldWeights, choose_held
from streamrl.weights.pull.pull_socket import WeightContext, pull_socket
from streamrl.weights.pull.received_part import ReceivedPart
from streamrl.weights.requests import encoder
from streamrl.weights.work_units import WorkUnit

CREDIT_BYTES = 32 << 20
"""Bytes asked for and not received yet, over all sources of one receiver."""

RETRY_SECONDS = 5.0
"""A source of which nothing came for so long is asked again, then after twice as long, and so on: a backstop, since
a lost connection is noticed when the next one stands, and a live one loses nothing."""

DECODING_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_POLL_MILLISECONDS = 100
_REPLIES_AT_ONCE = 8  # then what they freed is asked for, so that the source always has something to send


class ShardPatch(msgspec.Struct, frozen=True, eq=False):
    """The decoded patch of one shard. Positions are relative to the shard."""

    shard: ShardSpec
    patch: WeightPatch


class FetchedVersion(msgspec.Struct, frozen=True, eq=False):
    """An announced version, checked against every digest, decoded. ``base_version``, ``base_hash``: of what it changes,
    which is another base than announced where it was folded; None and 0 for an anchor. ``run_id``: of who published it.
    ``checkpoint``: the base, where that is the checkpoint (``base_version`` is ``CHECKPOINT_VERSION``)."""

    announcement: WeightAnnouncement
    base_version: int | None
    base_hash: int
    patches: Sequence[ShardPatch]
    payload_bytes: int
    run_id: str = ""
    checkpoint: LoadedCheckpoint | None = None


class KeptParts:
    """What transfers that were cut off had verified: another fetch of the same version goes on from there."""

    def __init__(self) -> None:
        self._parts: dict[str, ReceivedPart] = {}

    def of(self, announcement: WeightAnnouncement) -> list[ReceivedPart]:
        """One part for each source; those of other versions are forgotten."""
        parts = {}
        for source in announcement.sources:
            part = self._parts.get(source.manifest_digest) or ReceivedPart(source, announcement)
            part.begin(source, announcement)
            parts[source.manifest_digest] = part
        self._parts = parts
        return list(parts.values())

    def forget(self) -> None:
        """Free the memory."""
        self._parts = {}


def fetch_version(
    announcement: WeightAnnouncement,
    *,
    held: HeldWeights | None = None,
    checkpoint: CheckpointBase | None = None,
    kept: KeptParts | None = None,
    progress_seconds: float = 30.0,
    retry_seconds: float = RETRY_SECONDS,
    credit_bytes: int = CREDIT_BYTES,
    stop: threading.Event | None = None,
) -> FetchedVersion:
    """Pull an announced version from all its sources at once; decode each patch as soon as it is there.

    ``held``: what the receiver holds. A delta on anything else is asked for as one on that; where the sources no longer
    know it, the version is refused before its bytes are asked for. ``checkpoint``: what the receiver loaded: while it
    holds no version, it takes a delta on this where the sources have one, whatever was announced. ``kept``: what
    earlier attempts received. ``progress_seconds``: how long nothing new may arrive from a source that is still
    needed. ``credit_bytes``: what may be under way, over all sources (a chunk of each at least). ``stop``: give up when
    it is set.
    Raises ``WeightError``: nothing arrives, a digest or a version differs (expected and actual are named),
    a patch does not decode, or the hashes of the parts do not add up to the announced one.
    """
    version = announcement.policy_version
    if not announcement.sources:
        raise WeightError(f"version {version} was announced without a source")
    if len({source.manifest_digest for source in announcement.sources}) != len(announcement.sources):
        raise WeightError(f"version {version} was announced with the same manifest from two sources")
    parts = (kept or KeptParts()).of(announcement)
    stop = stop or threading.Event()
    credit = credit_bytes // len(parts)
    with _pulls_of(parts, progress_seconds, retry_seconds) as pulls, ExitStack() as stack:
        _receive(pulls, stop, credit_bytes=0, until=lambda part: part.announced_manifest is not None)
        _check_manifests(announcement, [part.announced_manifest for part in parts if part.announced_manifest])

        def ask(until: Callable[[ReceivedPart], bool]) -> None:
            _receive(pulls, stop, credit_bytes=0, until=until)

        base = choose_held(announcement, parts, ask, held, checkpoint)
        manifests = [part.manifest for part in parts if part.manifest is not None]
        decoding = _Decoding(base)
        stack.enter_context(decoding.pool)
        try:
            _receive(pulls, stop, credit, until=lambda part: part.complete, arrived=decoding.offer)
            patches = decoding.finish(parts)
        finally:
            decoding.cancel()
    return FetchedVersion(
        announcement=announcement,
        base_version=None if base is None else base.policy_version,
        base_hash=0 if base is None else base.state_hash,
        patches=patches,
        payload_bytes=sum(manifest.payload_bytes for manifest in manifests),
        run_id=manifests[0].run_id,
        checkpoint=base if isinstance(base, LoadedCheckpoint) else None,
    )


def _check_manifests(announced: WeightAnnouncement, manifests: Sequence[Manifest]) -> None:
    """Raise ``WeightError`` unless the parts of the version belong together."""
    version = announced.policy_version
    part_hash = sum(manifest.part_hash for manifest in manifests) % MODULUS
    if part_hash != announced.state_hash:
        raise WeightError(
            f"version {version}: the parts of {len(manifests)} sources add up to state hash "
            f"{part_hash:#018x}; announced was {announced.state_hash:#018x}"
        )
    runs = sorted({manifest.run_id for manifest in manifests})
    if len(runs) > 1:
        raise WeightError(f"version {version} was announced with parts of different runs: {', '.join(runs)}")


# ---- receiving -------------------------------------------------------------------------------------


def _receive(
    pulls: Sequence[_Pull],
    stop: threading.Event,
    credit_bytes: int,
    *,
    until: Callable[[ReceivedPart], bool],
    arrived: Callable[[ReceivedPart], None] = lambda _: None,
) -> None:
    """Ask and take until every part has what it needs."""
    poller = zmq.Poller()
    for pull in pulls:
        pull.begin()
        pull.register(poller)
        arrived(pull.part)
    while waiting := [pull for pull in pulls if not until(pull.part)]:
        if stop.is_set():
            raise WeightError("fetching weights was stopped: the engine shuts down or a newer version was announced")
        for pull in waiting:
            pull.ask(credit_bytes)
        poller.poll(_POLL_MILLISECONDS)
        for pull in pulls:
            if pull.receive():
                arrived(pull.part)
            if not until(pull.part):
                pull.watch()


@contextmanager
def _pulls_of(
    parts: Sequence[ReceivedPart], progress_seconds: float, retry_seconds: float
) -> Iterator[Sequence[_Pull]]:
    context = WeightContext(io_threads=1)
    pulls: list[_Pull] = []
    try:
        pulls.extend(_Pull(context, part, progress_seconds, retry_seconds) for part in parts)
        yield pulls
    finally:
        for pull in pulls:
            pull.monitor.close()
        context.destroy(linger=0)


class _Pull:
    """The socket of one source, and how long ago something came from there."""

    def __init__(
        self, context: WeightContext, part: ReceivedPart, progress_seconds: float, retry_seconds: float
    ) -> None:
        self.part = part
        source: WeightSource = part.source
        self._progress_seconds, self._retry_seconds = progress_seconds, retry_seconds
        self._patience = retry_seconds
        self.begin()
        self._connections = 0
        try:
            self.socket = pull_socket(context, zmq.DEALER, source.endpoint, max_frame_bytes=MANIFEST_LIMIT)
            self.monitor = ConnectionMonitor(self.socket)
            connect(self.socket, source.endpoint, KeyRole.TRAINER)
        except StreamRLError as error:
            raise WeightError(f"trainer rank {source.rank} is announced at an impossible address: {error}") from error

    def begin(self) -> None:
        """Count from now: before, nothing was asked for. A checkpoint may have been read meanwhile, for minutes."""
        self._progressed_at = self._asked_at = time.monotonic()

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor.fd, zmq.POLLIN)

    def ask(self, credit_bytes: int) -> None:
        for request in self.part.requests(credit_bytes):
            try:
                self.socket.send(encoder.encode(request), zmq.NOBLOCK)
            except zmq.Again:
                # The queue of a connection that does not stand is full: all of it is asked for again when it does.
                return

    def receive(self) -> bool:
        """Take what is there. Returns whether it brought something new."""
        news = False
        for _ in range(_REPLIES_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            news = self.part.take([frame.buffer for frame in frames]) or news
        self.monitor.read()
        again = self.monitor.take_handshakes()
        if again and self._connections:
            self.part.lost()
        self._connections += again
        if news:
            self._progressed_at = self._asked_at = time.monotonic()
            self._patience = self._retry_seconds
        return news

    def watch(self) -> None:
        """Ask again when nothing came for a while; give up when nothing came for long."""
        now, source = time.monotonic(), self.part.source
        if now - self._progressed_at > self._progress_seconds:
            raise WeightError(
                f"nothing arrived from {source.endpoint} (trainer rank {source.rank}) for "
                f"{self._progress_seconds:g} s: {self.part.describe()}. Is the trainer alive and its address reachable?"
            )
        if now - self._asked_at > self._patience:
            self._asked_at, self._patience = now, 2 * self._patience
            self.part.lost()


# ---- decoding --------------------------------------------------------------------------------------


class _Decoding:
    """Decodes patches in threads (numpy, numba and pcodec let go of the interpreter), while others still arrive."""

    def __init__(self, base: HeldWeights | None) -> None:
        self.pool = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="weight decoding")
        self._base = base
        self._begun: dict[str, list[Future[list[ShardPatch]]]] = {}

    def offer(self, part: ReceivedPart) -> None:
        """Begin to decode what is there now. Raises what a patch that is done raised."""
        begun = self._begun.setdefault(part.source.manifest_digest, [])
        whole = part.whole_patches()
        if whole > len(begun):
            for index, patch in enumerate(part.patch_bytes()):
                if len(begun) <= index < whole:
                    begun.append(self.pool.submit(self._decode, *patch))
        for future in begun:
            if future.done():
                future.result()

    def finish(self, parts: Sequence[ReceivedPart]) -> list[ShardPatch]:
        """All patches, in the order of the manifests."""
        futures = [future for part in parts for future in self._begun[part.source.manifest_digest]]
        return [patch for future in futures for patch in future.result()]

    def cancel(self) -> None:
        """What has not begun never will."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _decode(self, unit: WorkUnit, entries: Sequence[TensorEntry], encoded: memoryview) -> list[ShardPatch]:
        """What a patch makes of each shard that it is of; of a delta, those that change."""
        base = None if self._base is None else unit.join(self._base_of)
        patch = decode_patch(encoded, unit.dtype, unit.count, unit.name, base)
        if patch.positions is not None and not _rise_within(patch.positions, unit.count):
            raise WeightError(f"the patch of {unit.name!r} has positions that do not rise within {unit.count} elements")
        patches = [ShardPatch(shard, part) for shard, part in zip(unit.shards, unit.cut(patch), strict=True)]
        for decoded, entry in zip(patches, entries, strict=True):
            if decoded.patch.values.size != entry.changed_elements:
                raise WeightError(
                    f"the patch of {entry.shard.name!r} changes {decoded.patch.values.size} elements; the manifest "
                    f"says {entry.changed_elements}"
                )
        return [decoded for decoded in patches if self._base is None or decoded.patch.values.size]

    def _base_of(self, shard: ShardSpec) -> BitArray:
        """The bits of the shard that a delta is made on."""
        assert self._base is not None
        known = self._base.tensors.get(shard.name)
        if known is None or (known.dtype, known.shape) != (shard.dtype, shard.shape):
            raise WeightError(f"{shard.name!r} is published as {shard.dtype} {shard.shape}; this engine holds {known}")
        return self._base.bits(shard.name)[shard.offset : shard.offset + shard.count]


def _rise_within(positions: PositionArray, count: int) -> bool:
    """No codec here decodes to anything else; a wrong one must not write elsewhere, or twice."""
    return not positions.size or bool(
        positions[0] >= 0 and positions[-1] < count and (positions[1:] > positions[:-1]).all()
    )
