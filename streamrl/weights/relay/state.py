"""State of a relay: the pieces that it holds, the requests that it has received, and the requests that it has sent.
Pure: no socket, no thread, no clock. ``relay.py`` feeds it in the engine's process.

A piece (a manifest or a chunk) is fetched when it is first requested, by a worker of this engine or by the relay of
another one, from the first usable source of its part. It is verified, sent to all requesters, and held. A request
before the piece is here waits. When a source is late with a piece, the relay requests this piece from the next source,
too. If the next source is faster, the late one gets no requests for a while. The trainer is the last source, and is
asked again until it replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from msgspec import Struct

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.manifest import ChunkEntry, decode_manifest, digest_of
from streamrl.weights.requests import MANIFEST, NotServed, Piece

UNDER_WAY = 8
"""Largest number of open chunk requests to one source: the chunks that are lost, or come twice, when the source
fails."""
PATIENCE_S = 2.0
"""Time after which a piece is late, so that another source is asked. Doubled for a source that was needlessly
doubted."""
TRAINER_SILENCE_S = 15.0
"""Time without a reply of the trainer after which it is asked again."""
LONGEST_WAIT_S = 20.0
"""Longest time for which a relay's notice that it waits itself counts as a reply; also the longest patience."""
AVOIDED_S = 60.0
"""Time for which a relay that failed gets no requests."""
UNKNOWN_S = 1.0
"""Time for which a request for a version that was not announced here yet waits."""
WRONG_PIECES = 3
"""Number of pieces with a wrong digest from the trainer after which a request is refused."""


class AskPiece(Struct, frozen=True):
    """``GetPiece`` to a relay. ``awaited``: whether the version is being pushed, so that a piece that the relay lacks
    will come."""

    manifest_digest: str
    piece: int
    awaited: bool = False


class Waiting(Struct, frozen=True, tag=True):
    """Reply of a relay that waits for the piece itself, repeated from time to time."""

    manifest_digest: str
    piece: int


RelayReply = Piece | NotServed | Waiting
_PieceKey = tuple[str, int]
"""Digest of the manifest of a part, and number of a piece in it."""


class PieceSource(NamedTuple):
    """The relay of an engine, or the publisher of a trainer rank."""

    endpoint: str
    is_relay: bool


class Asker(NamedTuple):
    """Identity of the connection of a requester: a worker of this engine (``is_local``), or another relay."""

    identity: bytes
    is_local: bool


class _Part:
    """The received pieces of one rank's part of one version. ``sources``: sources of the part in the order of
    preference; empty until the version is announced. ``table``: the chunks by the manifest; None until the manifest is
    here."""

    def __init__(self, sources: tuple[PieceSource, ...] = ()) -> None:
        self.sources = sources
        self.pieces: dict[int, bytes] = {}
        self.table: tuple[ChunkEntry, ...] | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces.values()))

    def lacks(self, number: int) -> bool:
        """Return whether the part is known to have no such piece."""
        return number < MANIFEST or (self.table is not None and number >= len(self.table))


