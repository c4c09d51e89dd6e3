"""Fetches one announced version from every trainer rank, checks it, and decodes it while it arrives.

``vllm/weight_transaction.py`` calls ``fetch_version`` in a thread of vLLM's worker process, which has no event loop:
plain blocking ZeroMQ with polls and deadlines. The model and the base of the delta are not changed.

Each version is a delta on the version published before it, and its manifest has the digest of that version's manifest.
A receiver that holds an earlier version, or only the checkpoint, fetches all versions in between, and gets one patch
for each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event
from time import monotonic

import zmq
from zmq import NOBLOCK, POLLIN, Again, Poller

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
"""Largest number of requested bytes that have not arrived, over all sources of one receiver."""

RETRY_SECONDS = 5.0
"""Time without a reply after which open requests to a source are repeated; doubled each time. A safeguard: a new
connection after a lost one repeats them at once, and a live connection loses nothing."""

_POLL_MILLISECONDS = 100
_REPLIES_AT_ONCE = 8  # then new requests are sent, so that the source always has something to send


class KeptParts:
    """Verified pieces of interrupted transfers, by part, with which the next fetch continues."""

    def __init__(self) -> None:
        self._parts: dict[str, ReceivedPart] = {}

    def chains(self, announcement: WeightAnnouncement) -> list[ReceivedChain]:
        """Return one chain for each source of the announcement."""
        return [ReceivedChain(source, announcement, self._parts) for source in announcement.sources]

    def keep_only(self, chains: Sequence[ReceivedChain]) -> None:
        """Drop all parts that are in none of ``chains``."""
        self._parts = {part.digest: part for chain in chains for part in chain.parts}

    def forget(self) -> None:
        """Drop all parts."""
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
    stop: Event | None = None,
) -> FetchedVersion:
    """Fetch an announced version from all its sources concurrently, and decode each patch as soon as it has arrived.

    ``held``: the receiver's replica. The versions between its version and the announced one are fetched too; where the
    sources do not serve all of these any more, the version is refused before its chunks are requested.
    ``checkpoint``: the checkpoint that the receiver loaded, as base where it holds no version. ``kept``: parts of
    earlier attempts. ``progress_seconds``: longest time without anything new from a source that is still needed.
    ``credit_bytes``: limit of the requested bytes under way, over all sources (one chunk of each at least). ``stop``:
    event that ends the fetch.
    Raises ``WeightError``: nothing arrives, a digest or a version differs (expected and actual are named), a patch does
    not decode, or the hashes of the parts do not add up to the announced one."""
    version = announcement.policy_version
    if not announcement.sources:
        raise WeightError(f"version {version} was announced without a source")
    if not all(source.manifest_digest for source in announcement.sources):
        raise WeightError(f"version {version} is only in the memory of the trainer's host: publish an anchor")
    if len({source.manifest_digest for source in announcement.sources}) != len(announcement.sources):
        raise WeightError(f"version {version} was announced with the same manifest from two sources")
    parts = kept or KeptParts()
    chains = parts.chains(announcement)
    stop = stop or Event()
    with _pulls_of(chains, progress_seconds, retry_seconds) as pulls, ExitStack() as stack:

        def receive_manifests() -> None:
            _receive(pulls, stop, 0, until=_has_oldest_manifest)

        receive_manifests()
        _check_manifests(announcement, [chain.oldest.manifest for chain in chains if chain.oldest.manifest])
        base = _find_base(announcement, chains, receive_manifests, held, checkpoint)
        parts.keep_only(chains)
        for chain in chains:
            chain.fetch()
        decoding = Decoding(base)
        stack.enter_context(decoding.pool)
        try:
            credit = credit_bytes // len(chains)
            _receive(pulls, stop, credit, until=_is_complete, arrived=decoding.offer)
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
        checkpoint=None if base is None or base is held else base.complete_version(),
    )


def _has_oldest_manifest(chain: ReceivedChain) -> bool:
    """Return whether the manifest of the oldest part has arrived, or the source refused it."""
    return bool(chain.refusal or chain.oldest.manifest)


def _is_complete(chain: ReceivedChain) -> bool:
    return chain.complete


def _check_manifests(announced: WeightAnnouncement, manifests: Sequence[Manifest]) -> None:
    """Raise ``WeightError`` unless the parts add up to the announced state hash and are of one run."""
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
    receive_manifests: Callable[[], None],
    replica: CheckpointReplica | None,
    checkpoint: CheckpointBase | None,
) -> CheckpointReplica | None:
    """Extend every chain back to a version that the receiver holds, and return the replica of this version, on which
    the announced version is decoded; None where the oldest part of the chains is complete. Raises ``WeightError`` where
    the sources do not serve all versions in between."""
    held_version = None if replica is None else replica.policy_version
    while True:
        refusals = [chain.refusal for chain in chains if chain.refusal]
        if refusals:
            raise _no_path(announced, replica, refusals[0])
        manifests = [chain.oldest.manifest for chain in chains if chain.oldest.manifest is not None]
        bases = {manifest.base_version for manifest in manifests}
        if len(bases) > 1:
            reason = f"trainer ranks serve it on different versions: {sorted(bases, key=str)}"
            raise _no_path(announced, replica, reason)
        (base_version,) = bases
        base_hash = sum(manifest.base_part_hash for manifest in manifests) % HASH_MODULUS
        if base_version is None:
            return None
        if held_version is None and base_version == CHECKPOINT_VERSION:
            shards = [shard for manifest in manifests for shard in manifest.shards]
            return _checkpoint_of(announced, shards, base_hash, checkpoint)
        if replica is not None and held_version is not None and base_version <= held_version:
            if (base_version, base_hash) == (held_version, replica.state_hash):
                return replica
            reason = f"it is made on version {base_version} with state hash {base_hash:#018x}"
            raise _no_path(announced, replica, reason)
        for chain in chains:
            chain.extend()
        receive_manifests()


def _checkpoint_of(
    announced: WeightAnnouncement, shards: Sequence[ShardSpec], base_hash: int, checkpoint: CheckpointBase | None
) -> CheckpointReplica:
    """Return the replica of the checkpoint. Raises ``WeightError`` unless it has the state hash ``base_hash``."""
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


def _no_path(announced: WeightAnnouncement, replica: CheckpointReplica | None, reason: str) -> WeightError:
    held_version = "no published version yet"
    if replica is not None and replica.policy_version is not None:
        held_version = f"version {replica.policy_version} with state hash {replica.state_hash:#018x}"
    return WeightError(
        f"version {announced.policy_version} is a delta on version {announced.base_version}; this engine holds "
        f"{held_version}, and no chain of deltas leads from there ({reason}): publish an anchor"
    )


# ---- receiving -------------------------------------------------------------------------------------


def _receive(
    pulls: Sequence[_Pull | StorePull],
    stop: Event,
    credit_bytes: int,
    *,
    until: Callable[[ReceivedChain], bool],
    arrived: Callable[[ReceivedChain], None] | None = None,
) -> None:
    """Send requests and take replies until every chain satisfies ``until``. ``arrived``: called with each chain first,
    and after each reply that brought something new. Raises ``WeightError`` when ``stop`` is set, and as ``_Pull``
    does."""
    poller = Poller()
    for pull in pulls:
        pull.begin()
        pull.register(poller)
        if arrived is not None:
            arrived(pull.chain)
    while waiting := [pull for pull in pulls if not until(pull.chain)]:
        if stop.is_set():
            raise WeightError("fetching weights was stopped: the engine shuts down or a newer version was announced")
        for pull in waiting:
            pull.ask(credit_bytes)
        poller.poll(_POLL_MILLISECONDS)
        for pull in pulls:
            news = pull.receive()
            if news and arrived is not None:
                arrived(pull.chain)
            if not until(pull.chain):
                pull.watch()


@contextmanager
def _pulls_of(
    chains: Sequence[ReceivedChain], progress_seconds: float, retry_seconds: float
) -> Iterator[Sequence[_Pull | StorePull]]:
    """Open the source of each chain, a publisher or an object store, and close all sources afterwards."""
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
    """The socket of one source, and the time of its last reply. Has the methods of ``StorePull``."""

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
        """Measure the time without progress from now on. Since the last request a checkpoint may have been read, for
        minutes."""
        self._progressed_at = self._asked_at = monotonic()

    def close(self) -> None:
        self.monitor.close()

    def register(self, poller: Poller) -> None:
        poller.register(self.socket, POLLIN)
        poller.register(self.monitor.fd, POLLIN)

    def ask(self, credit_bytes: int) -> None:
        """Send the requests that the credit allows."""
        for request in self.chain.requests(credit_bytes):
            try:
                self.socket.send(encoder.encode(request), NOBLOCK)
            except Again:
                # There is no connection, and its queue is full: all requests are repeated when there is one.
                return

    def receive(self) -> bool:
        """Take the replies that have arrived. Returns whether one of them brought something new."""
        news = False
        for _ in range(_REPLIES_AT_ONCE):
            try:
                frames = self.socket.recv_multipart(NOBLOCK, copy=False)
            except Again:
                break
            news = self.chain.take([frame.buffer for frame in frames]) or news
        self.monitor.read()
        new_connections = self.monitor.take_handshakes()
        if new_connections and self._connections:
            self.chain.lost()
        self._connections += new_connections
        if news:
            self._progressed_at = self._asked_at = monotonic()
            self._patience = self._retry_seconds
        return news

    def watch(self) -> None:
        """Repeat open requests after some time without a reply. Raises ``WeightError`` after ``progress_seconds``."""
        now = monotonic()
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
