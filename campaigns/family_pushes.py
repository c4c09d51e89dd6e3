"""20 pushes to a real vLLM engine of each family, which is killed after the tenth: each tensor against a fresh engine.

    python -m campaigns family_pushes qwen3_5 gpt_oss --out pushes

A tiny checkpoint of the family, of which each version changes 2 % of each tensor. Publisher, transaction and engine are
those of a run. After ten pushes the engine's core gets SIGKILL, another engine loads the checkpoint and is admitted
with what it lacks, and ten more pushes follow. The core says the digest of each parameter, each buffer and each further
tensor of its model. Passed: the published hash after each push, what the killed engine held in the engine that follows
it, and after the last push what a fresh engine has that loads an export of this version; both also choose the same
tokens with the same logprobs. Each family has a process of its own; one that has its file in ``--out`` is not tried
again. About a minute a family."""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anyio
import psutil
from msgspec.structs import replace

from campaigns.family_runs import write_project
from streamrl.base.errors import EngineError, StreamRLError
from streamrl.base.messages import Generate, WeightAnnouncement, announcement_of
from streamrl.base.types import token_array
from streamrl.learning.families.family import read_families
from streamrl.recipe.scheduling import InFlight

PUSHES = 20
KILL_AFTER = 10
CHANGED_BY_ENGINES = (":kv_cache",)
"""Tensors of modules that are no weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("families", nargs="*", help="names of tables (all)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result of each family")
    parser.set_defaults(work=try_families)


def try_families(arguments: argparse.Namespace) -> int:
    """Print the table; 1 where a family failed."""
    import torch

    torch.set_num_threads(1)  # vLLM forks its core: no thread of OpenMP may be there
    import_module("vllm.v1.engine.async_llm")  # once, for all families
    add_digests()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.families or read_families():
        file = arguments.out / name
        if not file.exists():
            file.write_text(result_of(name, arguments.out / f"{name}.log"))
        result = file.read_text()
        print(f"{name:16} {result}", flush=True)
        failed += not result.startswith("equal")
    return int(failed > 0)


def result_of(name: str, log: Path) -> str:
    """Try a family in a process of its own, and return its line. What vLLM says goes to ``log``."""
    began = time.monotonic()
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        try:
            result = pool.submit(try_family, name, log).result()
        except (StreamRLError, BrokenProcessPool) as error:
            result = f"FAILED: {' '.join(str(error).split())}"
    return f"{result} ({time.monotonic() - began:.0f} s)"


def try_family(name: str, log: Path) -> str:
    """Write the project of a family, and push to its engine."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with tempfile.TemporaryDirectory(prefix="family") as folder:
        write_project(name, Path(folder))
        return anyio.run(push_and_kill, Path(folder), backend_options={"use_uvloop": True})


async def push_and_kill(folder: Path) -> str:
    """Return what differs, or ``equal`` with the number of tensors and how the second engine got the version."""
    from streamrl.engines.families import push_probe
    from streamrl.engines.push.weight_sync import WeightSync
    from streamrl.engines.vllm.engine import RunEngine
    from streamrl.engines.vllm.load_plan_probe import published_tensors
    from streamrl.engines.vllm.options import engine_options
    from streamrl.recipe.rules.load_recipe import load_recipe

    options = engine_options(load_recipe(folder / "recipe.toml"), 0, folder, device="cpu")
    checkpoint = Path(options.model_path)
    tensors = published_tensors(options.model_path)
    bits = push_probe.published_bits(checkpoint, tensors)
    publisher = push_probe.open_publisher(f"ipc://{folder}/weights", checkpoint, tensors)

    async def anchor(version: int) -> WeightAnnouncement:
        anchors.append(version)
        return announcement_of(version, [publisher.publish_anchor(version)])

    anchors: list[int] = []
    engine = RunEngine(options)
    await engine.start()
    sync = WeightSync({"engine-0": engine}, anchor, in_flight=InFlight.RECOMPUTE, timeout_s=120.0)
    try:
        for version in range(1, PUSHES + 1):
            bits = push_probe.changed(bits, version)
            published = publisher.publish(version, bits)
            await sync.push(announcement_of(version, [published]))
            publisher.acknowledge(version)
            await answer_of(engine)
            if version == KILL_AFTER:
                held = await digests_of(engine)
                await kill(engine)
                sync.remove(engine)
                engine = RunEngine(options)
                await engine.start()
                await sync.admit("engine-0", engine)
                if difference := difference_of(await digests_of(engine), held):
                    return f"FAILED: after the kill {difference}"
        live, answer = await digests_of(engine), await answer_of(engine)
    finally:
        publisher.close()
        await engine.aclose()
    push_probe.write_version(checkpoint, folder / "last", bits, tensors)
    fresh = RunEngine(replace(options, model_path=str(folder / "last")))
    await fresh.start()
    try:
        expected, expected_answer = await digests_of(fresh), await answer_of(fresh)
    finally:
        await fresh.aclose()
    if difference := difference_of(live, expected):
        return f"FAILED: after the last push {difference}"
    if answer != expected_answer:
        return f"FAILED: it answers {answer}, and a fresh engine {expected_answer}"
    how = f"anchors of {anchors}" if anchors else "by deltas alone"
    return f"equal: {len(live)} tensors in each of {PUSHES} versions, {how}"


async def kill(engine: Any) -> None:
    """End the engine's core by SIGKILL, and return when the engine has noticed."""
    for process in psutil.Process().children():
        process.kill()
    try:
        with anyio.fail_after(30.0):
            await engine.watch()
    except EngineError:
        await engine.aclose()


async def answer_of(engine: Any) -> tuple[list[int], list[float]]:
    """Tokens that the engine chooses, and their logprobs."""
    prompt = token_array([1, *range(5, 12)])
    request = Generate(request_id=f"{time.monotonic_ns()}", token_ids=prompt, max_tokens=12, seed=0, temperature=0.0)
    completion = await engine.generate(request)
    return completion.token_ids.tolist(), completion.behavior_logprobs.tolist()


def add_digests() -> None:
    """Give vLLM's workers, which are forks of this process, a method that digests the tensors of their model."""
    from vllm.v1.worker.worker_base import WorkerBase

    from streamrl.engines.families.push_probe import tensors_of
    from streamrl.weights.vllm.post_load_changes import bytes_of

    def family_digests(worker: Any) -> dict[str, str]:
        tensors = tensors_of(worker.model_runner.get_model())
        return {name: hashlib.sha256(bytes_of(tensor).numpy().data).hexdigest() for name, tensor in tensors}

    WorkerBase.family_digests = family_digests


async def digests_of(engine: Any) -> Mapping[str, str]:
    """Digests of the tensors of an engine, by name."""
    [digests] = await engine.front_end.collective_rpc("family_digests")
    return {name: digest for name, digest in digests.items() if not name.endswith(CHANGED_BY_ENGINES)}


def difference_of(digests: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Names of tensors that differ; empty: none."""
    names = sorted(digests.keys() | expected.keys())
    different = [name for name in names if digests.get(name) != expected.get(name)]
    return f"{len(different)} of {len(names)} tensors differ: {', '.join(different[:5])}" if different else ""
