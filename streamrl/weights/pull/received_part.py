"""What has arrived of one rank's part of a version: what to ask for, what to keep, what can be decoded.

Pure: no socket, no clock, no thread. Whatever frames come, in whatever order and however often, each ends as a verified
chunk, as another request, or as a ``WeightError``. What is verified stays, so that a transfer goes on where it stopped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement, WeightSource
from streamrl.weights.manifest import CHUNK_BYTES, Manifest, TensorEntry, decode_manifest, digest_of
from streamrl.weights.requests import (
    FoldReply,
    GetChunk,
    GetFold,
    GetManifest,
    ManifestReply,
    NotServed,
    Reply,
    Request,
    decode_reply,
)
from streamrl.weights.work_units import WorkUnit, listed_units

CHUNK_ATTEMPTS = 3
"""How often a manifest or a chunk may come with a wrong digest."""

WRONG_REPLIES = 16
"""How many replies of one source may be rubbish before it is given up. After each, what is under way is asked again,
since nobody knows what it was the answer to."""

PATCH_OVERHEAD = 4096
"""Bytes that a patch may be larger than the dense form of its shard, besides a thousandth of it: more is a lie."""

_MANIFEST = -1  # among the attempts, where chunks are counted from 0


class ReceivedPart:
    """One rank's part of an announced version, as far as it came.

    ``manifest`` is that of the payload that is fetched: the announced one, or that of a folded delta (``fold_from``).
    ``fold_refusal``: why there is no folded delta.
    """

    def __init__(self, source: WeightSource, announced: WeightAnnouncement) -> None:
        self.source = source
        self.announced_manifest: Manifest | None = None
        self.manifest: Manifest | None = None
        self.fold_refusal = ""
        self._announced = announced
        self._fold_base: int | None = None
        self._fold_asked = False
        self._digest = source.manifest_digest
        self._payload = bytearray()
        self._starts = [0]
        self._units: list[tuple[WorkUnit, tuple[TensorEntry, ...]]] = []
        self._ends: list[int] = []
        self._waiting: deque[int] = deque()
        self._asked: dict[int, None] = {}
        self._manifest_asked = False
        self._verified = bytearray()
        self._leading = 0
        self._failures: Counter[int] = Counter()
        self._wrong_replies = 0
        self._last_problem = ""

    @property
    def complete(self) -> bool:
        """Whether every chunk is here."""
        return self.manifest is not None and self._leading == len(self.manifest.chunks)

    def begin(self, source: WeightSource, announced: WeightAnnouncement) -> None:
        """Start, or go on after a transfer that was cut off: what was verified stays, all else is asked for again.

        Raises ``WeightError`` when the manifest that is here is not the announced one.
        """
        self.source, self._announced = source, announced
        self._failures.clear()
        self._wrong_replies = 0
        self.lost()
        if self.announced_manifest is not None:
            self._refuse_other(self.announced_manifest)

    def fold_from(self, base_version: int | None) -> None:
        """Fetch the version as one delta on ``base_version`` (None: as it was announced). Its manifest must be here.

        What came of the same payload stays.
        """
        assert self.announced_manifest is not None
        if base_version == self._fold_base and not (base_version is not None and self.fold_refusal):
            return
        self._fold_base, self._fold_asked, self.fold_refusal = base_version, False, ""
        self._forget_payload()
        if base_version is None:
            self._fetch(self.announced_manifest, self.source.manifest_digest)

    def lost(self) -> None:
        """Nothing that was asked for will come: ask again. Should it come nevertheless, it is a duplicate."""
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        self._manifest_asked = self._fold_asked = False

    def requests(self, credit_bytes: int) -> Iterator[Request]:
        """What to ask for now, so that no more than ``credit_bytes`` (but one chunk at least) are under way."""
        if self.announced_manifest is None:
            if not self._manifest_asked:
                self._manifest_asked = True
                yield GetManifest(self.source.manifest_digest)
            return
        if self.manifest is None:
            if self._fold_base is not None and not self._fold_asked and not self.fold_refusal:
                self._fold_asked = True
                yield GetFold(self.source.manifest_digest, self._fold_base)
            return
        chunks = self.manifest.chunks
        free = credit_bytes - sum(chunks[chunk].payload_bytes for chunk in self._asked)
        while self._waiting and (not self._asked or chunks[self._waiting[0]].payload_bytes <= free):
            chunk = self._waiting.popleft()
            self._asked[chunk] = None
            free -= chunks[chunk].payload_bytes
            yield GetChunk(self._digest, chunk)

    def take(self, frames: Sequence[bytes | memoryview]) -> bool:
        """One reply. Returns whether it brought something new.

        Raises ``WeightError`` when the source does not serve the part, or keeps sending what does not verify.
        """
        reply = self._reply_of(frames)
        if reply is None:
            return False
        if isinstance(reply, NotServed) and self.manifest is None and self._fold_base is not None:
            self.fold_refusal = reply.reason
            return True
        if isinstance(reply, NotServed):
            raise WeightError(
                f"{self.source.endpoint} does not serve version {self._announced.policy_version} "
                f"(manifest {self.source.manifest_digest}): {reply.reason}"
            )
        frame = memoryview(frames[1])
        if isinstance(reply, FoldReply):
            return self._take_fold(reply.fold_digest, frame)
        if isinstance(reply, ManifestReply):
            return self._take_manifest(frame)
        return reply.manifest_digest == self._digest and self._take_chunk(reply.chunk, frame)

    def whole_patches(self) -> int:
        """How many patches, in the order of the manifest, are here from their first to their last byte."""
        if self.manifest is None:
            return 0
        return bisect_right(self._ends, self._starts[self._leading])

    def patch_bytes(self) -> Iterator[tuple[WorkUnit, tuple[TensorEntry, ...], memoryview]]:
        """Every patch of the manifest: what it is of, and its place in the payload, whether it is here or not."""
        assert self.manifest is not None
        view = memoryview(self._payload).toreadonly()
        for (unit, entries), start, end in zip(self._units, (0, *self._ends), self._ends, strict=False):
            yield unit, entries, view[start:end]

    def describe(self) -> str:
        """What is missing, for an error message."""
        missing = "its manifest is missing"
        if self.manifest is not None:
            count = len(self._verified) - sum(self._verified)
            missing = f"{count} of {len(self.manifest.chunks)} chunks are missing"
        return f"{missing}; {self._last_problem}" if self._last_problem else missing

    # ---- what came ---------------------------------------------------------------------------------

    def _reply_of(self, frames: Sequence[bytes | memoryview]) -> Reply | None:
        """The header, None when it is rubbish or about something else."""
        problem = ""
        try:
            reply = decode_reply(frames[0]) if len(frames) == 2 else None
        except WeightError as error:
            reply, problem = None, str(error)
        if reply is not None and reply.manifest_digest in (self.source.manifest_digest, self._digest):
            return reply
        if reply is not None:
            problem = f"it answered about {reply.manifest_digest or 'no manifest'}, which was not asked for"
            if isinstance(reply, NotServed):
                problem = reply.reason
        self._wrong_reply(problem or f"a reply has {len(frames)} frames")
        return None

    def _wrong_reply(self, problem: str) -> None:
        self._last_problem = problem
        self._wrong_replies += 1
        if self._wrong_replies >= WRONG_REPLIES:
            raise WeightError(f"{self.source.endpoint} does not speak this protocol: {problem}")
        self.lost()

    def _take_manifest(self, frame: memoryview) -> bool:
        if self.announced_manifest is not None:
            return False
        actual = digest_of(frame)
        if actual != self.source.manifest_digest:
            self._failed(_MANIFEST, "the manifest", f"{actual} ({len(frame)} bytes)", self.source.manifest_digest)
            self._manifest_asked = False
            return False
        manifest = decode_manifest(frame, self.source.manifest_digest, self.source.endpoint)
        self._refuse_other(manifest)
        self._refuse_impossible(manifest, self.source.manifest_digest)
        self.announced_manifest = manifest
        self._fetch(manifest, self.source.manifest_digest)
        return True

    def _take_fold(self, digest: str, frame: memoryview) -> bool:
        """The manifest of a folded delta. That it leads to the announced version is proven by its part of the hash."""
        announced = self.announced_manifest
        if self.manifest is not None or announced is None or self._fold_base is None:
            return False
        if not digest:  # it is being made
            self._fold_asked = False
            return True
        actual = digest_of(frame)
        if actual != digest:
            self._failed(_MANIFEST, "the manifest of a folded delta", f"{actual} ({len(frame)} bytes)", digest)
            self._fold_asked = False
            return False
        fold = decode_manifest(frame, digest, self.source.endpoint)
        found = (fold.run_id, fold.rank, fold.policy_version, fold.part_hash, fold.base_version)
        wanted = (announced.run_id, announced.rank, announced.policy_version, announced.part_hash, self._fold_base)
        if found != wanted:
            raise WeightError(
                f"the folded delta {digest} from {self.source.endpoint} is of (run, rank, version, part of the state "
                f"hash, base version) {found}; asked for was {wanted}"
            )
        self._refuse_impossible(fold, digest)
        self._fetch(fold, digest)
        return True

    def _forget_payload(self) -> None:
        self.manifest = None
        self._payload, self._starts, self._verified, self._leading = bytearray(), [0], bytearray(), 0
        self._waiting.clear()
        self._asked.clear()
        self._failures.clear()

    def _fetch(self, manifest: Manifest, digest: str) -> None:
        """Begin with the chunks of a manifest."""
        for chunk in manifest.chunks:
            self._starts.append(self._starts[-1] + chunk.payload_bytes)
        self._units = list(listed_units(manifest.tensors))
        self._ends = list(accumulate(entries[0].payload_bytes for _, entries in self._units))
        self._payload = bytearray(self._starts[-1])
        self._verified = bytearray(len(manifest.chunks))
        self._waiting.extend(range(len(manifest.chunks)))
        self.manifest, self._digest = manifest, digest

    def _take_chunk(self, chunk: int, frame: memoryview) -> bool:
        if self.manifest is None or not 0 <= chunk < len(self._verified) or self._verified[chunk]:
            return False  # a duplicate, or one that nobody asked for
        expected = self.manifest.chunks[chunk]
        actual = digest_of(frame)
        if actual != expected.digest or len(frame) != expected.payload_bytes:
            wanted = f"{expected.digest} ({expected.payload_bytes} bytes)"
            self._failed(chunk, f"chunk {chunk}", f"{actual} ({len(frame)} bytes)", wanted)
            if chunk in self._asked:
                del self._asked[chunk]
                self._waiting.append(chunk)
            return False
        self._payload[self._starts[chunk] : self._starts[chunk + 1]] = frame
        self._verified[chunk] = 1
        if chunk in self._asked:
            del self._asked[chunk]
        else:
            self._waiting.remove(chunk)  # it was thought lost
        while self._leading < len(self._verified) and self._verified[self._leading]:
            self._leading += 1
        return True

    def _failed(self, what: int, name: str, came: str, wanted: str) -> None:
        self._failures[what] += 1
        times = self._failures[what]
        self._last_problem = f"{name} came {times} times with digest {came}"
        if times >= CHUNK_ATTEMPTS:
            raise WeightError(
                f"{name} from {self.source.endpoint} came {times} times with digest {came}; announced was {wanted}"
            )

    def _refuse_other(self, manifest: Manifest) -> None:
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

    def _refuse_impossible(self, manifest: Manifest, digest: str) -> None:
        """Before anything is allocated: what a patch may decode to is bounded by what was announced."""
        if any(not 0 < chunk.payload_bytes <= CHUNK_BYTES for chunk in manifest.chunks):
            raise WeightError(f"manifest {digest} has a chunk that is empty or over {CHUNK_BYTES} bytes")
        elements = sum(entry.shard.count for entry in manifest.tensors)
        if elements > self.source.total_elements:
            raise WeightError(
                f"manifest {digest} lists shards of {elements} elements; announced were {self.source.total_elements}"
            )
        for unit, entries in listed_units(manifest.tensors):
            dense, size = unit.count * unit.bits.itemsize, entries[0].payload_bytes
            too_many = any(not 0 <= entry.changed_elements <= entry.shard.count for entry in entries)
            if too_many or not 0 <= size <= dense + dense // 1000 + PATCH_OVERHEAD:
                raise WeightError(
                    f"manifest {digest}: the patch of {unit.name!r} changes {sum(e.changed_elements for e in entries)} "
                    f"of {unit.count} elements in {size} bytes; dense it would have {dense}"
                )
