"""A push over a slow link, end to end: streamrl's delta against int32 positions and raw values, on the same update.

``python benchmarks/weight_link.py [--parameters 5e8] [--density 0.01] [--mbit 20 200 0] [--threads N] [--json]``

Diff, encode, serve over TCP, receive, decode, verify, stage and take over in the replica. For each of ``--mbit``
million bits a second (0: without limit) the time of the transfer is at least that of its bytes on such a link. What
an engine does with live weights is left out: it costs both forms the same. The raw form goes through the same
manifest, chunks, digests and state hash; only what a patch is differs. *Undisturbed* is what the processor times and
the link allow on a machine that does nothing else."""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from synthetic_updates import adam_step, draw_weights, learning_rate_for, synthetic_model

from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement, WeightSource
from streamrl.weights.codec.bits import BitArray, as_bits, bit_type
from streamrl.weights.codec.codec import WeightPatch, decode_patch
from streamrl.weights.codec.state_hash import hash_elements, hash_range
from streamrl.weights.manifest import (
    FORMAT_VERSION,
    UNIT_ELEMENTS,
    ChunkEntry,
    Manifest,
    ShardSpec,
    UnitEntry,
    WorkUnit,
    digest_of,
    encode_manifest,
)
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.server import PublisherServer, ServedPart
from streamrl.weights.pull import decoding
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.requests import CHUNK_BYTES

Bits = dict[str, BitArray]
_COUNT = struct.Struct("<Q")


def encode_raw(bits: BitArray, base: BitArray) -> tuple[bytes, np.ndarray]:
    """int32 positions, then values."""
    positions = np.flatnonzero(bits != base)
    return b"".join(
        (_COUNT.pack(positions.size), positions.astype("<i4").tobytes(), bits[positions].tobytes())
    ), positions


def decode_raw(encoded: memoryview, dtype: str, count: int, tensor: str, base: BitArray | None) -> WeightPatch:
    (changed,) = _COUNT.unpack_from(encoded)
    end = _COUNT.size + 4 * changed
    positions = np.frombuffer(encoded[_COUNT.size : end], dtype="<i4").astype(np.int64)
    return WeightPatch(
        positions, as_bits(np.frombuffer(encoded[end:], dtype=bit_type(dtype, tensor)), dtype, changed, tensor)
    )


class Setting:
    """A model at version 0 on both sides, and what it becomes."""

    def __init__(self, parameters: int, density: float) -> None:
        shapes = synthetic_model(parameters)
        rate = learning_rate_for(density, draw_weights(1 << 20, 0, 0))
        self.old: Bits = {}
        self.new: Bits = {}
        for place, shape in enumerate(shapes):
            start = draw_weights(shape.elements, 0, place)
            self.old[shape.name], self.new[shape.name] = adam_step(start, rate, 0, place)
        self.shards = [ShardSpec(s.name, "bfloat16", (s.elements,), 0, s.elements) for s in shapes]
        self.old_hash = sum(hash_range(name, 0, bits) for name, bits in self.old.items()) % HASH_MODULUS
        self.changed = sum(int(np.count_nonzero(self.old[name] != self.new[name])) for name in self.old)

    def replica(self) -> CheckpointReplica:
        """A receiver's, at version 0."""
        held = CheckpointReplica()
        specs = {s.name: TensorSpec(s.name, s.dtype, s.shape) for s in self.shards}
        patches = {name: StagedPatch(None, bits.copy()) for name, bits in self.old.items()}
        held.advance(StagedVersion(0, None, self.old_hash, specs, patches, 0, "link"))
        return held


