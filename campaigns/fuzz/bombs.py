"""Inputs that are about size: small ones that claim to be large, and large ones of which a decoder could make far more.

Each must be refused, or cost no more than its target allows (``execution``); none of them may take long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from io import BytesIO
from random import Random

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from campaigns.fuzz import targets_weights
from campaigns.fuzz import weight_frames as transfers
from streamrl.weights.codec import codec
from streamrl.weights.manifest import ChunkEntry, ShardSpec, TensorEntry

_EMPTIES = (
    b"\x90",
    b"\x80",
    b"\xa0",
    b"\x91\x90",
    b"\xa2ab",
    b"\xcd\x01\x02",
    b"\xcb\0\0\0\0\0\0\0\1",
    b"\xc0",
    b"\x01",
)
_JSON_EMPTIES = (b"[],", b"{},", b'"",', b'"ab",', b"[[]],", b"1234,", b"1.5,", b"0,")


def _array(item: bytes, size: int) -> bytes:
    count = size // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def _object(entries: int) -> bytes:
    return (
        b"\xdf"
        + struct.pack(">I", entries)
        + b"".join(b"\xce" + struct.pack(">I", n) + b"\x90" for n in range(entries))
    )


def _in_prompt(column: bytes) -> bytes:
    """A group to score with this column in its prompt."""
    prompt = b"\x83\xa9prompt_id\xa1a\xa9token_ids\xc7\x01\x01i\xa7columns\x81\xa1c" + column
    return b"\x83\xa4type\xabScoreGroups\xa6groups\x90\xa7prompts\x91" + prompt


def _stream_items(size: int) -> Iterator[tuple[str, list[bytes]]]:
    """The first frame is the number of the stream whose items these are: that of the rewards."""
    for item in _EMPTIES:
        yield f"a column full of {item!r}", [b"\x05", _in_prompt(_array(item, size))]
    yield "a column that is a map", [b"\x05", _in_prompt(_object(size // 6))]
    deep = b"\x91" * size
    yield "a column without an end", [b"\x05", _in_prompt(deep)]
    yield "unknown fields", [b"\x05", b"\x84\xa1x" + _array(b"\x90", size) + _in_prompt(b"\xc0")[1:]]
    yield "nothing but frames", [b"\x05", _in_prompt(b"\xc0"), *[b""] * 100_000]
    yield "many small arrays", [b"\x05", _in_prompt(_array(b"\xc7\x01\x01i", size))]
    yield "claimed", [b"\x05", _in_prompt(b"\xdd\x7f\xff\xff\xff")]


def _weights(size: int) -> Iterator[tuple[str, str, list[bytes]]]:
    sample = transfers.world().samples[1]
    manifest = sample.manifest
    shard = ShardSpec("t", "bfloat16", (1,), 0, 0)
    many = msgspec.structs.replace(manifest, tensors=(TensorEntry(shard, 0, 0),) * 200_000, chunks=())
    yield "weights.manifest", "many tensors", [msgspec.msgpack.encode(many)]
    chunks = msgspec.structs.replace(manifest, tensors=(), chunks=(ChunkEntry("", 0),) * 500_000)
    yield "weights.manifest", "many chunks", [msgspec.msgpack.encode(chunks)]
    random = Random(1)
    sides = ShardSpec("t", "bfloat16", tuple(random.getrandbits(62) for _ in range(200_000)), 0, 0)
    shaped = msgspec.structs.replace(manifest, tensors=(TensorEntry(sides, 0, 0),), chunks=())
    yield "weights.manifest", "many sides", [msgspec.msgpack.encode(shaped)]
    for large in (60 << 20, 1 << 30):
        bomb = zstandard.ZstdCompressor(level=1).compress(b"\xdd\x03\xff\xff\xff" + b"\x90" * min(large, 60 << 20))
        yield "weights.manifest", f"{large} bytes folded", [bomb, b"folded"]
    yield "weights.manifest", "a frame that claims", [_claiming(1 << 40), b"folded"]
    for claimed in (1 << 31, 1 << 62):
        header = codec._Header(codec._LAYOUT_VERSION, claimed)
        yield "weights.patches", f"{claimed} elements claimed", [b"\0", codec._frame(header, b"\0\0")]
    count = targets_weights._shards()[0].base.size
    planes = codec._Header(codec._LAYOUT_VERSION, count)
    yield (
        "weights.patches",
        "exponents folded",
        [b"\0", codec._frame(planes, zstandard.compress(bytes(1 << 26)), bytes(count))],
    )
    yield "weights.symbols", "pcodec that claims", [b"\xff\xff\1", b"\xff" + b"\xff" * 40]
    yield "weights.replies", "a head without an end", [b"\x81" * 100_000, b""]
    yield "weights.requests", "a head without an end", [b"\x82\xa4type\xa8GetChunk\xa1x" + b"\x91" * 3000 + b"\x90"]
    yield "weights.announcement", "sources without an end", [_array(b"\x90", size)]


def _claiming(size: int) -> bytes:
    """A zstd frame whose header gives another size."""
    frame = bytearray(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(bytes(1 << 33 & 0xFFFFF)))
    return bytes(frame[:4]) + b"\xe0" + struct.pack("<Q", size) + bytes(frame[9:])


def _files(size: int) -> Iterator[tuple[str, str, list[bytes]]]:
    for item in _JSON_EMPTIES:
        listed = b"[" + item * (size // len(item)) + b"0]"
        yield (
            "streams.telemetry",
            f"a field full of {item!r}",
            [b"step", b"1", b'{"run_id":"a","sequence":1,"time":1,"replay":false,"x":' + listed + b"}"],
        )
        yield "user.rows", f"a column full of {item!r}", [b'{"prompt":"a","x":' + listed + b"}", b"\0"]
        yield "files.trace", f"a field full of {item!r}", [b'{"type":"header","x":' + listed + b"}\n"]
    for text in (b"[" * size, b'{"a":' * (size // 5), b"1" * size, b'"' + b"a" * size):
        yield "user.model_config", f"{text[:5]!r} without an end", [b'{"hidden_size":' + text]
        yield "user.recipe", f"{text[:5]!r} without an end", [b"a = " + text[: size // 64]]
        yield "rewards.verdict", f"{text[:5]!r} without an end", [text[:65536]]
        yield "rewards.code", f"{text[:5]!r} without an end", [b"", text]
    yield "rewards.code", "tuples without an end", [b"", b'{"value":' + b'{"tuple":[' * 900 + b"]}" * 900 + b"}"]
    yield "rewards.call_answers", "a frame that claims", [b"\0", struct.pack("<I", (1 << 30) - 1) + b"x"]
    for claimed in (99_999_999, 1 << 40, (1 << 64) - 1):
        yield "user.safetensors", f"a header of {claimed}", [b"\0" * 8 + b"{}" + bytes(28)]


def _tables(size: int) -> Iterator[tuple[str, str, list[bytes]]]:
    column = pa.array(np.zeros(size, dtype=np.int64))
    for compression in ("zstd", "snappy"):
        sink = BytesIO()
        pq.write_table(pa.table({"prompt": column}), sink, compression=compression)
        yield "user.parquet", f"{8 * size} bytes of zeros, {compression}", [sink.getvalue()]


def bombs(size: int = 1 << 20) -> list[tuple[str, str, list[bytes]]]:
    """Target, what it is, frames. ``size``: bytes of the large ones."""
    items = [("streams.items", what, frames) for what, frames in _stream_items(size)]
    return [*items, *_weights(size), *_files(size), *_tables(size)]
