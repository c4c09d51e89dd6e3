"""Decoders of what carries weights: announcements, requests, replies, manifests, patches in every form, the state that
workers of a machine share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import msgspec
import numpy as np
import zstandard

from campaigns.fuzz import weight_frames as transfers
from campaigns.fuzz.execution import Target
from campaigns.fuzz.seeds import MSGPACK, PLAIN, Seed, fixed_fields, message, seed
from campaigns.fuzz.targets_streams import example
from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec import codec
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.codec import WeightPatch, decode_patch, encode_complete, encode_patch
from streamrl.weights.codec.symbols import decode_symbols, encode_symbols
from streamrl.weights.manifest import ShardSpec, decode_manifest, digest_of
from streamrl.weights.pull import shared_versions
from streamrl.weights.pull.shared_versions import Holder, MemorySegment
from streamrl.weights.requests import decode_announcement

_REFUSALS = (WeightError,)
_DTYPES: dict[str, Any] = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<u2"), "float32": np.dtype("<u4")}


def announcements() -> Target:
    """What an engine's workers are handed to stage."""

    def run(frames: Sequence[bytes]) -> str:
        decode_announcement(b"".join(frames))
        return "accepted"

    return Target(
        name="weights.announcement",
        messages=[message(seed(msgspec.msgpack.encode(example(WeightAnnouncement)), MSGPACK))],
        run=run,
        refusals=_REFUSALS,
    )


def manifests() -> Target:
    """Manifests as a broken or hostile publisher would sign them: broken below the zstd frame, or as they are."""
    parts = [sample.part for sample in (*transfers.world().samples, transfers.world().late)]
    plain = [zstandard.decompress(part.manifest) for part in parts]
    compressor = zstandard.ZstdCompressor(level=1)

    def run(frames: Sequence[bytes]) -> str:
        encoded = frames[0] if frames else b""
        if len(frames) == 1:
            encoded = compressor.compress(encoded)
        manifest = decode_manifest(encoded, digest_of(encoded), "here")
        for shard in (shard for entry in manifest.units for shard in entry.unit.shards):
            assert shard.offset >= 0 and shard.offset + shard.count <= 1 << 64
        return "accepted"

    made = [message(seed(content, MSGPACK)) for content in plain]
    made += [message(seed(part.manifest, PLAIN), seed(b"merged", PLAIN)) for part in parts]
    return Target(name="weights.manifest", messages=made, run=run, refusals=_REFUSALS, spare_bytes=64 << 20)


def whole_transfers() -> Target:
    """``weight_frames``: broken replies, chains and hostile manifests, decoded and staged against the state hash.
    Its cases are made from the number in the frame; nothing else is mutated."""
    return Target(
        name="weights.transfers",
        messages=[message(seed(bytes(8), PLAIN))],
        run=lambda frames: transfers.run_case(int.from_bytes(frames[0], "little")),
        refusals=(),
        repair=lambda random, _: [random.randbytes(5)],
        quick=150,
    )


# ---- patches -------------------------------------------------------------------------------------------


class _Shard(msgspec.Struct, frozen=True, eq=False):
    dtype: str
    base: BitArray
    new: BitArray


@cache
def _shards() -> list[_Shard]:
    random = np.random.default_rng(3)
    shards = []
    for dtype, size in (("bfloat16", 90), ("float16", 70), ("float32", 60), ("bfloat16", 400), ("bfloat16", 3)):
        spec = ShardSpec("t", dtype, (size,), 0, size)
        for density in (0.03, 0.3, 1.0):
            base: Any = transfers._near_zero(random, spec).astype(_DTYPES[dtype])
            if dtype == "float16":
                base = random.normal(0, 0.02, size).astype(np.float16).view(np.uint16)
            moved = random.random(size) < density
            moved[0] = True
            shards.append(
                _Shard(
                    dtype, cast("BitArray", base), cast("BitArray", np.where(moved, base + 1, base).astype(base.dtype))
                )
            )
    return shards


def _forms(shard: _Shard) -> list[bytes]:
    """Its patch in both forms that there are."""
    delta = encode_patch(shard.new, shard.base, shard.dtype)
    assert delta is not None
    return [delta.encoded, encode_complete(shard.new)]


def _forged(shard: _Shard, symbol: int) -> bytes:
    """A patch that changes the first element by a symbol that no encoder may have written."""
    gap, step = encode_symbols(np.zeros(1, dtype=np.uint32)), encode_symbols(np.array([symbol], dtype=np.uint16))
    classes = ((0, 1, len(gap), len(step)),)
    return codec._frame(codec._Header(codec._LAYOUT_VERSION, shard.base.size, classes), gap, step)