class Timed:
    """Seconds of each part of one push: of wall time, and of all cores' processor time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self._last = time.monotonic(), time.process_time()

    def took(self, name: str) -> None:
        wall, processor = time.monotonic(), time.process_time()
        self.seconds[name], self.processor[name] = wall - self._last[0], processor - self._last[1]
        self._last = wall, processor

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def undisturbed(self, size: int, mbit: float, threads: int) -> float:
        """Seconds on a machine that does nothing else: no part takes longer than its processor time on its threads, or
        than the link takes for ``size`` bytes. Staging and taking over run on one thread."""
        seconds = 0.0
        for name, used in self.processor.items():
            link = 8 * size / (mbit * 1e6) if mbit and name == "transfer and decode" else 0.0
            alone = used / threads if "code" in name else used
            seconds += max(link, alone)
        return seconds if mbit else min(seconds, self.total)

    def over_link(self, size: int, mbit: float) -> float:
        """Seconds in all where the transfer takes at least as long as ``size`` bytes take on the link."""
        carried = 8 * size / (mbit * 1e6) if mbit else 0.0
        return self.total + max(0.0, carried - self.seconds["transfer and decode"])


def receive(setting: Setting, replica: CheckpointReplica, announced: WeightAnnouncement, timed: Timed) -> None:
    """Fetch, stage, take over; the bits are compared afterwards."""
    fetched = fetch_version(announced, held=replica)
    timed.took("transfer and decode")
    staged = replica.stage(fetched)
    timed.took("stage")
    replica.advance(staged)
    timed.took("take over")
    for name, bits in setting.new.items():
        if not np.array_equal(replica.bits(name), bits):
            raise SystemExit(f"{name} arrived wrong")


def push_delta(setting: Setting, threads: int) -> tuple[Timed, int]:
    publisher = WeightPublisher("tcp://127.0.0.1:*", run_id="link", rank=0, shards=setting.shards, threads=threads)
    publisher.start()
    try:
        publisher.publish(0, setting.old)
        publisher.acknowledge(0)
        replica, timed = setting.replica(), Timed()
        published = publisher.publish(1, setting.new)
        timed.took("diff and encode")
        announced = WeightAnnouncement(
            policy_version=1, base_version=0, state_hash=published.state_hash, sources=(published.source,)
        )
        receive(setting, replica, announced, timed)
    finally:
        publisher.close()
    return timed, published.source.payload_bytes


def push_raw(setting: Setting) -> tuple[Timed, int]:
    server = PublisherServer("tcp://127.0.0.1:*", "raw")
    server.start()
    vars(decoding)["decode_patch"] = decode_raw
    try:
        replica, timed = setting.replica(), Timed()
        announced = publish_raw(setting, server)
        timed.took("diff and encode")
        receive(setting, replica, announced, timed)
    finally:
        vars(decoding)["decode_patch"] = decode_patch
        server.close()
    return timed, announced.sources[0].payload_bytes


def publish_raw(setting: Setting, server: PublisherServer) -> WeightAnnouncement:
    part_hash, entries, patches = setting.old_hash, [], []
    units = [
        shard.part(start, min(UNIT_ELEMENTS, shard.count - start))
        for shard in setting.shards
        for start in range(0, shard.count, UNIT_ELEMENTS)
    ]
    for unit in units:
        old = setting.old[unit.name][unit.offset : unit.offset + unit.count]
        new = setting.new[unit.name][unit.offset : unit.offset + unit.count]
        encoded, positions = encode_raw(new, old)
        places = positions + unit.offset
        part_hash += hash_elements(unit.name, places, new[positions]) - hash_elements(unit.name, places, old[positions])
        entries.append(UnitEntry(WorkUnit((unit,)), len(encoded)))
        patches.append(encoded)
    payload = memoryview(b"".join(patches))
    chunks = [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]
    table = tuple(ChunkEntry(digest_of(chunk), len(chunk)) for chunk in chunks)
    part_hash %= HASH_MODULUS
    manifest = Manifest(FORMAT_VERSION, "link", 0, 1, 0, setting.old_hash, "", part_hash, tuple(entries), table)
    encoded = encode_manifest(manifest)
    server.serve([ServedPart(1, digest_of(encoded), encoded, chunks)])
    total = sum(shard.count for shard in setting.shards)
    source = WeightSource(0, server.endpoint, digest_of(encoded), len(payload), setting.changed, total)
    return WeightAnnouncement(policy_version=1, base_version=0, state_hash=part_hash, sources=(source,))


def measure(setting: Setting, mbit: float, threads: int, repeats: int) -> dict[str, Any]:
    """The best of ``repeats`` pushes of each form: the machine is shared."""

    def best(push: list[tuple[Timed, int]]) -> tuple[Timed, int]:
        return min(push, key=lambda one: one[0].total)

    found: dict[str, Any] = {"mbit": mbit}
    delta, delta_bytes = best([push_delta(setting, threads) for _ in range(repeats)])
    raw, raw_bytes = best([push_raw(setting) for _ in range(repeats)])
    for form, timed, size, cores in (("delta", delta, delta_bytes, threads), ("raw", raw, raw_bytes, 1)):
        found[form] = {
            "bytes": size,
            "wall_s": timed.over_link(size, mbit),
            "undisturbed_s": timed.undisturbed(size, mbit, cores),
            "wall": timed.seconds,
            "processor": timed.processor,
        }
    found["faster"] = raw.over_link(raw_bytes, mbit) / delta.over_link(delta_bytes, mbit)
    found["faster_undisturbed"] = raw.undisturbed(raw_bytes, mbit, 1) / delta.undisturbed(delta_bytes, mbit, threads)
    return found


def show(found: dict[str, Any], changed: int) -> None:
    link = f"{found['mbit']:g} Mbit/s" if found["mbit"] else "no limit"
    print(f"{link}: {found['faster']:.2f} times as fast; undisturbed {found['faster_undisturbed']:.2f} times")
    for form in ("delta", "raw"):
        one = found[form]
        parts = ", ".join(f"{name} {one['wall'][name]:.2f} ({one['processor'][name]:.2f})" for name in one["wall"])
        size = f"{one['bytes'] / 1e6:6.2f} MB  {one['bytes'] / changed:.2f} B/change"
        print(f"  {form:5}  {one['wall_s']:6.2f} s, undisturbed {one['undisturbed_s']:6.2f} s  {size}")
        print(f"         wall (processor) seconds: {parts}")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=5e8)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--mbit", type=float, nargs="*", default=[20.0, 200.0, 0.0])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    decoding.usable_cores = lambda: 2 * options.threads  # type: ignore[attr-defined]
    warm = Setting(1 << 28 >> 2, options.density)  # large enough for compiled code, which is loaded once
    push_delta(warm, options.threads)
    setting = Setting(math.ceil(options.parameters), options.density)
    elements = sum(shard.count for shard in setting.shards)
    found = [measure(setting, mbit, options.threads, options.repeats) for mbit in options.mbit]
    if options.json:
        print(json.dumps({"elements": elements, "changed": setting.changed, "links": found}))
        return
    print(f"{elements:,} elements, {setting.changed / elements:.2%} changed, {options.threads} threads a side")
    for one in found:
        show(one, setting.changed)


if __name__ == "__main__":
    main(sys.argv[1:])
