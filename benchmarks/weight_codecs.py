"""What weight updates take in the forms that other systems send and in streamrl's: same updates, same run.

    python benchmarks/recorded_updates.py --out updates            # once; see there
    python benchmarks/weight_codecs.py --updates updates           # sizes and speeds, a table each (Markdown)
    python benchmarks/weight_codecs.py --params 64M                # synthetic only

Each form is encoded, decoded and compared bit for bit, unit by unit as a publisher cuts tensors. Comparing old and new
is part of every encoding. The forms of other systems are written after their code or description, without their
containers and headers, which flatters them a little:

``int32 + bf16``         SparseRL-Sync, verl, AstraFlow, vLLM's sparse_nccl: positions and new values
``varint gaps + bf16``   SparrowRL's positions (LEB128), new values
``u16 gap + bf16, zstd`` TRL v3 and slime's first: positions as gaps, in the narrowest of u16 and u32
``u16 gap + XOR, zstd``  NeMo RL's remote refit: the same with the exclusive or of old and new
``dense XOR, zstd``      slime, miles and SkyRL: the exclusive or of whole tensors
``bitmask + bf16, zstd`` one bit an element, new values
``gaps + steps, pcodec`` no system: positions without context by the best code, steps of ordered integers
``streamrl``             positions and steps within the classes of equal old exponent, by pcodec or Rice
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import zstandard
from bench_weights import BenchRequest, updates_of
from synthetic_updates import Pattern
from update_entropy import UpdateCounts
from weight_measurement import UpdatedTensor, slices_of, units_of

from streamrl.weights.codec.bits import BitArray, apply_steps, step_symbols
from streamrl.weights.codec.codec import decode_patch, encode_patch
from streamrl.weights.codec.symbols import decode_symbols, encode_symbols

ZSTD_LEVEL = 1
"""What all of them use. Level 3 is no smaller on such streams."""


class Form(msgspec.Struct, frozen=True):
    """``encode`` makes parts of a unit that differs somewhere; ``decode`` writes them into a copy of the old bits."""

    encode: Callable[[UpdatedTensor], list[bytes]]
    decode: Callable[[UpdatedTensor, list[bytes], BitArray], None]


def changed(unit: UpdatedTensor) -> np.ndarray:
    """Positions that differ, int64 [n]."""
    return np.flatnonzero(unit.old != unit.new)


def encode_int32(unit: UpdatedTensor) -> list[bytes]:
    """Positions and values as they are."""
    at = changed(unit)
    return [at.astype("<u4").tobytes(), unit.new[at].tobytes()]


def decode_int32(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    target[np.frombuffer(parts[0], dtype="<u4")] = np.frombuffer(parts[1], dtype=unit.new.dtype)


def gaps_of(positions: np.ndarray) -> np.ndarray:
    """Elements between each position and the one before it."""
    return np.diff(positions, prepend=-1) - 1


def positions_of(gaps: np.ndarray) -> np.ndarray:
    """The inverse of ``gaps_of``."""
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def encode_varint(unit: UpdatedTensor) -> list[bytes]:
    """LEB128: seven bits a byte, lowest first, the top bit set while more follow."""
    at = changed(unit)
    gaps = gaps_of(at)
    lengths = np.searchsorted([1 << (7 * n) for n in range(1, 5)], gaps, side="right") + 1
    ends = np.cumsum(lengths)
    starts = ends - lengths
    coded = np.zeros(int(ends[-1]), dtype=np.uint8)
    for n in range(int(lengths.max())):
        longer = lengths > n
        more = np.where(lengths[longer] > n + 1, 128, 0)
        coded[starts[longer] + n] = (gaps[longer] >> (7 * n)) & 127 | more
    return [coded.tobytes(), unit.new[at].tobytes()]


def decode_varint(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    coded = np.frombuffer(parts[0], dtype=np.uint8)
    ends = np.flatnonzero(coded < 128)
    starts = np.concatenate(([0], ends[:-1] + 1))
    places = np.arange(coded.size) - np.repeat(starts, ends - starts + 1)
    gaps = np.add.reduceat((coded & 127).astype(np.int64) << (7 * places), starts)
    target[positions_of(gaps)] = np.frombuffer(parts[1], dtype=unit.new.dtype)


def compressed(*parts: bytes) -> list[bytes]:
    """Each part by zstd."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    return [compressor.compress(part) for part in parts]


def expanded(parts: list[bytes]) -> list[bytes]:
    """The inverse."""
    return [zstandard.ZstdDecompressor().decompress(part) for part in parts]


