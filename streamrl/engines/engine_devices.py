"""Which cores or CUDA devices the engines of a set get, and whether the machine has them. No torch and no vllm here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.config.recipe import Launch, Recipe
from streamrl.config.topology import PreparedSet, prepared_sets

CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


def workers_on_cores(numbers: list[int], place: int, mine: PreparedSet) -> dict[str, str]:
    """vLLM's binding of the workers of the engine at ``place`` of its set: cores of its own for each worker, where
    there are enough. ``numbers``: the cores that it may use; the recipe not naming them, half of the host's are for all
    engines, and one for each worker at least."""
    workers = mine.count * mine.tensor_parallel
    if not mine.cores and len(numbers) >= workers:
        numbers = numbers[: max(len(numbers) // 2, workers)]
        each = len(numbers) // mine.count
        numbers = numbers[place * each : (place + 1) * each]
    each = max(len(numbers) // mine.tensor_parallel, 1)
    parts = [numbers[worker * each : (worker + 1) * each] for worker in range(mine.tensor_parallel)]
    bound = [",".join(map(str, part or [numbers[i % len(numbers)]])) for i, part in enumerate(parts)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}


def cuda_devices(place: int, mine: PreparedSet) -> dict[str, str]:
    """The devices of the engine at ``place`` of its set, out of those that this process may use: each engine has
    ``tensor_parallel`` of its own. Nothing is set where there are fewer: then all share what there is."""
    visible = visible_devices()
    if len(visible) < mine.count * mine.tensor_parallel:
        return {}
    first = place * mine.tensor_parallel
    return {CUDA_DEVICES: ",".join(visible[first : first + mine.tensor_parallel])}


def visible_devices() -> list[str]:
    """CUDA devices that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get(CUDA_DEVICES)
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip()]
    directory = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(directory.iterdir())] if directory.is_dir() else []


def core_numbers(cores: str) -> list[int]:
    """``0-3,6`` as numbers."""
    numbers: list[int] = []
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def device_problems(recipe: Recipe, config: dict[str, Any], *, device: str) -> Iterator[str]:
    """Why a set of engines of ``recipe`` cannot run on this machine; ``config``: the model's."""
    if recipe.transport.engines is not Launch.LOCAL:
        return
    there, what = len(visible_devices()), "CUDA devices"
    if device == "cpu":
        there, what = len(os.sched_getaffinity(0)), "cores"
    heads = int(config.get("num_attention_heads") or 1)
    for index, one in enumerate(prepared_sets(recipe)):
        where = "engines" if index == 0 else f"engines.sets.{index - 1}"
        if one.tensor_parallel == 1:
            continue  # several may share a device
        if heads % one.tensor_parallel:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            yield (
                f"{where}.tensor_parallel: the model has {heads} attention heads, which {one.tensor_parallel} workers "
                f"cannot share: set one of {sizes}"
            )
        if one.count * one.tensor_parallel > there:
            yield (
                f"{where}: {one.count} engines of {one.tensor_parallel} workers need "
                f"{one.count * one.tensor_parallel} {what}, and this machine has {there}: lower count or "
                "tensor_parallel"
            )
