"""Which cores the workers of an engine get, and whether the machine has them. No torch and no vllm here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from streamrl.plan.topology import PreparedSet, prepared_sets
from streamrl.recipe.sections import Launch, Recipe


def workers_on_cores(numbers: list[int], place: int, mine: PreparedSet) -> dict[str, str]:
    """vLLM's binding of the workers of the engine at ``place`` of its set: cores of its own for each worker, where
    there are enough. ``numbers``: the cores that it may use; the recipe not naming them, half of the host's are for all
    engines, and one for each worker at least."""
    workers = mine.count * mine.tensor_parallel_size
    if not mine.cores and len(numbers) >= workers:
        numbers = numbers[: max(len(numbers) // 2, workers)]
        each = len(numbers) // mine.count
        numbers = numbers[place * each : (place + 1) * each]
    each = max(len(numbers) // mine.tensor_parallel_size, 1)
    parts = [numbers[worker * each : (worker + 1) * each] for worker in range(mine.tensor_parallel_size)]
    bound = [",".join(map(str, part or [numbers[i % len(numbers)]])) for i, part in enumerate(parts)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}


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
    cores = len(os.sched_getaffinity(0))
    heads = int(config.get("num_attention_heads") or 1)
    for index, one in enumerate(prepared_sets(recipe)):
        where = "engines" if index == 0 else f"engines.advanced.sets.{index - 1}"
        if one.tensor_parallel_size == 1:
            continue  # several may share a device
        if heads % one.tensor_parallel_size:
            sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            yield (
                f"{where}.tensor_parallel_size: the model has {heads} attention heads, which "
                f"{one.tensor_parallel_size} workers cannot share: set one of {sizes}"
            )
        if device == "cpu" and one.count * one.tensor_parallel_size > cores:
            yield (
                f"{where}: {one.count} engines of {one.tensor_parallel_size} workers need "
                f"{one.count * one.tensor_parallel_size} cores, and this machine has {cores}: lower count or "
                "tensor_parallel_size"
            )
