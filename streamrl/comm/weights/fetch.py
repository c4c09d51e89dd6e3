"""The receiver's side of a push: pull one announced version from every rank, check it, decode it.

Runs in a thread of the engine's worker process, which has no event loop: plain blocking ZeroMQ with polls
and deadlines. Nothing here touches a model.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from streamrl.comm.weights.bit_patterns import bit_type
from streamrl.comm.weights.codec import WeightPatch, decode_patch
from streamrl.comm.weights.manifest import (
    CHUNK_BYTES,
    MANIFEST_LIMIT,
    Manifest,
    ShardSpec,
    decode_manifest,
    digest_of,
)
from streamrl.comm.weights.pull_socket import WeightContext, pull_socket
from streamrl.comm.weights.requests import (
    ChunkReply,
    GetChunk,
    GetManifest,
    ManifestReply,
    NotServed,
    Request,
    encoder,
    reply_decoder,
)
from streamrl.comm.weights.state_hash import MODULUS
from streamrl.comm.zmq_sockets import connect
from streamrl.errors import StreamRLError, WeightError
from streamrl.messages import WeightAnnouncement, WeightSource

CREDITS = 32  # chunks asked for and not received yet, for one source: at most 32 MiB in flight
CHUNK_ATTEMPTS = 3
_POLL_MILLISECONDS = 100


class ShardPatch(msgspec.Struct, frozen=True, eq=False):
    """The decoded patch of one shard. Positions are relative to the shard."""

    shard: ShardSpec
    patch: WeightPatch


class FetchedVersion(msgspec.Struct, frozen=True, eq=False):
    """A version as it was announced, checked against every digest, decoded."""

    announcement: WeightAnnouncement
    base_hash: int
    patches: Sequence[ShardPatch]
    payload_bytes: int


def fetch_version(
    announcement: WeightAnnouncement,
    *,
    progress_seconds: float = 30.0,
    stop: threading.Event | None = None,
) -> FetchedVersion:
    """Pull and decode an announced version from all its sources at once.

    ``progress_seconds``: how long no byte may arrive from a source that is still needed. ``stop``: give up when set.
    Raises ``WeightError``: nothing arrives, a digest or a version differs (expected and actual are named),
    a patch does not decode, or the hashes of the parts do not add up to the announced one.
    """
    if not announcement.sources:
        raise WeightError(f"version {announcement.policy_version} was announced without a source")
    context: WeightContext = zmq.Context(io_threads=1)
    try:
        pulls = [_Pull(context, source, announcement) for source in announcement.sources]
        _run(pulls, progress_seconds, stop or threading.Event())
    finally:
        context.destroy(linger=0)
    manifests = [pull.complete_manifest() for pull in pulls]
    part_hash = sum(manifest.part_hash for manifest in manifests) % MODULUS
    if part_hash != announcement.state_hash:
        raise WeightError(
            f"version {announcement.policy_version}: the parts of {len(pulls)} sources add up to state hash "
            f"{part_hash:#018x}; announced was {announcement.state_hash:#018x}"
        )
    return FetchedVersion(
        announcement=announcement,
        base_hash=sum(manifest.base_part_hash for manifest in manifests) % MODULUS,
        patches=[patch for pull in pulls for patch in pull.decode()],
        payload_bytes=sum(manifest.payload_bytes for manifest in manifests),
    )


def _run(pulls: Sequence[_Pull], progress_seconds: float, stop: threading.Event) -> None:
    poller = zmq.Poller()
    for pull in pulls:
        poller.register(pull.socket, zmq.POLLIN)
        pull.ask_manifest()
    while any(not pull.done for pull in pulls):
        if stop.is_set():
            raise WeightError("fetching weights was stopped: the engine shuts down or a newer version was announced")
        for socket, _ in poller.poll(_POLL_MILLISECONDS):
            next(pull for pull in pulls if pull.socket is socket).receive()
        for pull in pulls:
            if not pull.done and time.monotonic() - pull.progressed_at > progress_seconds:
                raise WeightError(
                    f"nothing arrived from {pull.source.endpoint} (trainer rank {pull.source.rank}) for "
                    f"{progress_seconds:g} s: {pull.describe()}. Is the trainer alive and its address reachable?"
                )


class _Pull:
    """One source: its socket, what was asked for, what came."""

    def __init__(self, context: WeightContext, source: WeightSource, announced: WeightAnnouncement) -> None:
        self.source = source
        self.done = False
        self.progressed_at = time.monotonic()
        self._announced = announced
        self._manifest: Manifest | None = None
        self._payload = bytearray()
        self._waiting: deque[int] = deque()
        self._asked: set[int] = set()
        self._attempts: dict[int, int] = {}
        self._starts = [0]
        try:
            self.socket = pull_socket(context, zmq.DEALER, source.endpoint, max_frame_bytes=MANIFEST_LIMIT)
            connect(self.socket, source.endpoint)
        except StreamRLError as error:
            raise WeightError(f"trainer rank {source.rank} is announced at an impossible address: {error}") from error

    def ask_manifest(self) -> None:
        self._ask(GetManifest(self.source.manifest_digest))

    def describe(self) -> str:
        if self._manifest is None:
            return "its manifest is missing"
        missing = len(self._waiting) + len(self._asked)
        return f"{missing} of {len(self._manifest.chunks)} chunks are missing"

    def complete_manifest(self) -> Manifest:
        assert self._manifest is not None
        return self._manifest

    def receive(self) -> None:
        """Take one reply; ask for what the freed credit allows."""
        header, frame = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        try:
            reply = reply_decoder.decode(header.buffer)
        except msgspec.MsgspecError as error:
            raise WeightError(f"{self.source.endpoint} does not speak this protocol: {error}") from error
        if reply.manifest_digest not in (self.source.manifest_digest, ""):
            raise WeightError(f"{self.source.endpoint} answered about {reply.manifest_digest}, which was not asked for")
        if isinstance(reply, NotServed):
            raise WeightError(
                f"{self.source.endpoint} does not serve version {self._announced.policy_version} "
                f"(manifest {self.source.manifest_digest}): {reply.reason}"
            )
        self.progressed_at = time.monotonic()
        if isinstance(reply, ManifestReply):
            self._take_manifest(frame.buffer)
        else:
            self._take_chunk(reply, frame.buffer)
        self._spend_credits()

    def decode(self) -> list[ShardPatch]:
        """Decode the patches of the complete payload (arrays share its memory)."""
        patches: list[ShardPatch] = []
        view, start = memoryview(self._payload).toreadonly(), 0
        for entry in self.complete_manifest().tensors:
            shard, stop = entry.shard, start + entry.payload_bytes
            patch = decode_patch(view[start:stop], bit_type(shard.dtype, shard.name), shard.count, shard.name)
            patches.append(ShardPatch(shard, patch))
            start = stop
        return patches

    def _take_manifest(self, frame: memoryview) -> None:
        if self._manifest is not None:
            return
        manifest = decode_manifest(frame, self.source.manifest_digest, self.source.endpoint)
        actual = (manifest.rank, manifest.policy_version, manifest.base_version, manifest.payload_bytes)
        announced = (
            self.source.rank,
            self._announced.policy_version,
            self._announced.base_version,
            self.source.payload_bytes,
        )
        if actual != announced:
            raise WeightError(
                f"manifest {self.source.manifest_digest} is for (rank, version, base version, bytes) {actual}; "
                f"announced was {announced}"
            )
        if any(not 0 < chunk.payload_bytes <= CHUNK_BYTES for chunk in manifest.chunks):
            raise WeightError(
                f"manifest {self.source.manifest_digest} has a chunk that is empty or over {CHUNK_BYTES} bytes"
            )
        self._manifest = manifest
        for chunk in manifest.chunks:
            self._starts.append(self._starts[-1] + chunk.payload_bytes)
        self._payload = bytearray(self._starts[-1])
        self._waiting.extend(range(len(manifest.chunks)))

    def _take_chunk(self, reply: ChunkReply, frame: memoryview) -> None:
        if reply.chunk not in self._asked:
            return  # a duplicate
        expected = self.complete_manifest().chunks[reply.chunk]
        self._asked.discard(reply.chunk)
        actual = digest_of(frame)
        if actual == expected.digest and len(frame) == expected.payload_bytes:
            self._payload[self._starts[reply.chunk] : self._starts[reply.chunk + 1]] = frame
            return
        self._attempts[reply.chunk] = self._attempts.get(reply.chunk, 0) + 1
        if self._attempts[reply.chunk] >= CHUNK_ATTEMPTS:
            raise WeightError(
                f"chunk {reply.chunk} from {self.source.endpoint} came {CHUNK_ATTEMPTS} times with digest {actual} "
                f"({len(frame)} bytes); the manifest says {expected.digest} ({expected.payload_bytes} bytes)"
            )
        self._waiting.append(reply.chunk)

    def _spend_credits(self) -> None:
        while self._waiting and len(self._asked) < CREDITS:
            chunk = self._waiting.popleft()
            self._asked.add(chunk)
            self._ask(GetChunk(self.source.manifest_digest, chunk))
        self.done = self._manifest is not None and not self._waiting and not self._asked

    def _ask(self, request: Request) -> None:
        try:
            self.socket.send(encoder.encode(request), zmq.NOBLOCK)
        except zmq.Again as error:
            raise WeightError(f"requests to {self.source.endpoint} cannot be queued: it does not answer") from error
