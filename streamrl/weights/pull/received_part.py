"""Receiver's state of one rank's part of one link: what to request, what to keep, what can be decoded. Pure: no socket,
no clock, no thread. Frames may come in any order and any number of times; each ends as a verified chunk, as another
request, or as a ``WeightError``. Verified chunks stay, so that a transfer continues where it stopped."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, WeightSource
from streamrl.weights.manifest import Manifest, WorkUnit, decode_manifest, digest_of
from streamrl.weights.requests import CHUNK_BYTES, MANIFEST, GetPiece, NotServed, Reply, decode_reply

PIECE_ATTEMPTS = 3
"""How often a manifest or a chunk may come with a wrong digest."""

WRONG_REPLIES = 16
"""How many replies of one source may be rubbish before it is given up. After each, what is under way is asked again,
since nobody knows what it was the answer to."""

PATCH_OVERHEAD = 4096
"""Bytes that a patch may be larger than the dense form of its shard, besides a thousandth of it: more is a lie."""

MOST_BYTES_AN_ELEMENT = 4
MOST_PARTS = 1024
"""Of a chain: complete weights are shorter."""


class ReceivedPart:
    """One rank's part of one version, as a delta or complete, as far as it came. ``digest``: of its manifest."""

    def __init__(self, digest: str, endpoint: str) -> None:
        self.digest = digest
        self.manifest: Manifest | None = None
        self.problem = ""
        self._endpoint = endpoint
        self._payload = bytearray()
        self._starts = [0]
        self._ends: list[int] = []
        self._missing: OrderedDict[int, None] = OrderedDict.fromkeys([MANIFEST])  # what was asked for, too
        self._asked: set[int] = set()
        self._failures: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        """Return whether every chunk is here."""
        return not self._missing

    @property
    def asked_bytes(self) -> int:
        """Bytes of the chunks that were asked for and have not come."""
        return sum(map(self._size, self._asked))

    def lost(self) -> None:
        """Mark all open requests as lost, to be sent again. A reply that comes nevertheless is a duplicate."""
        self._asked.clear()

    def begin_again(self) -> None:
        """Another transfer: what was verified stays, all else is asked for again."""
        self._failures.clear()
        self.lost()

    def requests(self, free_bytes: int, *, one_at_least: bool) -> Iterator[GetPiece]:
        """Yield requests for the manifest, then for chunks of at most ``free_bytes`` together."""
        for piece in self._missing:
            if piece in self._asked:
                continue
            free_bytes -= self._size(piece)
            if free_bytes < 0 and not one_at_least:
                return
            one_at_least = False
            self._asked.add(piece)
            yield GetPiece(self.digest, piece)

    def whole_patches(self) -> int:
        """Count the patches, in the order of the manifest, that have arrived from their first to their last byte."""
        leading = next(iter(self._missing), len(self._starts) - 1)
        return 0 if self.manifest is None else bisect_right(self._ends, self._starts[leading])

    def patch_bytes(self) -> Iterator[tuple[WorkUnit, memoryview]]:
        """Every patch of the manifest: what it is of, and its place in the payload, whether it is here or not."""
        view = memoryview(self._payload).toreadonly()
        entries = () if self.manifest is None else self.manifest.units
        for entry, end in zip(entries, self._ends, strict=True):
            yield entry.unit, view[end - entry.payload_bytes : end]

    def describe(self) -> str:
        """Describe what is missing, for an error message."""
        missing = "its manifest is missing"
        if self.manifest is not None:
            missing = f"{len(self._missing)} of {len(self.manifest.chunks)} chunks are missing"
        return f"{missing}; {self.problem}" if self.problem else missing

    def take(self, piece: int, frame: memoryview, refuse: Callable[[Manifest], None]) -> bool:
        """Returns whether it was missing, and is what was announced. ``refuse``: raises for a manifest that does not
        fit."""
        if piece not in self._missing:
            return False  # a duplicate, or one that nobody asked for
        name = "the manifest"
        digest = self.digest
        size = len(frame)
        if self.manifest is not None:
            name = f"chunk {piece}"
            digest = self.manifest.chunks[piece].digest
            size = self._size(piece)
        actual = digest_of(frame)
        if actual != digest or len(frame) != size:
            self._asked.discard(piece)
            self._failed(piece, name, f"{actual} ({len(frame)} bytes)", f"{digest} ({size} bytes)")
            return False
        if self.manifest is None:
            self._open(frame, refuse)
        else:
            self._payload = self._payload or bytearray(self._starts[-1])
            self._payload[self._starts[piece] : self._starts[piece + 1]] = frame
        del self._missing[piece]
        self._asked.discard(piece)
        return True

    def _open(self, encoded: memoryview, refuse: Callable[[Manifest], None]) -> None:
        manifest = decode_manifest(encoded, self.digest, self._endpoint)
        refuse(manifest)
        for chunk in manifest.chunks:
            self._starts.append(self._starts[-1] + chunk.payload_bytes)
        self._ends = list(accumulate(entry.payload_bytes for entry in manifest.units))
        self._missing.update(dict.fromkeys(range(len(manifest.chunks))))
        self.manifest = manifest

    def _size(self, piece: int) -> int:
        """Bytes of credit that a piece takes; a manifest takes none."""
        return 0 if self.manifest is None else self.manifest.chunks[piece].payload_bytes

    def _failed(self, piece: int, name: str, came: str, wanted: str) -> None:
        self._failures[piece] += 1
        times = self._failures[piece]
        self.problem = f"{name} came {times} times with digest {came}"
        if times >= PIECE_ATTEMPTS:
            raise WeightError(
                f"{name} from {self._endpoint} came {times} times with digest {came}; announced was {wanted}"
            )