class _OpenPiece:
    """A piece that requesters wait for. ``since``: time of the relay's first request for it. ``askers``: time of each
    requester's request, or of the last ``Waiting`` to it. ``requests``: time of the relay's own request to each source,
    in the order of the requests. ``delivered``: number of pieces that the first source had sent when the second source
    was asked. ``wrong``: number of wrong pieces from the trainer."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.delivered = 0
        self.wrong = 0
        self.askers: dict[Asker, float] = {}
        self.requests: dict[PieceSource, float] = {}


class RelayState:
    """``ask``: called with each request to send. ``reply``: called with each reply to send, and its payload. Either may
    drop the message: it is then requested again. ``now``, in all methods: seconds on one clock."""

    def __init__(
        self, ask: Callable[[PieceSource, AskPiece], object], reply: Callable[[Asker, RelayReply, bytes], object]
    ) -> None:
        self._send = ask
        self._reply = reply
        self._parts: dict[str, _Part] = {}  # in the order of their last use
        self._newest: set[str] = set()
        self._sources: tuple[PieceSource, ...] = ()
        self._open: dict[_PieceKey, _OpenPiece] = {}
        self._refused: dict[tuple[PieceSource, str], str] = {}
        self._avoided: dict[PieceSource, float] = {}
        self._patience: dict[PieceSource, float] = {}
        self._replied_at: dict[PieceSource, float] = {}
        self.delivered: Counter[PieceSource] = Counter()
        """Number of pieces that each source has sent."""

    @property
    def waits(self) -> bool:
        """Return whether a piece is waited for."""
        return bool(self._open)

    @property
    def sources(self) -> set[PieceSource]:
        """Sources of the newest version, and sources with open requests."""
        return {*self._sources, *(source for piece in self._open.values() for source in piece.requests)}

    def announce(self, announced: WeightAnnouncement, now: float) -> None:
        """Note that the workers of this engine are about to fetch this version. Older versions are dropped, the least
        recently used first, until they take at most a quarter of the weights' bytes, as in the trainer's chain."""
        relays = tuple(PieceSource(endpoint, is_relay=True) for endpoint in announced.peers)
        trainers = tuple(PieceSource(source.endpoint, is_relay=False) for source in announced.sources)
        self._sources = (*relays, *trainers)
        self._newest = {source.manifest_digest for source in announced.sources}
        self._refused.clear()
        for part in self._parts.values():
            ranks = [source for source in part.sources if not source.is_relay]
            part.sources = ()
            if ranks:
                part.sources = (*relays, *ranks)
        for source, trainer in zip(announced.sources, trainers, strict=True):
            self._parts.setdefault(source.manifest_digest, _Part()).sources = (*relays, trainer)
        in_use = self._newest | {digest for digest, _ in self._open}
        old_sizes = {digest: part.size for digest, part in self._parts.items() if digest not in in_use}
        quarter = sum(source.total_elements for source in announced.sources) * 2 // 4
        excess_bytes = sum(old_sizes.values()) - quarter
        for digest, size in old_sizes.items():
            if excess_bytes > 0 or not size:
                excess_bytes -= size
                del self._parts[digest]
        self._ask(now)

    def requested(self, asker: Asker, ask: AskPiece, now: float) -> None:
        """Handle a request of a worker or of another relay: reply at once, or wait for the piece."""
        digest = ask.manifest_digest
        number = ask.piece
        part = self._parts.pop(digest, None) or _Part()
        if asker.is_local and not part.sources:
            part.sources = self._sources
        expected = asker.is_local or ask.awaited or (digest, number) in self._open
        if expected or part.sources:
            self._parts[digest] = part
        if number in part.pieces:
            self._reply(asker, Piece(digest, number), part.pieces[number])
        elif not expected or part.lacks(number):
            self._reply(asker, NotServed(digest, f"piece {number} is not held here"), b"")
        else:
            if not part.table:
                self._open.setdefault((digest, MANIFEST), _OpenPiece(now))
            open_piece = self._open.setdefault((digest, number), _OpenPiece(now))
            open_piece.askers[asker] = now
            self._ask(now)

    def replied(self, source: PieceSource, reply: RelayReply | None, payload: bytes, now: float) -> None:
        """Handle a reply of a source. ``reply``: the header; None where it could not be decoded."""
        self._replied_at[source] = now
        if reply is None:
            self._avoid(source, now)
        elif isinstance(reply, NotServed):
            self._refused[source, reply.manifest_digest] = reply.reason
            for (digest, _), piece in self._open.items():
                if digest == reply.manifest_digest:
                    piece.requests.pop(source, None)
        else:
            key = (reply.manifest_digest, reply.piece)
            open_piece = self._open.get(key)  # None where another source was faster
            if open_piece is not None and isinstance(reply, Piece):
                self._take(source, key, open_piece, payload, now)
            elif open_piece is not None and source in open_piece.requests and now - open_piece.since < LONGEST_WAIT_S:
                open_piece.requests[source] = now
        self._ask(now)

    def tick(self, now: float) -> None:
        """Look for late pieces. To be called a few times a second while ``waits``."""
        doubted = {next(iter(piece.requests)) for piece in self._open.values() if len(piece.requests) > 1}
        for key, piece in list(self._open.items()):
            if not self._parts[key[0]].sources and now - piece.since > UNKNOWN_S:
                self._refuse(key, "it was not announced to this relay")
                continue
            if piece.requests:
                self._ask_another(key, piece, doubted, now)
            for asker, since in piece.askers.items():
                if not asker.is_local and now - since > PATIENCE_S / 2:
                    piece.askers[asker] = now
                    self._reply(asker, Waiting(*key), b"")
        self._ask(now)

    def _ask(self, now: float) -> None:
        """Request the pieces that have no open request, each from the first usable source, within the limit of open
        requests to one source."""
        under_way = Counter(source for piece in self._open.values() for source in piece.requests)
        for key, piece in list(self._open.items()):
            part = self._parts[key[0]]
            if piece.requests or not part.sources:
                continue
            source = self._usable_source(key, piece, now)
            if source is None or part.lacks(key[1]):
                self._refuse(key, self._refused.get((part.sources[-1], key[0]), "there is no such piece"))
            elif key[1] == MANIFEST or (part.table is not None and under_way[source] < UNDER_WAY):
                under_way[source] += 1
                piece.since = now
                self._request(source, key, piece, now)

    def _request(self, source: PieceSource, key: _PieceKey, piece: _OpenPiece, now: float) -> None:
        piece.requests[source] = now
        self._send(source, AskPiece(*key, awaited=source.is_relay and key[0] in self._newest))

    def _usable_source(self, key: _PieceKey, piece: _OpenPiece, now: float) -> PieceSource | None:
        """Return the first source of the part that has no open request for the piece, is not avoided, and has not
        refused the part."""
        for source in self._parts[key[0]].sources:
            avoided = source.is_relay and self._avoided.get(source, -inf) > now
            if not avoided and source not in piece.requests and (source, key[0]) not in self._refused:
                return source
        return None

    def _ask_another(self, key: _PieceKey, piece: _OpenPiece, doubted: set[PieceSource], now: float) -> None:
        """Request a late piece from one more source. ``doubted``: first sources of pieces for which another source was
        asked. Only one piece of a source at a time is requested from another source."""
        first = next(iter(piece.requests))
        last, asked_at = next(reversed(piece.requests.items()))
        if not last.is_relay:
            if now - max(asked_at, self._replied_at.get(last, asked_at)) > TRAINER_SILENCE_S:
                self._request(last, key, piece, now)
        elif now - asked_at > self._patience.get(last, PATIENCE_S) and (first not in doubted or last != first):
            other = self._usable_source(key, piece, now)
            if other is not None:
                doubted.add(first)
                piece.delivered = self.delivered[first]
                self._request(other, key, piece, now)

    def _avoid(self, source: PieceSource, now: float) -> None:
        if source.is_relay:
            self._avoided[source] = now + AVOIDED_S
            for piece in self._open.values():
                piece.requests.pop(source, None)

    def _refuse(self, key: _PieceKey, reason: str) -> None:
        for asker in self._open.pop(key).askers:
            self._reply(asker, NotServed(key[0], reason), b"")

    def _take(self, source: PieceSource, key: _PieceKey, piece: _OpenPiece, payload: bytes, now: float) -> None:
        """Verify a piece, hold it, and send it to all requesters. A source that sent a wrong piece is avoided."""
        self.delivered[source] += 1
        try:
            self._hold(key, payload, source)
        except WeightError as error:
            self._avoid(source, now)
            piece.requests.pop(source, None)
            if not source.is_relay:
                piece.wrong += 1
            if piece.wrong >= WRONG_PIECES:
                self._refuse(key, str(error))
            return
        del self._open[key]
        for asker in piece.askers:
            self._reply(asker, Piece(*key), payload)
        first = next(iter(piece.requests), source)
        if len(piece.requests) > 1 and source != first and self.delivered[first] == piece.delivered:
            self._avoid(first, now)  # it has sent nothing since the other source was asked
        elif len(piece.requests) > 1:
            self._patience[first] = min(2 * self._patience.get(first, PATIENCE_S), LONGEST_WAIT_S)

    def _hold(self, key: _PieceKey, payload: bytes, source: PieceSource) -> None:
        """Verify a piece by its digest and hold it. Raises ``WeightError`` for a piece with another digest."""
        digest, number = key
        part = self._parts[digest]
        if number == MANIFEST:
            manifest = decode_manifest(payload, digest, source.endpoint)
            part.table = manifest.chunks
            if manifest.base_digest:  # of the same rank; a worker asks for it when it has this manifest
                self._parts.setdefault(manifest.base_digest, _Part(part.sources))
        elif part.table is not None and digest_of(payload) != part.table[number].digest:
            raise WeightError(f"chunk {number} of manifest {digest} came from {source.endpoint} with another digest")
        part.pieces[number] = payload
