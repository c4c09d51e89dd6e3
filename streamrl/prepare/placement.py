"""Placement of the processes of a run on GPUs, and whether each GPU has the memory for them. Pure: no device is
queried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from streamrl.engines.vllm.gpus import Gpu
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import JUDGE, PreparedSet, Topology, prepared_sets


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """GPU memory in bytes. ``engine``: the weights of one engine and the cache of one request. ``rank``: of one trainer
    rank. ``rewards``: of the reward models in one reward worker; None: it has none on a GPU."""

    engine: int = 0
    rank: int = 0
    rewards: int | None = None


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A process and its GPUs, all of one host. An engine takes ``share`` of each, any other process ``size`` bytes;
    ``least``: bytes of each that an engine cannot do without."""

    gpus: tuple[Gpu, ...]
    share: float = 0.0
    size: int = 0
    least: int = 0

    def bytes_on(self, gpu: Gpu) -> int:
        """Bytes that the tenant takes of one of its GPUs."""
        return int(self.share * gpu.memory) or self.size


class Placement(msgspec.Struct, kw_only=True):
    """``tenants``: processes that use GPUs, by name. ``problems``: why the run does not fit, each with its remedy.
    ``engine_share``: what all engines of one set may take of a GPU."""

    gpus: tuple[Gpu, ...] = ()
    engine_share: float = 1.0
    tenants: dict[str, Tenant] = {}
    problems: list[str] = []

    def on(self, gpu: Gpu) -> dict[str, Tenant]:
        """Return the tenants of one GPU, by name."""
        return {name: tenant for name, tenant in self.tenants.items() if gpu in tenant.gpus}

    def used(self, gpu: Gpu) -> int:
        """Bytes of one GPU that are taken. Of prepared sets of engines one is awake."""
        there = self.on(gpu).values()
        return int(min(sum(one.share for one in there), self.engine_share) * gpu.memory) + sum(
            one.size for one in there
        )

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
                processes[index] = msgspec.structs.replace(process, gpus=names, gpu_memory_utilization=tenant.share)
        return msgspec.structs.replace(topology, processes=tuple(processes))


def place(recipe: Recipe, gpus: Sequence[Gpu], demand: Demand, *, by_hand: bool = False) -> Placement:
    """GPUs for the processes that this run starts; ``by_hand``: for all engines and ranks, wherever they are started,
    host after host.

    Engines come first, then ranks, the judge and reward models, each on GPUs of its own. Where there are not enough,
    engines share GPUs evenly, and each other process takes the GPU that has most memory left."""
    found = Placement(gpus=tuple(gpus), engine_share=recipe.engines.gpu_memory_utilization)
    if not gpus:
        return found
    if recipe.engines.kind is EngineKind.VLLM and (by_hand or recipe.starts_engines_here):
        for one in prepared_sets(recipe):
            _place_engines(found, one, demand.engine)
    if recipe.training.device != "cpu" and (by_hand or recipe.starts_ranks_here):
        _place_ranks(found, recipe, demand.rank)
    if by_hand:
        return found
    if recipe.judge.model:
        best = _best(found, gpus)
        found.tenants[JUDGE] = Tenant(gpus=(best,), size=int(recipe.judge.gpu_memory_utilization * best.memory))
    for index in range(recipe.reward_limits.workers if demand.rewards is not None else 0):
        found.tenants[f"reward-{index}"] = Tenant(gpus=(_best(found, gpus),), size=demand.rewards or 0)
    found.problems += _memory_problems(found)
    return found


def _place_engines(found: Placement, one: PreparedSet, least: int) -> None:
    """Groups of GPUs that follow each other on one host, for one engine each while there are enough."""
    width = one.workers
    groups = []
    for host in dict.fromkeys(gpu.host for gpu in found.gpus):
        there = [gpu for gpu in found.gpus if gpu.host == host]
        groups += [tuple(there[at : at + width]) for at in range(0, len(there) - width + 1, width)]
    if not groups or (width > 1 and one.count > len(groups)):
        found.problems.append(
            f"engines.tensor_parallel_size: engines {one.name} need {one.count} x {width} GPUs, and there are "
            f"{len(found.gpus)}: lower count or tensor_parallel_size"
        )
        return
    on_group = Counter(number % len(groups) for number in range(one.count))
    for number, name in enumerate(one.engines):
        group = number % len(groups)
        share = found.engine_share / on_group[group]
        found.tenants[name] = Tenant(gpus=groups[group], share=share, least=least // width)


def _place_ranks(found: Placement, recipe: Recipe, size: int) -> None:
    """Place each rank on a GPU of its own: NCCL refuses two on one. ``training.device = "cuda:1"`` names the GPU of the
    only rank."""
    ranks = recipe.training.ranks
    device = recipe.training.device
    left = list(found.gpus)
    if device.startswith("cuda:"):
        left = [gpu for number, gpu in enumerate(left) if device == f"cuda:{number}"]
    if ranks > len(left):
        found.problems.append(
            f'training.ranks: {ranks} need a GPU each, and device = "{device}" leaves {len(left)} of '
            f'{len(found.gpus)}: lower it, or write "cuda"'
        )
    for rank in range(min(ranks, len(left))):
        gpu = _best(found, left)
        left.remove(gpu)
        found.tenants[f"trainer-{rank}"] = Tenant(gpus=(gpu,), size=size)


def _best(found: Placement, among: Sequence[Gpu]) -> Gpu:
    """The first GPU that nobody uses, else the one with most memory left."""
    return min(among, key=lambda gpu: (bool(found.on(gpu)), found.used(gpu) - gpu.memory))


def _memory_problems(found: Placement) -> Iterator[str]:
    """One sentence at most: about the GPU that lacks most, else about the first engine whose share is too small."""
    gpu = max(found.gpus, key=lambda gpu: (bool(gpu.memory), found.used(gpu) - gpu.memory))
    engines = [tenant for tenant in found.on(gpu).values() if tenant.share]
    if gpu.memory and (used := found.used(gpu)) > gpu.memory:
        share = int(100 * (1 - sum(tenant.size for tenant in found.on(gpu).values()) / gpu.memory)) / 100
        remedy = 'use more GPUs or fewer engines, a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"'
        if engines and all(one.share * share / found.engine_share * gpu.memory > one.least for one in engines):
            remedy = f"set engines.gpu_memory_utilization = {share:g} or less"
        yield (f"memory: GPU {gpu.name} has {_gib(gpu.memory)} GiB, and {found.text(gpu)} need {_gib(used)}: {remedy}")
        return
    for name, engine in found.tenants.items():
        if 0 < (given := engine.bytes_on(engine.gpus[0])) < engine.least:
            yield (
                f"memory: {name} may take {_gib(given)} GiB of GPU {engine.gpus[0].name}, and its weights and one "
                f"request need {_gib(engine.least)}: raise engines.gpu_memory_utilization or tensor_parallel_size, "
                "or lower count"
            )
            return


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
