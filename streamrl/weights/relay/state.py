"""State of a relay: what it holds, what is asked of it, and what it asks for. Pure: no socket, no thread, no clock.

A piece (a manifest or a chunk) is fetched once it is asked for, by a worker of this engine or by a relay below, from
the first source of its part that is fit; it is verified, sent to all that wait for it, and held. An early request
waits. A source that is late with a piece costs that piece: the next source is asked for it, too, and where that one is
faster the late one is asked for nothing for a while. The trainer is asked last, and again until it answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.manifest import ChunkEntry, decode_manifest, digest_of
from streamrl.weights.requests import MANIFEST, NotServed, Piece

UNDER_WAY = 8
"""Chunks that are asked of one source at a time: what is lost, or comes twice, when it fails."""
PATIENCE_S = 2.0
TRAINER_SILENCE_S = 15.0
"""How late a piece may be before another source is asked (doubled whenever that was needless); how long nothing may
come from the trainer before it is asked again."""
LONGEST_WAIT_S = 20.0
AVOIDED_S = 60.0
UNKNOWN_S = 1.0
"""How long a relay is believed that it waits itself, and the longest patience; one that failed is asked for nothing; a
piece waits of a version that is being pushed, and was not announced here yet."""
WRONG_PIECES = 3
"""How often the trainer may send a piece that does not verify."""


class AskPiece(msgspec.Struct, frozen=True):
    """``GetPiece`` to a relay. ``awaited``: the version is being pushed, so what is not there will come."""

    manifest_digest: str
    piece: int
    awaited: bool = False


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Reply to a relay below from time to time: this one lives, and waits for the piece as well."""

    manifest_digest: str
    piece: int


RelayReply = Piece | NotServed | Waiting


class PieceSource(NamedTuple):
    """The relay of an engine, or a trainer rank's publisher."""

    endpoint: str
    is_relay: bool


class Asker(NamedTuple):
    """The identity of a connection, of a worker of this engine or of another relay."""

    identity: bytes
    is_local: bool


class _Part:
    """One rank's part of one version as far as it came. ``sources``: empty where it was not announced yet."""

    def __init__(self, sources: tuple[PieceSource, ...] = ()) -> None:
        self.sources = sources
        self.pieces: dict[int, bytes] = {}
        self.table: tuple[ChunkEntry, ...] | None = None

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces.values()))

    def lacks(self, number: int) -> bool:
        return number < MANIFEST or (self.table is not None and number >= len(self.table))