_PATCH_HEAD = fixed_fields(2, 1, 1, 1, 1, 1, 1, 1, 1)


def patches() -> Target:
    """Patches against the base they were made on (the first frame names it)."""
    shards = _shards()

    def run(frames: Sequence[bytes]) -> str:
        shard = shards[(frames[0][0] if frames and frames[0] else 0) % len(shards)]
        encoded = b"".join(frames[1:])
        patch = decode_patch(encoded, shard.dtype, shard.base.size, "t", shard.base)
        return _check_patch(patch, shard)

    made = [
        message(seed(bytes((number,)), PLAIN), _patch_seed(form))
        for number, shard in enumerate(shards)
        for form in _forms(shard)
    ]
    made += [message(seed(b"\0", PLAIN), _patch_seed(_forged(shards[0], symbol))) for symbol in (0, 65534, 65535)]
    return Target(name="weights.patches", messages=made, run=run, refusals=_REFUSALS)


def _patch_seed(encoded: bytes) -> Seed:
    """With the places of its values where there is a header, else of its first bytes."""
    length = int.from_bytes(encoded[:2], "little")
    made = seed(encoded, _PATCH_HEAD)
    if 0 < length < min(1024, len(encoded) - 2):
        spans = [(a + 2, b + 2) for a, b in MSGPACK.spans_of(encoded[2 : 2 + length])]
        return Seed(encoded, MSGPACK, tuple(spans))
    return made


def _check_patch(patch: WeightPatch, shard: _Shard) -> str:
    count = shard.base.size
    assert patch.values.dtype == shard.base.dtype, f"values of {patch.values.dtype}"
    if patch.positions is None:
        assert patch.values.size == count, "a complete patch that is not complete"
        return "accepted complete"
    positions = patch.positions
    assert positions.dtype == np.int64 and positions.size == patch.values.size > 0
    assert positions[0] >= 0 and positions[-1] < count and (np.diff(positions) > 0).all(), "positions that do not rise"
    assert (patch.values != shard.base[positions]).all(), "an element that does not change"
    return "accepted delta"


def symbols() -> Target:
    """Streams of symbols in each of their three codes; the first frame says how many there are, and how wide."""
    random = np.random.default_rng(5)
    made = []
    for code, kind in enumerate((np.uint16, np.uint32)):
        for size, scale in ((1, 3), (9, 2), (60, 40), (300, 900), (5000, 3)):
            values = np.minimum(random.exponential(scale, size), 60000).astype(kind)
            made.append(
                message(
                    seed(size.to_bytes(2, "little") + bytes((code,)), fixed_fields(2, 1)),
                    _stream_seed(encode_symbols(values)),
                )
            )

    def run(frames: Sequence[bytes]) -> str:
        head, body = (*frames, b"", b"")[:2]
        count, wide = int.from_bytes(head[:2], "little"), head[2:3] == b"\1"
        dtype = np.dtype("<u4") if wide else np.dtype("<u2")
        found = decode_symbols(memoryview(body), dtype, count, "t")
        assert found.size == count and found.dtype == dtype
        if not wide and body and body[0] < 255:
            assert (decode_symbols(memoryview(body), np.dtype("<u4"), count, "t") == found).all(), "a symbol was cut"
        return f"accepted {min(body[0], 33) if body else 'none'}"

    return Target(name="weights.symbols", messages=made, run=run, refusals=_REFUSALS)


def _stream_seed(content: bytes) -> Seed:
    return seed(content, fixed_fields(1, 1, 1, 1, 1, 1, 1, 1))


def node_states() -> Target:
    """What workers of one machine write down for each other."""
    version = shared_versions.SharedVersion(
        run_id="run",
        policy_version=3,
        base_version=2,
        base_hash=5,
        state_hash=9,
        payload_bytes=100,
        tensors=(),
        patches=(shared_versions._SharedPatch("t", 9, None, 64), shared_versions._SharedPatch("u", 9, 0, 128)),
        memory=MemorySegment(7, 4096, (Holder(1, 5),)),
    )
    states = (shared_versions.SharedState(version, version, writing=True), shared_versions.SharedState(None, version))

    def run(frames: Sequence[bytes]) -> str:
        shared_versions.decode_state(b"".join(frames), "here")
        return "accepted"

    made = [message(seed(msgspec.msgpack.encode(state), MSGPACK)) for state in states]
    return Target(name="weights.node_state", messages=made, run=run, refusals=_REFUSALS)


def targets() -> list[Target]:
    """All of this module."""
    return [announcements(), manifests(), whole_transfers(), patches(), symbols(), node_states()]