class ReceivedChain:
    """Receiver's state of one rank's announced version: the announced part, and those of earlier versions that it is
    made on, as far back as the receiver asked. ``parts``: the announced one first. ``kept``: parts of earlier
    transfers, by digest; parts that are begun here are put there."""

    def __init__(self, source: WeightSource, announced: WeightAnnouncement, kept: dict[str, ReceivedPart]) -> None:
        self.source = source
        self.parts: list[ReceivedPart] = []
        self.refusal = ""
        self._announced = announced
        self._kept = kept
        self._fetching = False
        self._wrong_replies = 0
        self._problem = ""
        self._add(source.manifest_digest)
        if (manifest := self.oldest.manifest) is not None:
            self._refuse(manifest)

    @property
    def oldest(self) -> ReceivedPart:
        """The part that goes back furthest."""
        return self.parts[-1]

    @property
    def complete(self) -> bool:
        """Return whether every chunk of every part is here."""
        return all(part.complete for part in self.parts)

    def extend(self) -> None:
        """Ask for the version that the oldest part is made on, too. ``refusal``: why it is not to be had."""
        manifests = [part.manifest for part in self.parts if part.manifest is not None]
        size = sum(manifest.payload_bytes for manifest in manifests)
        if not manifests[-1].base_digest:
            self.refusal = f"no version is served before {manifests[-1].base_version}"
        elif size > MOST_BYTES_AN_ELEMENT * self.source.total_elements or len(self.parts) > MOST_PARTS:
            self.refusal = (
                f"{len(self.parts)} versions take {size} bytes, and lead back to {manifests[-1].base_version}"
            )
        else:
            self._add(manifests[-1].base_digest)

    def fetch(self) -> None:
        """Begin to request chunks."""
        self._fetching = True

    def lost(self) -> None:
        """Mark all open requests as lost, to be sent again."""
        for part in self.parts:
            part.lost()

    def requests(self, credit_bytes: int) -> Iterator[GetPiece]:
        """Yield the next requests, so that no more than ``credit_bytes`` (but one chunk at least) are under way."""
        for part in reversed(self.parts):
            wanted = self._fetching if part.manifest is not None else not self.refusal
            if wanted:
                asked = sum(part.asked_bytes for part in self.parts)
                yield from part.requests(credit_bytes - asked, one_at_least=not asked)

    def take(self, frames: Sequence[bytes | memoryview]) -> bool:
        """One reply. Returns whether it brought something new. Raises ``WeightError`` when the source does not serve
        the part, or keeps sending what does not verify."""
        reply = self._reply_of(frames)
        if reply is None:
            return False
        part = next(part for part in self.parts if part.digest == reply.manifest_digest)
        if isinstance(reply, NotServed):
            if part is not self.parts[0] and part.manifest is None:
                self.refusal = reply.reason
                return True
            raise WeightError(
                f"{self.source.endpoint} does not serve version {self._announced.policy_version} "
                f"(manifest {part.digest}): {reply.reason}"
            )
        return part.take(reply.piece, memoryview(frames[1]), self._refuse)

    def describe(self) -> str:
        """Describe what is missing, for an error message."""
        part = next((part for part in reversed(self.parts) if not part.complete), self.oldest)
        described = part.describe()
        return f"{described}; {self._problem}" if self._problem else described

    def _add(self, digest: str) -> None:
        part = self._kept.get(digest) or ReceivedPart(digest, self.source.endpoint)
        part.begin_again()
        self._kept[digest] = part
        self.parts.append(part)

    def _reply_of(self, frames: Sequence[bytes | memoryview]) -> Reply | None:
        """The header, None when it is rubbish or about something else."""
        problem = ""
        try:
            reply = decode_reply(frames[0]) if len(frames) == 2 else None
        except WeightError as error:
            reply = None
            problem = str(error)
        if reply is not None and any(part.digest == reply.manifest_digest for part in self.parts):
            return reply
        if reply is not None:
            problem = f"it answered about {reply.manifest_digest or 'no manifest'}, which was not asked for"
            if isinstance(reply, NotServed):
                problem = reply.reason
        self._problem = problem or f"a reply has {len(frames)} frames"
        self._wrong_replies += 1
        if self._wrong_replies >= WRONG_REPLIES:
            raise WeightError(f"{self.source.endpoint} does not speak this protocol: {self._problem}")
        self.lost()
        return None

    def _refuse(self, manifest: Manifest) -> None:
        """Raise ``WeightError`` for the manifest of a part that is not what was announced, or what leads there."""
        if len(self.parts) == 1:
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
        else:
            newer = self.parts[-2].manifest
            assert newer is not None
            found = (manifest.run_id, manifest.rank, manifest.policy_version, manifest.part_hash)
            wanted = (newer.run_id, newer.rank, newer.base_version, newer.base_part_hash)
            if found != wanted:
                raise WeightError(
                    f"manifest {self.oldest.digest} from {self.source.endpoint} is of (run, rank, version, part of the "
                    f"state hash) {found}; version {newer.policy_version} is made on {wanted}"
                )
        if manifest.base_version is not None and manifest.base_version >= manifest.policy_version:
            raise WeightError(f"version {manifest.policy_version} cannot be made on version {manifest.base_version}")
        self._refuse_impossible(manifest)

    def _refuse_impossible(self, manifest: Manifest) -> None:
        """Refuse, before anything is allocated, a manifest whose patches decode to more than was announced."""
        digest = self.oldest.digest
        if any(not 0 < chunk.payload_bytes <= CHUNK_BYTES for chunk in manifest.chunks):
            raise WeightError(f"manifest {digest} has a chunk that is empty or over {CHUNK_BYTES} bytes")
        elements = sum(entry.unit.count for entry in manifest.units)
        if elements > self.source.total_elements:
            raise WeightError(
                f"manifest {digest} lists shards of {elements} elements; announced were {self.source.total_elements}"
            )
        for entry in manifest.units:
            unit = entry.unit
            size = entry.payload_bytes
            dense = unit.count * unit.bits.itemsize
            if not 0 <= size <= dense + dense // 1000 + PATCH_OVERHEAD:
                raise WeightError(
                    f"manifest {digest}: the patch of {unit.name!r} has {size} bytes for {unit.count} elements; "
                    f"dense it would have {dense}"
                )