class _OpenPiece:
    """A piece that is waited for. ``asked``: when, by source, in the order in which they were asked; ``delivered``: how
    many pieces the first of them had sent when the second one was asked."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.delivered = 0
        self.wrong = 0
        self.askers: dict[Asker, float] = {}
        self.asked: dict[PieceSource, float] = {}


class RelayState:
    """``ask`` is called with each request to be sent, ``reply`` with each reply and its piece; what either cannot send
    is asked for again."""

    def __init__(
        self, ask: Callable[[PieceSource, AskPiece], object], reply: Callable[[Asker, RelayReply, bytes], object]
    ) -> None:
        self._send = ask
        self._reply = reply
        self._parts: dict[str, _Part] = {}  # the one that was used last is the last one
        self._newest: set[str] = set()
        self._sources: tuple[PieceSource, ...] = ()
        self._open: dict[tuple[str, int], _OpenPiece] = {}
        self._refused: dict[tuple[PieceSource, str], str] = {}
        self._avoided: dict[PieceSource, float] = {}
        self._patience: dict[PieceSource, float] = {}
        self._heard: dict[PieceSource, float] = {}
        self.delivered: Counter[PieceSource] = Counter()
        """How many pieces each source has sent."""

    @property
    def waits(self) -> bool:
        """Return whether a piece is waited for."""
        return bool(self._open)

    @property
    def sources(self) -> set[PieceSource]:
        """Those that may be asked, or were."""
        return {*self._sources, *(source for piece in self._open.values() for source in piece.asked)}

    def announce(self, announced: WeightAnnouncement, now: float) -> None:
        """The workers of this engine are about to fetch this version. Older ones are forgotten, those first that were
        not asked for the longest, above a quarter of the weights' bytes: so much the trainer's chain takes, too."""
        relays = tuple(PieceSource(endpoint, is_relay=True) for endpoint in announced.peers)
        self._sources = (*relays, *(PieceSource(one.endpoint, is_relay=False) for one in announced.sources))
        self._newest = {one.manifest_digest for one in announced.sources}
        self._refused.clear()
        for part in self._parts.values():
            ranks = [source for source in part.sources if not source.is_relay]
            part.sources = (*relays, *ranks) if ranks else ()
        for one, source in zip(announced.sources, self._sources[len(relays) :], strict=True):
            self._parts.setdefault(one.manifest_digest, _Part()).sources = (*relays, source)
        kept = self._newest | {digest for digest, _ in self._open}
        old = {digest: part.size for digest, part in self._parts.items() if digest not in kept}
        above = sum(old.values()) - sum(one.total_elements for one in announced.sources) * 2 // 4
        for digest, size in old.items():
            if above > 0 or not size:
                above -= size
                del self._parts[digest]
        self._ask(now)

    def requested(self, asker: Asker, ask: AskPiece, now: float) -> None:
        """Somebody asks for a piece."""
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
            for wanted in (number,) if part.table else (MANIFEST, number):
                self._open.setdefault((digest, wanted), _OpenPiece(now))
            self._open[digest, number].askers[asker] = now
            self._ask(now)

    def replied(self, source: PieceSource, reply: RelayReply | None, payload: bytes, now: float) -> None:
        """A source replies; None: rubbish."""
        self._heard[source] = now
        if reply is None:
            self._avoid(source, now)
        elif isinstance(reply, NotServed):
            self._refused[source, reply.manifest_digest] = reply.reason
            for (digest, _), piece in self._open.items():
                if digest == reply.manifest_digest:
                    piece.asked.pop(source, None)
        elif (key := (reply.manifest_digest, reply.piece)) in self._open:
            piece = self._open[key]
            if isinstance(reply, Piece):
                self._take(source, key, piece, payload, now)
            elif source in piece.asked and now - piece.since < LONGEST_WAIT_S:
                piece.asked[source] = now
        self._ask(now)

    def tick(self, now: float) -> None:
        """To be called a few times a second while ``waits``."""
        doubted = {next(iter(piece.asked)) for piece in self._open.values() if len(piece.asked) > 1}
        for key, piece in list(self._open.items()):
            if not self._parts[key[0]].sources and now - piece.since > UNKNOWN_S:
                self._refuse(key, "it was not announced to this relay")
                continue
            if piece.asked:
                self._ask_another(key, piece, doubted, now)
            for asker, since in piece.askers.items():
                if not asker.is_local and now - since > PATIENCE_S / 2:
                    piece.askers[asker] = now
                    self._reply(asker, Waiting(*key), b"")
        self._ask(now)

    def _ask(self, now: float) -> None:
        """Ask for what was not asked for yet, of the first source that is fit, as far as that one may be asked."""
        under_way = Counter(source for piece in self._open.values() for source in piece.asked)
        for key, piece in list(self._open.items()):
            part = self._parts[key[0]]
            if piece.asked or not part.sources:
                continue
            source = self._fit(key, piece, now)
            if source is None or part.lacks(key[1]):
                self._refuse(key, self._refused.get((part.sources[-1], key[0]), "there is no such piece"))
            elif key[1] == MANIFEST or (part.table is not None and under_way[source] < UNDER_WAY):
                under_way[source] += 1
                piece.since = now
                self._ask_of(source, key, piece, now)

    def _ask_of(self, source: PieceSource, key: tuple[str, int], piece: _OpenPiece, now: float) -> None:
        piece.asked[source] = now
        self._send(source, AskPiece(*key, awaited=source.is_relay and key[0] in self._newest))

    def _fit(self, key: tuple[str, int], piece: _OpenPiece, now: float) -> PieceSource | None:
        for source in self._parts[key[0]].sources:
            avoided = source.is_relay and self._avoided.get(source, -math.inf) > now
            if not avoided and source not in piece.asked and (source, key[0]) not in self._refused:
                return source
        return None

    def _ask_another(self, key: tuple[str, int], piece: _OpenPiece, doubted: set[PieceSource], now: float) -> None:
        """Ask one more source where a piece is late; for one piece of a source at a time."""
        first = next(iter(piece.asked))
        last, asked_at = next(reversed(piece.asked.items()))
        if not last.is_relay:
            if now - max(asked_at, self._heard.get(last, asked_at)) > TRAINER_SILENCE_S:
                self._ask_of(last, key, piece, now)
        elif now - asked_at > self._patience.get(last, PATIENCE_S) and (first not in doubted or last != first):
            other = self._fit(key, piece, now)
            if other is not None:
                doubted.add(first)
                piece.delivered = self.delivered[first]
                self._ask_of(other, key, piece, now)

    def _avoid(self, source: PieceSource, now: float) -> None:
        if source.is_relay:
            self._avoided[source] = now + AVOIDED_S
            for piece in self._open.values():
                piece.asked.pop(source, None)

    def _refuse(self, key: tuple[str, int], reason: str) -> None:
        for asker in self._open.pop(key).askers:
            self._reply(asker, NotServed(key[0], reason), b"")

    def _take(self, source: PieceSource, key: tuple[str, int], piece: _OpenPiece, payload: bytes, now: float) -> None:
        self.delivered[source] += 1
        try:
            self._hold(key, payload, source)
        except WeightError as error:
            self._avoid(source, now)
            piece.asked.pop(source, None)
            piece.wrong += not source.is_relay
            if piece.wrong >= WRONG_PIECES:
                self._refuse(key, str(error))
            return
        del self._open[key]
        for asker in piece.askers:
            self._reply(asker, Piece(*key), payload)
        first = next(iter(piece.asked), source)
        if len(piece.asked) > 1 and source != first and self.delivered[first] == piece.delivered:
            self._avoid(first, now)  # it sent nothing in the time that the other one took
        elif len(piece.asked) > 1:
            self._patience[first] = min(2 * self._patience.get(first, PATIENCE_S), LONGEST_WAIT_S)

    def _hold(self, key: tuple[str, int], payload: bytes, source: PieceSource) -> None:
        """Raises ``WeightError`` for a piece that is not what its digest says."""
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
