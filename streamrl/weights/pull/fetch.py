"""The receiver's side of a push: pull one announced version from every rank, check it, decode it while it arrives.

Runs in a thread of the engine's worker process, which has no event loop: plain blocking ZeroMQ with polls
and deadlines. Nothing here touches a model, or changes the base that a delta is decoded against.

Each version is a delta on the one published before it, and its manifest names that one's. A receiver that holds an
earlier version, or nothing but the checkpoint, fetches what lies between, and gets it as one patch a shard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import zmq

from streamrl.base.errors import StreamRLError, WeightError
from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement, WeightSource
from streamrl.comm.guarded_sockets import GuardedContext, connect
from streamrl.comm.object_store import in_store
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_sockets import ConnectionMonitor
from streamrl.weights.manifest import CHECKPOINT_VERSION, Manifest, ShardSpec
from streamrl.weights.pull.decoding import Decoding
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.received_part import ReceivedChain, ReceivedPart
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion
from streamrl.weights.pull.store_pull import StorePull
from streamrl.weights.requests import MANIFEST_LIMIT, encoder, pull_socket

CREDIT_BYTES = 32 << 20
"""Bytes asked for and not received yet, over all sources of one receiver."""

RETRY_SECONDS = 5.0
"""A source of which nothing came for so long is asked again, then after twice as long, and so on: a backstop, since
a lost connection is noticed when the next one stands, and a live one loses nothing."""

_POLL_MILLISECONDS = 100
_REPLIES_AT_ONCE = 8  # then what they freed is asked for, so that the source always has something to send


class KeptParts:
    """Verified parts of transfers that were cut off: another fetch continues with them."""

    def __init__(self) -> None:
        self._parts: dict[str, ReceivedPart] = {}

    def chains(self, announcement: WeightAnnouncement) -> list[ReceivedChain]:
        """One for each source."""
        return [ReceivedChain(source, announcement, self._parts) for source in announcement.sources]

    def keep_only(self, chains: Sequence[ReceivedChain]) -> None:
        """Forget the parts of other versions."""
        self._parts = {part.digest: part for chain in chains for part in chain.parts}

    def forget(self) -> None:
        """Free the memory."""
        self._parts = {}


def fetch_version(
    announcement: WeightAnnouncement,
    *,
    held: CheckpointReplica | None = None,
    checkpoint: CheckpointBase | None = None,
    kept: KeptParts | None = None,
    progress_seconds: float = 30.0,
    retry_seconds: float = RETRY_SECONDS,
    credit_bytes: int = CREDIT_BYTES,
    stop: threading.Event | None = None,
) -> FetchedVersion:
    """Pull an announced version from all its sources at once; decode each patch as soon as it is there.

    ``held``: what the receiver holds; the versions between that and the announced one are fetched too. Where the
    sources do not serve them all any more, the version is refused before its bytes are asked for. ``checkpoint``: what
    the receiver loaded, for when it holds no version. ``kept``: what earlier attempts received. ``progress_seconds``:
    how long nothing new may arrive from a source that is still needed. ``credit_bytes``: what may be under way, over
    all sources (a chunk of each at least). ``stop``: give up when it is set.
    Raises ``WeightError``: nothing arrives, a digest or a version differs (expected and actual are named),
    a patch does not decode, or the hashes of the parts do not add up to the announced one."""
    version = announcement.policy_version
    if not announcement.sources:
        raise WeightError(f"version {version} was announced without a source")
    if len({source.manifest_digest for source in announcement.sources}) != len(announcement.sources):
        raise WeightError(f"version {version} was announced with the same manifest from two sources")
    kept = kept or KeptParts()
    chains = kept.chains(announcement)
    stop = stop or threading.Event()
    with _pulls_of(chains, progress_seconds, retry_seconds) as pulls, ExitStack() as stack:

        def ask_for_manifests() -> None:
            _receive(pulls, stop, 0, until=lambda chain: bool(chain.refusal or chain.oldest.manifest))

        ask_for_manifests()
        _check_manifests(announcement, [chain.oldest.manifest for chain in chains if chain.oldest.manifest])
        base = _find_base(announcement, chains, ask_for_manifests, held, checkpoint)
        kept.keep_only(chains)
        for chain in chains:
            chain.fetch()
        decoding = Decoding(base)
        stack.enter_context(decoding.pool)
        try:
            credit = credit_bytes // len(chains)
            _receive(pulls, stop, credit, until=lambda chain: chain.complete, arrived=decoding.offer)
            patches = decoding.finish(chains)
        finally:
            decoding.cancel()
    manifests = [part.manifest for chain in chains for part in chain.parts if part.manifest is not None]
    return FetchedVersion(
        announcement=announcement,
        base_version=None if base is None else base.policy_version,
        base_hash=0 if base is None else base.state_hash,
        patches=patches,
        payload_bytes=sum(manifest.payload_bytes for manifest in manifests),
        run_id=manifests[0].run_id,
        checkpoint=None if base is None or base is held else base.whole(),
    )


def _check_manifests(announced: WeightAnnouncement, manifests: Sequence[Manifest]) -> None:
    """Raise ``WeightError`` unless the parts of the version belong together."""
    version = announced.policy_version
    part_hash = sum(manifest.part_hash for manifest in manifests) % HASH_MODULUS
    if part_hash != announced.state_hash:
        raise WeightError(
            f"version {version}: the parts of {len(manifests)} sources add up to state hash "
            f"{part_hash:#018x}; announced was {announced.state_hash:#018x}"
        )
    runs = sorted({manifest.run_id for manifest in manifests})
    if len(runs) > 1:
        raise WeightError(f"version {version} was announced with parts of different runs: {', '.join(runs)}")


def _find_base(
    announced: WeightAnnouncement,
    chains: Sequence[ReceivedChain],
    ask_for_manifests: Callable[[], None],
    held: CheckpointReplica | None,
    checkpoint: CheckpointBase | None,
) -> CheckpointReplica | None:
    """Return the replica that the version is decoded against, with every chain going back to it; None where it is
    complete. Raises ``WeightError`` where the versions between that and what the receiver holds are not served."""
    holds = None if held is None else held.policy_version
    while True:
        refusals = [chain.refusal for chain in chains if chain.refusal]
        if refusals:
            raise _no_path(announced, held, refusals[0])
        manifests = [chain.oldest.manifest for chain in chains if chain.oldest.manifest is not None]
        bases = {manifest.base_version for manifest in manifests}
        if len(bases) > 1:
            raise _no_path(announced, held, f"trainer ranks serve it on different versions: {sorted(bases, key=str)}")
        (base_version,) = bases
        base_hash = sum(manifest.base_part_hash for manifest in manifests) % HASH_MODULUS
        if base_version is None:
            return None
        if holds is None and base_version == CHECKPOINT_VERSION:
            return _checkpoint_of(announced, [s for m in manifests for s in m.shards], base_hash, checkpoint)
        if held is not None and holds is not None and base_version <= holds:
            if (base_version, base_hash) == (holds, held.state_hash):
                return held
            raise _no_path(announced, held, f"it is made on version {base_version} with state hash {base_hash:#018x}")
        for chain in chains:
            chain.extend()
        ask_for_manifests()


def _checkpoint_of(
    announced: WeightAnnouncement, shards: Sequence[ShardSpec], base_hash: int, checkpoint: CheckpointBase | None
) -> CheckpointReplica:
    if checkpoint is None:
        raise _no_path(announced, None, "it is made on a checkpoint, and none is known to be loaded")
    try:
        base = checkpoint.of(shards)
    except WeightError as error:
        raise _no_path(announced, None, str(error)) from error
    if base.state_hash != base_hash:
        reason = f"the checkpoint has state hash {base_hash:#018x} there and {base.state_hash:#018x} here"
        raise _no_path(announced, None, reason)
    return base


def _no_path(announced: WeightAnnouncement, held: CheckpointReplica | None, reason: str) -> WeightError:
    holds = "no published version yet"
    if held is not None and held.policy_version is not None:
        holds = f"version {held.policy_version} with state hash {held.state_hash:#018x}"
    return WeightError(
        f"version {announced.policy_version} is a delta on version {announced.base_version}; this engine holds {holds}"
        f", and no chain of deltas leads from there ({reason}): publish an anchor"
    )


# ---- receiving -------------------------------------------------------------------------------------


def _receive(
    pulls: Sequence[_Pull | StorePull],
    stop: threading.Event,
    credit_bytes: int,
    *,
    until: Callable[[ReceivedChain], bool],
    arrived: Callable[[ReceivedChain], None] = lambda _: None,
) -> None:
    """Ask and take until every chain has what it needs."""
    poller = zmq.Poller()
    for pull in pulls:
        pull.begin()
        pull.register(poller)
        arrived(pull.chain)
    while waiting := [pull for pull in pulls if not until(pull.chain)]:
        if stop.is_set():
            raise WeightError("fetching weights was stopped: the engine shuts down or a newer version was announced")
        for pull in waiting:
            pull.ask(credit_bytes)
        poller.poll(_POLL_MILLISECONDS)
        for pull in pulls:
            if pull.receive():
                arrived(pull.chain)
            if not until(pull.chain):
                pull.watch()


@contextmanager
def _pulls_of(
    chains: Sequence[ReceivedChain], progress_seconds: float, retry_seconds: float
) -> Iterator[Sequence[_Pull | StorePull]]:
    context = GuardedContext(io_threads=1)
    pulls: list[_Pull | StorePull] = []
    try:
        for chain in chains:
            if in_store(chain.source.endpoint):
                pulls.append(StorePull(chain, progress_seconds))
            else:
                pulls.append(_Pull(context, chain, progress_seconds, retry_seconds))
        yield pulls
    finally:
        for pull in pulls:
            pull.close()
        context.destroy(linger=0)


class _Pull:
    """The socket of one source, and how long ago something came from there."""

    def __init__(
        self, context: GuardedContext, chain: ReceivedChain, progress_seconds: float, retry_seconds: float
    ) -> None:
        self.chain = chain
        source: WeightSource = chain.source
        self._progress_seconds = progress_seconds
        self._retry_seconds = retry_seconds
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

    def close(self) -> None:
        self.monitor.close()

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor.fd, zmq.POLLIN)

    def ask(self, credit_bytes: int) -> None:
        for request in self.chain.requests(credit_bytes):
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
            news = self.chain.take([frame.buffer for frame in frames]) or news
        self.monitor.read()
        again = self.monitor.take_handshakes()
        if again and self._connections:
            self.chain.lost()
        self._connections += again
        if news:
            self._progressed_at = self._asked_at = time.monotonic()
            self._patience = self._retry_seconds
        return news

    def watch(self) -> None:
        """Ask again when nothing came for a while; give up when nothing came for long."""
        now = time.monotonic()
        source = self.chain.source
        if now - self._progressed_at > self._progress_seconds:
            raise WeightError(
                f"nothing arrived from {source.endpoint} (trainer rank {source.rank}) for "
                f"{self._progress_seconds:g} s: {self.chain.describe()}. Is the trainer alive and its address "
                "reachable?"
            )
        if now - self._asked_at > self._patience:
            self._asked_at = now
            self._patience = 2 * self._patience
            self.chain.lost()
