"""What an update costs inside vLLM: the recorded load plan, vLLM's own sparse path, and dense reloads, side by side.

    python benchmarks/weight_apply.py                       # 125 M parameters, 1 % changed, a bfloat16 engine
    python benchmarks/weight_apply.py --dtype float32 --density 0.03 --repeats 10 --json figures.json

Everything runs in the worker of one real engine, on its core, on the same weights and the same update, in turns. Each
way ends at the same weights, which is checked: vLLM's checksums of every parameter must be equal after each. The pause
is measured from outside, with requests in flight: how long the engine stands, from the end of the step that was running
(20 ms before vLLM says that it is paused) to the resume, and the longest gap in what any request receives. Times are
milliseconds: median, and the lowest and the highest; processor time besides, for machines that are shared."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrl.weights import WEIGHT_BACKEND, announcement_of, commit, engine_variables, stage
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes
from streamrl.weights.vllm.load_plan import record_load_plan

VLLM_SLEEP_S = 0.02
"""What ``AsyncLLM.pause_generation`` sleeps, whatever happens."""

WAYS = ("load plan", "vLLM sparse patches", "vLLM load_weights", "vLLM layerwise reload")
IN_FLIGHT = 8
TOKENS = 300

Bits = dict[str, np.ndarray]


class InWorker:
    """Mixed into vLLM's worker: measures there. ``base``, ``updated``: files of bit patterns, by checkpoint name."""

    model_runner: Any
    model_config: Any

    def measure_open(self, base: str, updated: str, shapes: dict[str, list[int]]) -> int:
        """Read both versions; returns how many elements differ."""
        self.versions = [_read(Path(base)), _read(Path(updated))]
        self.specs = {name: TensorSpec(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()}
        self.live = LiveWeights(
            plan := record_load_plan(self.model_runner.model, self.specs),
            count_routes([{n: [r.checkpoint for r in routes] for n, routes in plan.routes.items()}], 0, self.specs),
        )
        old, new = self.versions
        self.positions = {name: np.flatnonzero(old[name] != new[name]) for name in old}
        return sum(positions.size for positions in self.positions.values())

    def measure(self, way: str, to_version: int) -> tuple[float, float, float]:
        """Bring the live weights from the other version to this one.

        Seconds before the engine must stand; seconds, and seconds of processor time, while it stands."""
        started = time.perf_counter()
        act = getattr(self, "_" + way.replace(" ", "_").lower())(to_version)
        ready, used = time.perf_counter(), time.process_time()
        act()
        return ready - started, time.perf_counter() - ready, time.process_time() - used

    def _load_plan(self, to_version: int) -> Callable[[], object]:
        replica = _Held(self.versions[1 - to_version])
        new = self.versions[to_version]
        patches = {n: StagedPatch(p, new[n][p]) for n, p in self.positions.items() if p.size}
        staged = StagedVersion(1, 0, 0, self.specs, patches, 0)
        writes = self.live.prepare(staged, replica)  # type: ignore[arg-type]  # only bits() is asked for
        return lambda: self.live.apply(writes, anchor=False)

    def _vllm_sparse_patches(self, to_version: int) -> Callable[[], object]:
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        new = self.versions[to_version]
        patches = [
            CheckpointWeightPatch(
                name,
                self.specs[name].shape,
                torch.bfloat16,
                _tensor(new[name][p]),
                torch.from_numpy(p.astype(np.int32)),
            )
            for name, p in self.positions.items()
            if p.size
        ]
        return lambda: load_checkpoint_weight_patches(self.model_runner.model, patches)

    def _vllm_load_weights(self, to_version: int) -> Callable[[], object]:
        tensors = self._tensors(to_version)
        return lambda: self.model_runner.model.load_weights(tensors)

    def _vllm_layerwise_reload(self, to_version: int) -> Callable[[], object]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors, model = self._tensors(to_version), self.model_runner.model

        def reload() -> None:
            with torch.no_grad(), set_current_vllm_config(self.model_runner.vllm_config):
                initialize_layerwise_reload(model)
                model.load_weights(tensors)
                finalize_layerwise_reload(model, self.model_config)

        return reload

    def _tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [(n, _tensor(b).view(self.specs[n].shape)) for n, b in self.versions[version].items()]

    def measure_commits(self) -> None:
        """From now on, time what every commit through the weight backend does in this worker."""
        self.commit_seconds: dict[str, list[float]] = {"apply": [], "advance": []}
        for owner, method in ((LiveWeights, "apply"), (CheckpointReplica, "advance")):
            setattr(owner, method, _timed(getattr(owner, method), self.commit_seconds[method]))

    def measured_commits(self) -> dict[str, list[float]]:
        """Seconds of writing and checking the live weights, and of bringing the replica after them, by commit."""
        return self.commit_seconds


def _timed(original: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = original(*arguments, **options)
        seconds.append(time.perf_counter() - started)
        return result

    return timed


class _Held:
    """A replica that only answers what a load plan asks."""

    def __init__(self, bits: Bits) -> None:
        self._bits = bits

    def bits(self, name: str) -> np.ndarray:
        return self._bits[name]


def _read(path: Path) -> Bits:
    with np.load(path) as opened:
        return {name: opened[name] for name in opened.files}


def _tensor(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def make_model(directory: Path, layers: int) -> tuple[Bits, dict[str, tuple[int, ...]]]:
    """A random Qwen2 with biases and tied embeddings; its bits and shapes by checkpoint name."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    named = dict(model.named_parameters())
    bits = {n: p.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16).copy() for n, p in named.items()}
    return bits, {n: tuple(p.shape) for n, p in named.items()}


def step(bits: Bits, density: float, seed: int) -> Bits:
    """Elements at random places, one unit in the last place away."""
    random = np.random.default_rng(seed)
    result = {}
    for name, old in bits.items():
        new = old.copy()
        new[random.integers(0, old.size, max(1, round(density * old.size)))] ^= np.uint16(1)
        result[name] = new
    return result


async def compare_ways(llm: Any, base: Path, updated: Path, shapes: Any, repeats: int) -> dict[str, Any]:
    """Seconds of each way, in turns; every way from either version to the other."""
    (elements,) = await llm.collective_rpc("measure_open", args=(str(base), str(updated), shapes))
    seconds: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    checksums: dict[int, Any] = {0: await llm.compute_weight_checksums()}
    version = 0
    for turn in range(repeats + 1):  # the first one warms up
        for way in WAYS:
            version = 1 - version
            (taken,) = await llm.collective_rpc("measure", args=(way, version))
            found = await llm.compute_weight_checksums()
            if found != checksums.setdefault(version, found):
                raise RuntimeError(f"{way} did not lead to the weights that the others led to")
            if turn:
                seconds[way].append(tuple(taken))
    return {"changed_elements": elements, "seconds": seconds}


async def measure_pause(llm: Any, bits: Bits, shapes: Any, directory: Path, density: float, pushes: int) -> Any:
    """Push versions while requests are in flight: gaps they see, against apply times and plain steps."""
    shards = [ShardSpec(name, "bfloat16", tuple(shape), 0, bits[name].size) for name, shape in shapes.items()]
    publisher = WeightPublisher(f"ipc://{directory}/weights", run_id="benchmark", rank=0, shards=shards)
    publisher.start()
    stop = asyncio.Event()
    arrivals: list[list[float]] = [[] for _ in range(IN_FLIGHT)]
    commits: list[tuple[float, float, float]] = []
    try:
        await push(llm, publisher, 0, bits)
        await llm.collective_rpc("measure_commits")
        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(sample_until(stop, llm, times)) for times in arrivals]
            for version in range(1, pushes + 1):
                bits = await asyncio.to_thread(step, bits, density, version)
                commits.append(await push(llm, publisher, version, bits))
                await asyncio.sleep(1.0)  # plain steps between two pushes
            stop.set()
    finally:
        publisher.close()
    (in_worker,) = await llm.collective_rpc("measured_commits")
    lengths = [length for each in requests for length in each.result()]
    if set(lengths) != {TOKENS}:
        raise RuntimeError(f"completions of {sorted(set(lengths))} tokens instead of {TOKENS}")
    gaps = [gaps_around(arrivals, began, ended) for began, _, ended in commits]
    return {"gaps": gaps, **in_worker, "commits": commits, "completions": len(lengths)}


async def push(llm: Any, publisher: WeightPublisher, version: int, bits: Bits) -> tuple[float, float, float]:
    """When the pause was asked for, was there, and ended (``time.monotonic``)."""
    published = await asyncio.to_thread(publisher.publish, version, bits)
    await stage(llm, announcement_of(version, [published]))
    began = time.monotonic()
    await llm.pause_generation(mode="keep", clear_cache=False)
    paused = time.monotonic()
    try:
        await commit(llm, version)
    finally:
        await llm.resume_generation()
    ended = time.monotonic()
    publisher.acknowledge(version)
    return began, paused, ended


async def sample_until(stop: asyncio.Event, llm: Any, arrivals: list[float]) -> list[int]:
    """Sample one completion after the other, the last one to its end; note when tokens arrive. Returns the lengths."""
    from vllm import SamplingParams

    lengths: list[int] = []
    while not stop.is_set():
        parameters = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [3, 5, 7, 11]}
        async for output in llm.generate(prompt, parameters, f"{id(arrivals)}-{len(lengths)}"):
            arrivals.append(time.monotonic())
            length = len(output.outputs[0].token_ids)
        lengths.append(length)
    return lengths


def gaps_around(arrivals: list[list[float]], began: float, ended: float) -> tuple[float, float]:
    """The longest gap that any request saw around a pause, and the median step in the second before it."""
    longest, steps = 0.0, []
    for times in arrivals:
        before = [t for t in times if t <= began]
        after = [t for t in times if t > ended]
        inside = [t for t in times if began < t <= ended]
        if before and after:
            marks = [before[-1], *inside, after[0]]
            longest = max(longest, max(b - a for a, b in itertools.pairwise(marks)))
        recent = [t for t in before if t > began - 1.0]
        steps += [b - a for a, b in itertools.pairwise(recent)]
    return longest, statistics.median(steps) if steps else float("nan")


def spread(seconds: Sequence[float]) -> str:
    """Median (lowest to highest), in milliseconds."""
    values = sorted(1e3 * s for s in seconds)
    return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"


def report(figures: dict[str, Any]) -> None:
    """The figures as lines."""
    print(f"{figures['parameters']:,} parameters, {figures['changed_elements']:,} changed, {figures['dtype']} engine")
    own = [statistics.median(taken[kind] for taken in figures["seconds"]["load plan"]) for kind in range(3)]
    for way, taken in figures["seconds"].items():
        before, standing, used = zip(*taken, strict=True)
        print(
            f"{way:>22}: {spread(standing)} ms while the engine stands, {statistics.median(standing) / own[1]:.1f} x; "
            f"{spread(used)} ms of processor time, {statistics.median(used) / own[2]:.1f} x; {spread(before)} ms before"
        )
    pause = figures["pause"]
    seen = [gap - plain for gap, plain in pause["gaps"]]
    stands = [ended - paused + VLLM_SLEEP_S for _, paused, ended in pause["commits"]]
    in_worker = [apply + advance for apply, advance in zip(pause["apply"], pause["advance"], strict=True)]
    beyond = [whole - worker - VLLM_SLEEP_S for whole, worker in zip(stands, in_worker, strict=True)]
    print(f"pause of {len(seen)} pushes, {IN_FLIGHT} requests in flight, {pause['completions']} completions, none cut:")
    print(f"{'the engine stands':>22}: {spread(stands)} ms, vLLM's sleep of 20 ms included")
    print(
        f"{'apply in the worker':>22}: {spread(pause['apply'])} ms, and {spread(pause['advance'])} ms for the replica"
    )
    print(f"{'beyond both and 20 ms':>22}: {spread(beyond)} ms")
    print(f"{'seen by a request':>22}: {spread(seen)} ms (longest gap less a plain step, which varies)")


async def measure_all(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything, on one engine."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    bits, shapes = make_model(directory / "model", options.layers)
    base, updated = directory / "base.npz", directory / "updated.npz"
    np.savez(base, **bits)  # type: ignore[arg-type]
    np.savez(updated, **step(bits, options.density, 0))  # type: ignore[arg-type]
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(directory / "model"),
            skip_tokenizer_init=True,
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=TOKENS + 20,
            max_num_seqs=IN_FLIGHT,
            max_num_batched_tokens=2048,
            enable_chunked_prefill=False,
            num_gpu_blocks_override=64,
            disable_log_stats=True,
            worker_extension_cls="weight_apply.InWorker",
            weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND),
        )
    )
    try:
        ways = await compare_ways(llm, base, updated, {n: list(s) for n, s in shapes.items()}, options.repeats)
        pause = await measure_pause(llm, bits, shapes, directory, options.density, options.pushes)
    finally:
        llm.shutdown()
    total = sum(b.size for b in bits.values())
    return {"parameters": total, "dtype": options.dtype, "density": options.density, **ways, "pause": pause}


def main() -> int:
    """Measure and report."""
    arguments = argparse.ArgumentParser(description="What applying a weight update costs inside vLLM.")
    arguments.add_argument("--layers", type=int, default=12, help="12: 125 M parameters")
    arguments.add_argument("--density", type=float, default=0.01)
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the engine")
    arguments.add_argument("--repeats", type=int, default=7)
    arguments.add_argument("--pushes", type=int, default=8)
    arguments.add_argument("--json", type=Path, help="write the raw figures here")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.environ.update(engine_variables())
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=str(min(os.sched_getaffinity(0))),
            VLLM_RPC_BASE_PATH=name,
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
            PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        )
        figures = asyncio.run(measure_all(options, Path(name)))
    report(figures)
    if options.json:
        options.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
