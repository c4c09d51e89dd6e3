"""State of a receiver for one trainer rank's parts: the open requests, the verified chunks, and the patches that have
arrived. Pure: no socket, no clock, no thread. ``fetch.py`` drives it in a vLLM worker's process.

Frames may come in any order and any number of times. Each leads to a verified chunk, to another request, or to a
``WeightError``. Verified chunks stay, so that an interrupted transfer can continue."""

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
"""Number of times that a manifest or a chunk may come with a wrong digest."""

WRONG_REPLIES = 16
"""Number of replies of one source that cannot be decoded or matched before the fetch fails. After each of them all open
requests are repeated, since nobody knows to which request it belonged."""

PATCH_OVERHEAD = 4096
"""Bytes by which a patch may be larger than the dense form of its unit, besides a thousandth of that form. A publisher
makes no patch that is larger than the dense form."""

MOST_BYTES_AN_ELEMENT = 4
MOST_PARTS = 1024
"""Limits of a chain, in bytes for each element and in parts: complete weights take fewer bytes than a longer chain."""


class ReceivedPart:
    """One rank's part of one version, a delta or complete, with the pieces that have arrived. ``digest``: digest of its
    manifest. ``endpoint``: source of the part, for errors."""

    def __init__(self, digest: str, endpoint: str) -> None:
        self.digest = digest
        self.manifest: Manifest | None = None
        self.problem = ""
        self._endpoint = endpoint
        self._payload = bytearray()
        self._starts = [0]
        self._ends: list[int] = []
        self._missing: OrderedDict[int, None] = OrderedDict.fromkeys([MANIFEST])  # with the requested pieces
        self._requested: set[int] = set()
        self._failures: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        """Return whether every chunk is here."""
        return not self._missing

    @property
    def requested_bytes(self) -> int:
        """Size of the chunks that were requested and have not arrived."""
        return sum(map(self._size, self._requested))

    def lost(self) -> None:
        """Mark all open requests as lost, to be sent again. A reply that comes nevertheless is a duplicate."""
        self._requested.clear()

    def restart(self) -> None:
        """Prepare another transfer: verified pieces stay, all others are requested again."""
        self._failures.clear()
        self.lost()

    def requests(self, free_bytes: int, *, at_least_one: bool) -> Iterator[GetPiece]:
        """Yield requests for the manifest, then for chunks with at most ``free_bytes`` together. ``at_least_one``:
        whether the first chunk may be larger."""
        for piece in self._missing:
            if piece in self._requested:
                continue
            free_bytes -= self._size(piece)
            if free_bytes < 0 and not at_least_one:
                return
            at_least_one = False
            self._requested.add(piece)
            yield GetPiece(self.digest, piece)

    def arrived_patches(self) -> int:
        """Count the patches before the first missing byte, in the order of the manifest."""
        if self.manifest is None:
            return 0
        first_missing = next(iter(self._missing), len(self._starts) - 1)
        return bisect_right(self._ends, self._starts[first_missing])

    def patch_bytes(self) -> Iterator[tuple[WorkUnit, memoryview]]:
        """Yield every patch of the manifest: its unit, and its bytes in the payload, which may not have arrived."""
        if self.manifest is None:
            return
        view = memoryview(self._payload).toreadonly()
        for entry, end in zip(self.manifest.units, self._ends, strict=True):
            yield entry.unit, view[end - entry.payload_bytes : end]

    def describe(self) -> str:
        """Describe what is missing, for an error message."""
        missing = "its manifest is missing"
        if self.manifest is not None:
            missing = f"{len(self._missing)} of {len(self.manifest.chunks)} chunks are missing"
        return f"{missing}; {self.problem}" if self.problem else missing

    def take(self, piece: int, frame: memoryview, refuse: Callable[[Manifest], None]) -> bool:
        """Take a piece that has arrived. Returns whether it was missing and has the right digest. ``refuse``: called
        with the manifest; raises ``WeightError`` for a manifest that does not fit."""
        if piece not in self._missing:
            return False  # a duplicate, or a piece that was not requested
        name = "the manifest"
        digest = self.digest
        size = len(frame)
        if self.manifest is not None:
            name = f"chunk {piece}"
            digest = self.manifest.chunks[piece].digest
            size = self._size(piece)
        actual = digest_of(frame)
        if actual != digest or len(frame) != size:
            self._requested.discard(piece)
            self._failed(piece, name, f"{actual} ({len(frame)} bytes)", f"{digest} ({size} bytes)")
            return False
        if self.manifest is None:
            self._open(frame, refuse)
        else:
            self._payload = self._payload or bytearray(self._starts[-1])
            self._payload[self._starts[piece] : self._starts[piece + 1]] = frame
        del self._missing[piece]
        self._requested.discard(piece)
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
        """Bytes of credit that a piece takes; a manifest takes no credit."""
        return 0 if self.manifest is None else self.manifest.chunks[piece].payload_bytes

    def _failed(self, piece: int, name: str, actual: str, expected: str) -> None:
        """Count a piece with a wrong digest. Raises ``WeightError`` after ``PIECE_ATTEMPTS``."""
        self._failures[piece] += 1
        times = self._failures[piece]
        self.problem = f"{name} came {times} times with digest {actual}"
        if times >= PIECE_ATTEMPTS:
            raise WeightError(
                f"{name} from {self._endpoint} came {times} times with digest {actual}; announced was {expected}"
            )


