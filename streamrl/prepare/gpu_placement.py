"""GPUs of this host for the processes of a run: the memory that they need, and the GPU of each process. Called in the
process of the command: by the checks before a run, by the start of the run, and by the dry run. ``place`` is pure:
``gpu_placement`` gives it what the host and the models have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.engines.vllm.options import OWN_GPU_SHARE, max_model_len, model_config
from streamrl.engines.vllm.visible_gpus import Gpu, visible_gpus
from streamrl.prepare.memory import device_bytes
from streamrl.pretrained.model_facts import ModelFacts, read_model_facts
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import JUDGE, PreparedSet, Topology, prepared_sets

CONTEXT_BYTES = 1 << 30
"""Memory of a process that is no engine, beside its tensors: CUDA's context, kernels, NCCL's buffers, fragmentation."""


_SLACK = 0.04
"""Share of a GPU that stays free where engines take what other processes leave: vLLM's start wants its share whole."""
_SMALLER = 'use more GPUs or fewer engines, a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"'


class Demand(Struct, frozen=True, kw_only=True):
    """GPU memory in bytes.

    ``engine``: weights of one engine and the cache of one request.
    ``rank``: memory of one trainer rank.
    ``rewards``: memory of one reward worker on each of its GPUs.
    ``reward_gpus``: number of GPUs of one reward worker."""

    engine: int = 0
    rank: int = 0
    rewards: int = 0
    reward_gpus: int = 0


class Tenant(Struct, frozen=True, kw_only=True):
    """A process and its GPUs, all of one host. An engine takes ``share`` of each GPU, any other process, the judge too,
    ``size`` bytes.
    ``least``: bytes of each GPU without which an engine cannot run."""

    gpus: tuple[Gpu, ...]
    share: float = 0.0
    size: int = 0
    least: int = 0

    def bytes_on(self, gpu: Gpu) -> int:
        """Bytes that the tenant takes of one of its GPUs."""
        return int(self.share * gpu.memory) or self.size


class GpuPlacement(Struct, kw_only=True):
    """Processes of a run on the GPUs of this host.

    ``tenants``: processes that use GPUs, by name.
    ``problems``: reasons why the run does not fit, each with its remedy.
    ``shares``: share of each GPU, by its name, that all engines of one set may take.
    ``is_share_fixed``: whether the recipe names the share."""

    gpus: tuple[Gpu, ...] = ()
    shares: dict[str, float] = {}
    is_share_fixed: bool = False
    tenants: dict[str, Tenant] = {}
    problems: list[str] = []

    def on(self, gpu: Gpu) -> dict[str, Tenant]:
        """Return the tenants of one GPU, by name."""
        return {name: tenant for name, tenant in self.tenants.items() if gpu in tenant.gpus}

    def used(self, gpu: Gpu) -> int:
        """Bytes in use on one GPU. Only one of the prepared sets of engines is awake at a time."""
        tenants = self.on(gpu).values()
        engine_share = min(sum(tenant.share for tenant in tenants), self.shares.get(gpu.name, 0.0))
        return int(engine_share * gpu.memory) + self.used_by_others(gpu)

    def used_by_others(self, gpu: Gpu) -> int:
        """Bytes in use on one GPU by processes that are no engines."""
        return sum(tenant.size for tenant in self.on(gpu).values())

    def room_order(self, gpu: Gpu) -> tuple[bool, int]:
        """Key that sorts GPUs: first those that no process uses, then those with most memory left."""
        return bool(self.on(gpu)), self.used(gpu) - gpu.memory

    def text(self, gpu: Gpu) -> str:
        """List the tenants of one GPU, with their GiB."""
        return ", ".join(f"{name} {_gib(tenant.bytes_on(gpu))}" for name, tenant in self.on(gpu).items())

    def lines(self) -> list[str]:
        """One line for each GPU, as the dry run prints it."""
        return [
            f"  GPU {gpu.name:<4} {_gib(self.used(gpu)):>6} of {_gib(gpu.memory)} GiB: {self.text(gpu) or 'nothing'}"
            for gpu in self.gpus
        ]

    def placed(self, topology: Topology) -> Topology:
        """``topology`` whose processes know their GPUs."""
        processes = list(topology.processes)
        for index, process in enumerate(processes):
            if tenant := self.tenants.get(process.name):
                names = tuple(gpu.name for gpu in tenant.gpus)
                processes[index] = replace(process, gpus=names, gpu_memory_utilization=tenant.share)
        return replace(topology, processes=tuple(processes))