def narrow_gaps(positions: np.ndarray) -> bytes:
    """Gaps in 16 bits each, or in 32 where one does not fit; the first byte says which."""
    gaps = gaps_of(positions)
    width = 2 if gaps.max() < 1 << 16 else 4
    return bytes((width,)) + gaps.astype(f"<u{width}").tobytes()


def wide_positions(coded: bytes) -> np.ndarray:
    """The inverse."""
    return positions_of(np.frombuffer(coded, dtype=f"<u{coded[0]}", offset=1))


def encode_gap_values(unit: UpdatedTensor) -> list[bytes]:
    """Gaps and new values under zstd."""
    at = changed(unit)
    return compressed(narrow_gaps(at), unit.new[at].tobytes())


def decode_gap_values(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    gaps, values = expanded(parts)
    target[wide_positions(gaps)] = np.frombuffer(values, dtype=unit.new.dtype)


def encode_gap_xor(unit: UpdatedTensor) -> list[bytes]:
    """Gaps, and the exclusive or of old and new, under zstd."""
    at = changed(unit)
    return compressed(narrow_gaps(at), (unit.old[at] ^ unit.new[at]).tobytes())


def decode_gap_xor(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    gaps, difference = expanded(parts)
    target[wide_positions(gaps)] ^= np.frombuffer(difference, dtype=unit.new.dtype)


def encode_dense_xor(unit: UpdatedTensor) -> list[bytes]:
    """The exclusive or of all elements under zstd."""
    return compressed((unit.old ^ unit.new).tobytes())


def decode_dense_xor(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    target ^= np.frombuffer(expanded(parts)[0], dtype=unit.new.dtype)


def encode_bitmask(unit: UpdatedTensor) -> list[bytes]:
    """One bit an element, then the new values, under zstd."""
    differs = unit.old != unit.new
    return compressed(np.packbits(differs).tobytes(), unit.new[differs].tobytes())


def decode_bitmask(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    mask, values = expanded(parts)
    differs = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=target.size)
    target[np.flatnonzero(differs)] = np.frombuffer(values, dtype=unit.new.dtype)


def encode_gap_steps(unit: UpdatedTensor) -> list[bytes]:
    """Gaps over all elements and steps between ordered bit patterns, both by streamrl's entropy stage."""
    at = changed(unit)
    steps = step_symbols(unit.old[at], unit.new[at])
    return [at.size.to_bytes(4, "little"), encode_symbols(gaps_of(at).astype(np.uint32)), encode_symbols(steps)]


def decode_gap_steps(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse."""
    count = int.from_bytes(parts[0], "little")
    at = positions_of(decode_symbols(memoryview(parts[1]), np.dtype("<u4"), count, unit.name))
    steps = decode_symbols(memoryview(parts[2]), unit.new.dtype, count, unit.name)
    target[at] = apply_steps(target[at], steps)


def encode_streamrl(unit: UpdatedTensor) -> list[bytes]:
    """What a publisher sends."""
    patch = encode_patch(unit.new, unit.old, unit.dtype)
    return [patch.encoded] if patch else []


def decode_streamrl(unit: UpdatedTensor, parts: list[bytes], target: BitArray) -> None:
    """The inverse, with the scatter."""
    patch = decode_patch(parts[0], unit.dtype, unit.new.size, unit.name, unit.old)
    target[slice(None) if patch.positions is None else patch.positions] = patch.values


FORMS = {
    "int32 + bf16": Form(encode_int32, decode_int32),
    "varint gaps + bf16": Form(encode_varint, decode_varint),
    "u16 gap + bf16, zstd": Form(encode_gap_values, decode_gap_values),
    "u16 gap + XOR, zstd (NeMo RL)": Form(encode_gap_xor, decode_gap_xor),
    "dense XOR, zstd (slime)": Form(encode_dense_xor, decode_dense_xor),
    "bitmask + bf16, zstd": Form(encode_bitmask, decode_bitmask),
    "gaps + steps, pcodec": Form(encode_gap_steps, decode_gap_steps),
    "streamrl": Form(encode_streamrl, decode_streamrl),
}


class Column(msgspec.Struct):
    """One update: what it took in each form. Seconds are of one processor."""

    name: str
    elements: int = 0
    changes: int = 0
    bytes_of: dict[str, int] = {}
    encode_s: dict[str, float] = {}
    decode_s: dict[str, float] = {}
    context_free_bytes: float = 0.0
    conditional_bytes: float = 0.0


def measure(name: str, request: BenchRequest) -> Column:
    """Every form over all tensors of an update. Fails when a form does not give the new bits back."""
    column, counts = Column(name), UpdateCounts()
    for tensors in slices_of(updates_of(request).tensors):
        units = units_of(tensors)
        for tensor in tensors:
            counts.add(UpdateCounts.of(tensor.old, tensor.new, tensor.dtype))
        differing = [unit for unit in units if not np.array_equal(unit.old, unit.new)]
        for form in FORMS:
            if not column.elements:  # compile, and touch the allocator, before the clock starts
                measure_form(Column(name), form, [max(differing, key=lambda unit: unit.old.size)])
            measure_form(column, form, differing)
        column.elements += sum(unit.old.size for unit in units)
    column.changes = int(counts.changed.sum())
    column.context_free_bytes, column.conditional_bytes = counts.context_free_bits() / 8, counts.conditional_bits() / 8
    return column


def measure_form(column: Column, name: str, units: list[UpdatedTensor]) -> None:
    """One form over the units of a slice."""
    form = FORMS[name]
    targets = [unit.old.copy() for unit in units]
    gc.collect()
    began = time.process_time()
    coded = [form.encode(unit) for unit in units]
    encoded = time.process_time()
    for unit, parts, target in zip(units, coded, targets, strict=True):
        form.decode(unit, parts, target)
    column.decode_s[name] = column.decode_s.get(name, 0.0) + time.process_time() - encoded
    column.encode_s[name] = column.encode_s.get(name, 0.0) + encoded - began
    column.bytes_of[name] = column.bytes_of.get(name, 0) + sum(len(part) for parts in coded for part in parts)
    for unit, target in zip(units, targets, strict=True):
        if not np.array_equal(target, unit.new):
            raise SystemExit(f"{name} does not give {unit.name} back")


def requests_of(options: argparse.Namespace) -> Iterator[tuple[str, BenchRequest]]:
    """Recorded updates at the chosen step, and synthetic ones."""
    if options.updates:
        for old in sorted(options.updates.glob("*/*-old.safetensors")):
            new, step = old.with_name(old.name.replace("-old", "-new")), int(old.name[:4])
            if step in options.step and (not options.only or old.parent.name in options.only):
                name = old.parent.name if len(options.step) == 1 else f"{old.parent.name} step {step}"
                yield name, BenchRequest(model=(old, new))
    for density in options.density:
        yield f"noise {density:.1%}", BenchRequest(parameters=options.params, density=density)
    yield "uniform 1%", BenchRequest(parameters=options.params, density=0.01, pattern=Pattern.UNIFORM)


def print_tables(columns: list[Column]) -> None:
    """Bytes a changed element, and speeds, by form and update."""
    heads = [f"{column.name} ({column.changes / column.elements:.2%})" for column in columns]
    print("Bytes a changed element:\n")
    print_table(heads, {name: [f"{c.bytes_of[name] / c.changes:.3f}" for c in columns] for name in FORMS})
    print_row("entropy without context", [f"{c.context_free_bytes / c.changes:.3f}" for c in columns])
    print_row("entropy given the old exponent", [f"{c.conditional_bytes / c.changes:.3f}" for c in columns])
    print_row("dense over streamrl", [f"{2 * c.elements / c.bytes_of['streamrl']:.0f}" for c in columns])
    print("\nGB of dense weights a second of one processor, compare and encode / decode into a copy:\n")
    speeds = {
        name: [
            f"{2 * c.elements / 1e9 / c.encode_s[name]:.2f} / {2 * c.elements / 1e9 / c.decode_s[name]:.2f}"
            for c in columns
        ]
        for name in FORMS
    }
    print_table(heads, speeds)


def print_table(heads: list[str], rows: dict[str, list[str]]) -> None:
    """Markdown."""
    print_row("form", heads)
    print_row("---", ["---:"] * len(heads))
    for name, cells in rows.items():
        print_row(name, cells)


def print_row(name: str, cells: list[str]) -> None:
    """One line of a Markdown table."""
    print("|", " | ".join((name, *cells)), "|", flush=True)


def main() -> None:
    """Measure every update, then print the tables."""
    parser = argparse.ArgumentParser(description="Weight updates in the forms that systems send.")
    parser.add_argument("--updates", type=Path, help="the --out of recorded_updates.py")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of the recorded ones, as policy-1e-06")
    parser.add_argument("--step", type=int, nargs="+", default=[20], help="which recorded steps (default 20)")
    parser.add_argument("--forms", nargs="+", choices=sorted(FORMS), default=list(FORMS), help="default: all")
    parser.add_argument("--params", default="64M", help="of synthetic updates (default 64M)")
    parser.add_argument("--density", type=float, nargs="*", default=[0.01, 0.03, 0.5], help="of synthetic updates")
    options = parser.parse_args()
    for name in FORMS.keys() - set(options.forms) - {"streamrl"}:
        del FORMS[name]
    print_tables([measure(name, request) for name, request in requests_of(options)])


if __name__ == "__main__":
    main()