class ReceivedChain:
    """One rank's announced part, and the rank's parts of earlier versions on which it is made, as far back as the
    receiver has asked. ``parts``: all of them, the newest first. ``refusal``: reason of the source why it does not
    serve an earlier version; empty without one. ``parts_by_digest``: parts of earlier transfers, to continue with; new
    parts are added."""

    def __init__(
        self, source: WeightSource, announced: WeightAnnouncement, parts_by_digest: dict[str, ReceivedPart]
    ) -> None:
        self.source = source
        self.parts: list[ReceivedPart] = []
        self.refusal = ""
        self._announced = announced
        self._parts_by_digest = parts_by_digest
        self._fetching = False
        self._wrong_replies = 0
        self._problem = ""
        self._add(source.manifest_digest)
        if self.oldest.manifest is not None:
            self._refuse(self.oldest.manifest)

    @property
    def oldest(self) -> ReceivedPart:
        """The part of the earliest version."""
        return self.parts[-1]

    @property
    def complete(self) -> bool:
        """Return whether every chunk of every part is here."""
        return all(part.complete for part in self.parts)

    def extend(self) -> None:
        """Add the part of the version on which the oldest part is made, or set ``refusal`` where it is not served or
        the chain would be too long."""
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
        """Start to request chunks."""
        self._fetching = True

    def lost(self) -> None:
        """Mark all open requests as lost, to be sent again."""
        for part in self.parts:
            part.lost()

    def requests(self, credit_bytes: int) -> Iterator[GetPiece]:
        """Yield the next requests. At most ``credit_bytes`` are under way then, or one chunk."""
        for part in reversed(self.parts):
            is_needed = self._fetching if part.manifest is not None else not self.refusal
            if is_needed:
                under_way = sum(part.requested_bytes for part in self.parts)
                yield from part.requests(credit_bytes - under_way, at_least_one=not under_way)

    def take(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Take a reply. Returns whether it brought something new. Raises ``WeightError`` when the source does not serve
        the part, or repeatedly sends wrong pieces or replies."""
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
        part = self._parts_by_digest.get(digest) or ReceivedPart(digest, self.source.endpoint)
        part.restart()
        self._parts_by_digest[digest] = part
        self.parts.append(part)

    def _reply_of(self, frames: Sequence[bytes | memoryview]) -> Reply | None:
        """Decode the header of a reply. Returns None where it cannot be decoded or is for no part of the chain; raises
        ``WeightError`` after ``WRONG_REPLIES`` of these."""
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
        """Raise ``WeightError`` unless the manifest of the oldest part fits: that of the announced part to the
        announcement, that of an earlier part to the part that is made on it."""
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
            base = (manifest.run_id, manifest.rank, manifest.policy_version, manifest.part_hash)
            expected_base = (newer.run_id, newer.rank, newer.base_version, newer.base_part_hash)
            if base != expected_base:
                raise WeightError(
                    f"manifest {self.oldest.digest} from {self.source.endpoint} is of (run, rank, version, part of the "
                    f"state hash) {base}; version {newer.policy_version} is made on {expected_base}"
                )
        if manifest.base_version is not None and manifest.base_version >= manifest.policy_version:
            raise WeightError(f"version {manifest.policy_version} cannot be made on version {manifest.base_version}")
        self._refuse_impossible(manifest)

    def _refuse_impossible(self, manifest: Manifest) -> None:
        """Raise ``WeightError`` for a manifest with impossible sizes, or whose patches decode to more elements than
        were announced, before memory is allocated for them."""
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
