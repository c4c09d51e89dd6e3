"""Feed broken frames to both ends of the weight path: none may crash it, hang it, or change a weight wrongly.

Every frame is a case of its own, made from its number; target ``weights.transfers`` of the campaign runs them.
Kinds of cases:

* a *reply* to a receiver, mutated on its way, in the midst of a transfer that otherwise goes well;
* a *request* to a publisher;
* a *patch* or a *manifest* as a broken or hostile publisher would write it: mutated, and then given valid digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from unittest import mock

import msgspec
import numpy as np
import zstandard

from campaigns.fuzz.mutations import broken_bytes
from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights import manifest as tables
from streamrl.weights.manifest import Manifest, ShardSpec, decode_manifest, digest_of, encode_manifest
from streamrl.weights.publish import publisher as publishing
from streamrl.weights.publish.server import PublisherServer, ServedPart
from streamrl.weights.pull.decoding import Decoding
from streamrl.weights.pull.received_part import ReceivedChain
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion
from streamrl.weights.requests import MANIFEST, GetPiece, Piece, encoder

CHUNK = 512  # bytes: several chunks of a small delta
TENSORS = {"norm": ("bfloat16", (16,)), "layer": ("bfloat16", (90, 60)), "head": ("float32", (30, 20))}
Bits = dict[str, np.ndarray]


class Sample(msgspec.Struct, frozen=True, eq=False):
    """A version that was published: what announces it, what carries it, what it must become. ``earlier``: the version
    that it is made on, where the receiver lacks that one."""

    announced: WeightAnnouncement
    part: ServedPart
    manifest: Manifest
    bits: Bits
    earlier: ServedPart | None = None


class World(msgspec.Struct, frozen=True, eq=False):
    """A receiver at version 0, and what may come to it. ``late``: a version two after what it holds."""

    replica: CheckpointReplica
    samples: Sequence[Sample]
    late: Sample
    server: PublisherServer


@cache
def world() -> World:
    with mock.patch.object(publishing, "CHUNK_BYTES", CHUNK):
        return _make_world()


def _make_world() -> World:
    random = np.random.default_rng(0)
    shards = [ShardSpec(name, dtype, shape, 0, int(np.prod(shape))) for name, (dtype, shape) in TENSORS.items()]
    held = {s.name: _near_zero(random, s) for s in shards}
    replica, samples = CheckpointReplica(), []
    for version, density in enumerate((1.0, 0.02, 0.3, 1.0)):
        publisher = publishing.WeightPublisher("ipc:///nowhere", run_id="run", rank=0, shards=shards)
        moved = held if not version else _moved(random, held, density)
        published = publisher.publish(0, held)
        if version:
            published = publisher.publish(version, moved)
        samples.append(_sample(publisher, version, published, moved))
    replica.advance(replica.stage(fetched_of(samples[0], receive(samples[0], replies_of(samples[0])), replica)))
    publisher = publishing.WeightPublisher("ipc:///nowhere", run_id="run", rank=0, shards=shards)
    publisher.publish(0, held)
    between = _moved(random, held, 0.02)
    earlier = _sample(publisher, 4, publisher.publish(4, between), between)
    moved = _moved(random, between, 0.02)
    newer = _sample(publisher, 5, publisher.publish(5, moved), moved)
    late = msgspec.structs.replace(newer, earlier=earlier.part)
    server = PublisherServer("ipc:///nowhere", "fuzzed")
    server.serve([sample.part for sample in (*samples, earlier, newer)])
    return World(replica, samples, late, server)


def _moved(random: np.random.Generator, bits: Bits, density: float) -> Bits:
    return {name: np.where(random.random(b.size) < density, b + 1, b).astype(b.dtype) for name, b in bits.items()}


def _sample(publisher: publishing.WeightPublisher, version: int, published: publishing.Published, bits: Bits) -> Sample:
    announced = WeightAnnouncement(
        policy_version=version,
        base_version=published.base_version,
        state_hash=published.state_hash,
        sources=(published.source,),
    )
    part = next(one for one in publisher._chain if one.manifest_digest == published.source.manifest_digest)
    return Sample(announced, part, decode_manifest(part.manifest, part.manifest_digest, ""), bits)


def _near_zero(random: np.random.Generator, shard: ShardSpec) -> np.ndarray:
    """Trained weights look like this: exponents of a few kinds."""
    values = random.normal(0, 0.02, shard.count).astype(np.float32).view(np.uint32)
    return values if shard.dtype == "float32" else (values >> np.uint32(16)).astype(np.uint16)


@cache
def honest_replies(which: int) -> list[list[bytes]]:
    """``replies_of`` the sample of that number."""
    return list(replies_of(world().samples[which]))


def replies_of(sample: Sample) -> Iterator[list[bytes]]:
    """What an honest publisher answers, the manifest first."""
    digest = sample.part.manifest_digest
    server = PublisherServer("ipc:///nowhere", "honest")
    server.serve([sample.part])
    for piece in (MANIFEST, *range(len(sample.part.chunks))):
        reply, payload = server._answer([encoder.encode(GetPiece(digest, piece))])
        yield [encoder.encode(reply), bytes(payload)]


def receiving(sample: Sample) -> ReceivedChain:
    """Nothing has come yet; chunks are asked for as soon as the manifest is here."""
    chain = ReceivedChain(sample.announced.sources[0], sample.announced, {})
    chain.fetch()
    return chain


def receive(sample: Sample, replies: Iterator[list[bytes]]) -> ReceivedChain:
    part = receiving(sample)
    for frames in replies:
        part.take(frames)
        list(part.requests(1 << 20))
    return part


def fetched_of(sample: Sample, chain: ReceivedChain, replica: CheckpointReplica) -> FetchedVersion:
    """Decode what a complete chain holds, as ``fetch`` does."""
    manifest = chain.oldest.manifest
    assert manifest is not None
    decoding = Decoding(None if manifest.base_version is None else replica)
    with decoding.pool:
        decoding.offer(chain)
        patches = decoding.finish([chain])
    size, run_id = manifest.payload_bytes, manifest.run_id
    return FetchedVersion(sample.announced, manifest.base_version, manifest.base_part_hash, patches, size, run_id)


# ---- cases ---------------------------------------------------------------------------------------


def reply_case(random: Random) -> str:
    """A transfer with one broken reply in it: lost, repeated, late, or mutated."""
    everything = world()
    which, stranger = (random.randrange(len(everything.samples)) for _ in range(2))
    sample, replies, foreign = everything.samples[which], honest_replies(which), honest_replies(stranger)
    broken = random.randrange(len(replies))
    other = foreign[random.randrange(len(foreign))]
    frames = list(replies[broken])
    if random.random() < 0.2:
        frames = other if random.random() < 0.5 else frames[: random.randrange(2)] + frames
    else:
        place = random.randrange(2)
        frames[place] = broken_bytes(random, frames[place], other[place])
    order = [*replies[:broken], frames, *replies[broken:]]
    if random.random() < 0.3:
        order = random.sample(order, len(order))
    part = receiving(sample)
    for frames in (*order, *replies):
        part.take(frames)
        list(part.requests(CHUNK))
    assert part.complete, part.describe()
    return judge(sample, part)


def request_case(random: Random) -> str:
    everything = world()
    sample = everything.samples[random.randrange(len(everything.samples))]
    digest = sample.part.manifest_digest
    request = encoder.encode(GetPiece(digest, random.randrange(-2, 9)))
    broken = broken_bytes(random, request, random.randbytes(len(request)))
    frames = random.choices(([broken], [request], [broken, request]), (8, 1, 1))[0]
    reply, payload = everything.server._answer(frames)
    assert len(encoder.encode(reply)) and len(payload) <= 1 << 20
    return type(reply).__name__


def patch_case(random: Random) -> str:
    """One patch is mutated before it is cut into chunks with valid digests: what decodes is refused by its hash."""
    everything = world()
    sample = everything.samples[random.randrange(len(everything.samples))]
    payload = b"".join(sample.part.chunks)
    starts = np.cumsum([0, *(entry.payload_bytes for entry in sample.manifest.units)])
    index = random.randrange(len(sample.manifest.units))
    patch = payload[starts[index] : starts[index + 1]]
    broken = broken_bytes(random, patch, bytes(payload[starts[index] // 2 :]))
    entry = msgspec.structs.replace(sample.manifest.units[index], payload_bytes=len(broken))
    units = (*sample.manifest.units[:index], entry, *sample.manifest.units[index + 1 :])
    payload = payload[: starts[index]] + broken + payload[starts[index + 1] :]
    return hostile(sample, msgspec.structs.replace(sample.manifest, units=units), payload)


def late_case(random: Random) -> str:
    """Two versions at once, of which one reply is broken, or the earlier one wrong behind a valid digest."""
    sample = world().late
    earlier, digest = sample.earlier, sample.part.manifest_digest
    assert earlier is not None
    manifest, chunks = earlier.manifest, list(earlier.chunks)
    newer, announced = sample.part.manifest, sample.announced
    if hostile := random.random() < 0.5:
        manifest = broken_bytes(random, manifest, newer)
        changed = msgspec.structs.replace(sample.manifest, base_digest=digest_of(manifest))
        newer = encode_manifest(changed)
        digest = digest_of(newer)
        (source,) = announced.sources
        source = msgspec.structs.replace(source, manifest_digest=digest)
        announced = msgspec.structs.replace(announced, sources=(source,))
    before = digest_of(manifest)
    honest = [
        [encoder.encode(Piece(digest, MANIFEST)), newer],
        [encoder.encode(Piece(before, MANIFEST)), manifest],
        *([encoder.encode(Piece(before, i)), bytes(chunk)] for i, chunk in enumerate(chunks)),
        *([encoder.encode(Piece(digest, i)), bytes(chunk)] for i, chunk in enumerate(sample.part.chunks)),
    ]
    number, which = random.randrange(1, len(honest)), random.randrange(2)
    broken = list(honest[number])
    broken[which] = broken_bytes(random, broken[which], honest[0][which])
    chain = ReceivedChain(announced.sources[0], announced, {})
    chain.take(honest[0])
    chain.extend()
    for frames in (honest[1], *([] if hostile else [broken]), honest[1]):
        chain.take(frames)
    chain.fetch()
    for frames in (*honest[2:], *honest[2:]):
        list(chain.requests(CHUNK))
        chain.take(frames)
    assert hostile or chain.complete, chain.describe()
    return judge(msgspec.structs.replace(sample, announced=announced), chain)


def manifest_case(random: Random) -> str:
    """The manifest is mutated, and its digest is that of the mutated bytes."""
    everything = world()
    sample = everything.samples[random.randrange(len(everything.samples))]
    if random.random() < 0.7:
        manifests = sample.part.manifest, everything.samples[0].part.manifest
        if random.random() < 0.5:  # below the zstd frame
            broken = zstandard.compress(broken_bytes(random, *(zstandard.decompress(whole) for whole in manifests)))
        else:
            broken = broken_bytes(random, *manifests)
        return hostile_bytes(sample, broken, list(sample.part.chunks), sample.manifest.payload_bytes)
    entries = list(sample.manifest.units)
    index = random.randrange(len(entries))
    first, *others = entries[index].unit.shards
    field = random.choice(["offset", "count", "shape", "name", "dtype"])
    number = random.choice([-1, 0, 1, 7, 2**31, 2**32, 2**62, -(2**62)])
    value = {"shape": (number, number), "name": "other", "dtype": "float16"}.get(field, number)
    wrong = msgspec.structs.replace(first, **{field: value})
    unit = tables.WorkUnit(random.choice([(wrong, *others), (*others, wrong), (*others,), (first, first, *others)]))
    entries[index] = msgspec.structs.replace(entries[index], unit=unit)
    if random.random() < 0.2:
        entries.append(entries[index])
    return hostile(sample, msgspec.structs.replace(sample.manifest, units=tuple(entries)), None)


def hostile(sample: Sample, manifest: Manifest, payload: bytes | None) -> str:
    chunks = [bytes(chunk) for chunk in sample.part.chunks]
    if payload is not None:
        chunks = [payload[start : start + CHUNK] for start in range(0, len(payload), CHUNK)]
        table = tuple(tables.ChunkEntry(digest_of(chunk), len(chunk)) for chunk in chunks)
        manifest = msgspec.structs.replace(manifest, chunks=table)
    return hostile_bytes(sample, encode_manifest(manifest), chunks, manifest.payload_bytes)


def hostile_bytes(sample: Sample, manifest: bytes, chunks: Sequence[bytes | memoryview], size: int) -> str:
    """Announce and serve what a broken publisher made. The announced state hash is the true one."""
    digest = digest_of(manifest)
    (source,) = sample.announced.sources
    source = msgspec.structs.replace(source, manifest_digest=digest, payload_bytes=size)
    announced = msgspec.structs.replace(sample.announced, sources=(source,))
    part = ServedPart(announced.policy_version, digest, manifest, [memoryview(chunk) for chunk in chunks])
    made = Sample(announced, part, sample.manifest, sample.bits)
    return judge(made, receive(made, replies_of(made)))


def judge(sample: Sample, part: ReceivedChain) -> str:
    """Stage what came: the true weights, or refused."""
    everything = world()
    if part.oldest.manifest is None or not part.complete:
        return "incomplete"
    staged = everything.replica.stage(fetched_of(sample, part, everything.replica))
    for name, expected in sample.bits.items():
        became = everything.replica.bits(name).copy()
        patch = staged.patches.get(name)
        if patch is not None:
            became[slice(None) if patch.positions is None else patch.positions] = patch.new_bits
        assert np.array_equal(became, expected), f"{name} became something else, and its hash did not tell"
    return "equal"


CASES = (reply_case, reply_case, patch_case, patch_case, manifest_case, request_case, late_case)


def run_case(number: int) -> str:
    """How case ``number`` ends: ``equal``, ``refused``, ``incomplete``, or the kind of a reply. Else it raises."""
    case = CASES[number % len(CASES)]
    try:
        return f"{case.__name__}: {case(Random(number))}"
    except WeightError:
        return f"{case.__name__}: refused"
