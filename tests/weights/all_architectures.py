"""Many random deltas into every kind of model, each compared with an engine that loads the result afresh.

    python tests/weights/all_architectures.py                      # all of them, one worker and two: about 10 minutes
    python tests/weights/all_architectures.py qwen2-moe --workers 2 --deltas 100
    python tests/weights/all_architectures.py qwen3 --quantization fp8_per_channel    # quantised after loading
    python tests/weights/all_architectures.py qwen3 --linear stock                    # packed after loading: no weights
    python tests/weights/all_architectures.py qwen3 --engine '{"pipeline_parallel_size": 2}' --workers 1

Two tests that share no code with the load plan: vLLM's own checksum of every runtime parameter (asserted to hold
something: a parameter that the engine packed away hashes as nothing), and 40 greedy tokens."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from streamrl.weights import WeightPublisher
from streamrl.weights.requests import MANIFEST, decode_request
from tests.weights.real_engines import (
    ARCHITECTURES,
    Architecture,
    Push,
    changed_at_random,
    engine_variables,
    publisher_of,
    running_engine,
    sample,
    save_bits,
    write_model,
)

EMPTY = hashlib.sha256(b"").hexdigest()


async def push_many(
    directory: Path,
    architecture: Architecture,
    *,
    dtype: str,
    workers: int,
    deltas: int,
    quantization: str | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[dict[str, str], list[int], dict[str, str], list[int]]:
    """Checksums and greedy tokens after an anchor and ``deltas`` deltas, and those of a fresh engine on the result.
    ``more``: arguments of an engine that nothing is sampled from."""
    model = directory / "model"
    bits, shapes = write_model(model, architecture)
    with publisher_of(shapes, directory, checkpoint=model) as publisher:
        options = {"tensor_parallel_size": workers, "quantization": quantization, **(more or {})}
        length = 0 if more else 40
        async with running_engine(model, dtype, **options) as llm:
            push = Push(llm, publisher)
            asked = count_chunks(publisher)
            for version in range(deltas + 1):
                bits = changed_at_random(bits, version)
                announcement = push.publish(version, bits)
                asked.clear()
                done = await push.commit(announcement)
                assert set(asked.values()) <= {1}, "a chunk was sent to more than one worker of this machine"
                assert asked
                assert done.state_hash == announcement.state_hash
                # The first is a delta on the checkpoint, where what is published has the names of its tensors.
                assert (announcement.base_version is None) == (version == 0 and architecture.published == "parameters")
                assert push.sent_as_announced(announcement), version
            pushed, tokens = await push.checksums(), await sampled(llm, length)
    save_bits(model, bits, shapes)
    async with running_engine(model, dtype, **options) as fresh:
        loaded = await Push(fresh, publisher).checksums()
        return pushed, tokens, loaded, await sampled(fresh, length)


async def sampled(llm: Any, length: int) -> list[int]:
    """Greedy tokens, as many."""
    return list((await sample(llm, length)).token_ids) if length else []


def count_chunks(publisher: WeightPublisher) -> Counter[bytes]:
    """From now on, how often each chunk is asked for."""
    asked: Counter[bytes] = Counter()
    answer = publisher._server._answer

    def counted(frames: Sequence[bytes]) -> object:
        asked.update(frame for frame in frames if decode_request(frame).piece != MANIFEST)
        return answer(frames)

    publisher._server._answer = counted  # type: ignore[assignment,method-assign]
    return asked


def faults_of(
    pushed: dict[str, str], tokens: list[int], loaded: dict[str, str], fresh: list[int], *, packed_away: bool = False
) -> list[str]:
    """What is wrong; empty when the engine that was pushed to equals the fresh one. ``packed_away``: some parameters
    hold nothing, and only the output tells what is computed with."""
    faults = [f"{name}: empty" for name, digest in pushed.items() if digest == EMPTY and not packed_away]
    faults += [f"{name}: on one engine only" for name in sorted(pushed.keys() ^ loaded.keys())]
    faults += [f"{name}: differs" for name in pushed.keys() & loaded.keys() if pushed[name] != loaded[name]]
    if not pushed:
        faults.append("no parameters")
    return faults if tokens == fresh else [*faults, f"greedy output differs: {tokens} and {fresh}"]


def main() -> int:
    """Exit code 1 when any model differs."""
    arguments = argparse.ArgumentParser(description="Push random deltas into every kind of model.")
    arguments.add_argument("architectures", nargs="*", default=[], help=", ".join(ARCHITECTURES))
    arguments.add_argument("--workers", type=int, choices=(1, 2), help="tensor-parallel size (default: 1 and then 2)")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments.add_argument("--deltas", type=int, default=100)
    arguments.add_argument("--quantization", help="what vLLM does to the weights after loading, e.g. fp8_per_channel")
    arguments.add_argument("--linear", choices=("plain", "packed", "stock"), default="plain")
    arguments.add_argument(
        "--engine",
        type=json.loads,
        help="JSON: arguments of vLLM that its CPU engine takes weights with, and dies of at a request",
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)  # an engine's core is a fork of this process, and would wait for OpenMP's threads
    failed, stages = False, (options.engine or {}).get("pipeline_parallel_size", 1)
    for name in options.architectures or ARCHITECTURES:
        for workers in (options.workers,) if options.workers else (1, 2):
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                variables = engine_variables(Path(directory), workers=workers * stages, linear=options.linear)
                os.environ.update(variables)
                compared = asyncio.run(
                    push_many(
                        Path(directory),
                        ARCHITECTURES[name],
                        dtype=options.dtype,
                        workers=workers,
                        deltas=options.deltas,
                        quantization=options.quantization,
                        more=options.engine,
                    )
                )
            faults = faults_of(*compared, packed_away=options.linear == "stock")
            seconds = time.monotonic() - started
            output = "" if options.engine else ", greedy output equal"
            outcome = "; ".join(faults[:5]) or f"{len(compared[0])} parameters bit-equal{output}"
            print(f"{name}, {workers} workers, {options.deltas} deltas, {seconds:.0f} s: {outcome}", flush=True)
            failed = failed or bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