def place(recipe: Recipe, gpus: Sequence[Gpu], demand: Demand) -> GpuPlacement:
    """GPUs for the processes that this run starts.

    Engines come first, then ranks, the judge and reward models, each on GPUs of its own. Where GPUs are too few,
    engines share them evenly, and each other process takes the GPU that has most memory left. Where the recipe names no
    share for engines, those beside other processes get what these leave."""
    fixed_share = recipe.engines.gpu_memory_utilization
    shares = {gpu.name: fixed_share or OWN_GPU_SHARE for gpu in gpus}
    placement = GpuPlacement(gpus=tuple(gpus), shares=shares, is_share_fixed=fixed_share > 0)
    if not gpus:
        return placement
    if recipe.engines.kind is EngineKind.VLLM and recipe.on_one_host:
        for prepared_set in prepared_sets(recipe):
            _place_engines(placement, prepared_set, demand.engine)
    if recipe.training.device != "cpu" and recipe.on_one_host:
        _place_ranks(placement, recipe, demand.rank)
    if recipe.judge.model:
        best = _best(placement, gpus)
        placement.tenants[JUDGE] = Tenant(gpus=(best,), size=int(recipe.judge.gpu_memory_utilization * best.memory))
    _place_reward_workers(placement, recipe, demand)
    if not placement.is_share_fixed:
        _leave_room_for_others(placement)
    placement.problems += _memory_problems(placement)
    return placement


def _leave_room_for_others(placement: GpuPlacement) -> None:
    """Give the engines of each GPU what other processes leave of it."""
    for gpu in placement.gpus:
        if gpu.memory:
            free_share = 1 - placement.used_by_others(gpu) / gpu.memory - _SLACK
            placement.shares[gpu.name] = min(OWN_GPU_SHARE, max(0.01, math.floor(100 * free_share) / 100))
    for name, tenant in placement.tenants.items():
        if tenant.share:
            scale = min(placement.shares[gpu.name] for gpu in tenant.gpus) / OWN_GPU_SHARE
            placement.tenants[name] = replace(tenant, share=tenant.share * scale)


def _place_engines(placement: GpuPlacement, prepared_set: PreparedSet, least: int) -> None:
    """Place each engine on neighbouring GPUs: one engine a group of GPUs while there are enough groups."""
    width = prepared_set.workers
    gpus = placement.gpus
    groups = [gpus[first : first + width] for first in range(0, len(gpus) - width + 1, width)]
    if not groups or (width > 1 and prepared_set.count > len(groups)):
        placement.problems.append(
            f"engines.tensor_parallel_size: engines {prepared_set.name} need {prepared_set.count} x {width} GPUs, "
            f"and there are {len(placement.gpus)}: lower count or tensor_parallel_size"
        )
        return
    on_group = Counter(number % len(groups) for number in range(prepared_set.count))
    for number, name in enumerate(prepared_set.engines):
        group = number % len(groups)
        share = min(placement.shares[gpu.name] for gpu in groups[group]) / on_group[group]
        placement.tenants[name] = Tenant(gpus=groups[group], share=share, least=least // width)


def _place_ranks(placement: GpuPlacement, recipe: Recipe, size: int) -> None:
    """Place each rank on a GPU of its own: NCCL refuses two on one. ``training.device = "cuda:1"`` names the GPU of the
    only rank."""
    ranks = recipe.training.ranks
    device = recipe.training.device
    free_gpus = list(placement.gpus)
    if device.startswith("cuda:"):
        free_gpus = [gpu for number, gpu in enumerate(free_gpus) if device == f"cuda:{number}"]
    if ranks > len(free_gpus):
        placement.problems.append(
            f'training.ranks: {ranks} need a GPU each, and device = "{device}" leaves {len(free_gpus)} of '
            f'{len(placement.gpus)}: lower it, or write "cuda"'
        )
    for rank in range(min(ranks, len(free_gpus))):
        gpu = _best(placement, free_gpus)
        free_gpus.remove(gpu)
        placement.tenants[f"trainer-{rank}"] = Tenant(gpus=(gpu,), size=size)


def _place_reward_workers(placement: GpuPlacement, recipe: Recipe, demand: Demand) -> None:
    count = demand.reward_gpus
    if count > len(placement.gpus):
        placement.problems.append(
            f"rewards.advanced.gpus: a reward worker needs {count}, and there are {len(placement.gpus)}: lower it"
        )
    elif count:
        for index in range(recipe.reward_limits.workers):
            free = sorted(placement.gpus, key=placement.room_order)
            placement.tenants[f"reward-{index}"] = Tenant(gpus=tuple(free[:count]), size=demand.rewards)


def _best(placement: GpuPlacement, gpus: Sequence[Gpu]) -> Gpu:
    """The first GPU that no process uses, else the GPU with most memory left."""
    return min(gpus, key=placement.room_order)


def _memory_problems(placement: GpuPlacement) -> Iterator[str]:
    """One sentence at most: about the GPU that lacks most, else about the first engine whose share is too small."""
    gpu = max(placement.gpus, key=lambda gpu: (bool(gpu.memory), placement.used(gpu) - gpu.memory))
    engines = [tenant for tenant in placement.on(gpu).values() if tenant.share]
    bytes_used = placement.used(gpu)
    if gpu.memory and bytes_used > gpu.memory:
        free_share = int(100 * (1 - placement.used_by_others(gpu) / gpu.memory)) / 100
        remedy = _SMALLER
        scale = free_share / placement.shares[gpu.name]
        if placement.is_share_fixed and all(tenant.share * scale * gpu.memory > tenant.least for tenant in engines):
            remedy = f"set engines.gpu_memory_utilization = {free_share:g} or less, or remove it"
        yield (
            f"memory: GPU {gpu.name} has {_gib(gpu.memory)} GiB, and {placement.text(gpu)} need {_gib(bytes_used)}: "
            f"{remedy}"
        )
        return
    for name, engine in placement.tenants.items():
        bytes_given = engine.bytes_on(engine.gpus[0])
        if 0 < bytes_given < engine.least:
            remedy = _SMALLER
            if placement.is_share_fixed or not placement.used_by_others(engine.gpus[0]):
                remedy = "raise engines.gpu_memory_utilization or tensor_parallel_size, or lower count"
            yield (
                f"memory: {name} may take {_gib(bytes_given)} GiB of GPU {engine.gpus[0].name}, and its weights and "
                f"one request need {_gib(engine.least)}: {remedy}"
            )
            return


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"


def gpu_placement(recipe: Recipe) -> GpuPlacement:
    """GPUs of this host for the processes of ``recipe`` (see ``place``)."""
    gpus = visible_gpus()
    return place(recipe, gpus, _demand(recipe, gpus) if gpus else Demand())


def _demand(recipe: Recipe, gpus: Sequence[Gpu]) -> Demand:
    """Memory that the models need on ``gpus``; 0 for a model that cannot be read, which ``preflight`` reports."""
    smallest_card = min(gpu.memory for gpu in gpus)
    model = facts_of(recipe.model.path)
    context = recipe.engines.max_model_len
    with suppress(RecipeError):
        context = max_model_len(recipe, model_config(recipe.model.path))
    scorers = [
        _bytes(facts, str(reward.options.get("dtype")))
        for reward in recipe.rewards
        if (facts := facts_of(reward.model))
    ]
    reward_gpus = max((reward.worker_gpus for reward in recipe.rewards), default=0)
    return Demand(
        engine=_bytes(model, recipe.engines.dtype, context) if model else 0,
        rank=device_bytes(recipe, model, context, smallest_card) + CONTEXT_BYTES if model else 0,
        rewards=sum(scorers) + CONTEXT_BYTES,
        reward_gpus=reward_gpus,
    )


def _bytes(facts: ModelFacts, dtype: str, context: int = 0) -> int:
    """Bytes of the weights and of the cache of one request."""
    return (facts.parameters + context * facts.key_value_bytes // 4) * (4 if dtype == "float32" else 2)


def facts_of(path: str) -> ModelFacts | None:
    """The model in a directory; None where there is none that can be read."""
    try:
        return read_model_facts(Path(path)) if path else None
    except ModelDirectoryError:
        return None
