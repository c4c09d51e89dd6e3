"""GPUs of this host for the processes of a run: the memory that they need, and the GPU of each process. Called in the
process of the command: by the checks before a run, by the start of the run, and by the dry run. ``place`` is pure:
``gpu_placement`` gives it what the host and the models have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from streamrl.engines.vllm.options import OWN_GPU_SHARE, step_tokens
from streamrl.engines.vllm.visible_gpus import Gpu, visible_gpus
from streamrl.learning.rank_memory import Card
from streamrl.prepare.memory import device_bytes
from streamrl.pretrained.model_facts import ModelFacts, facts_of
from streamrl.recipe.field_types import as_written
from streamrl.recipe.rules.turn_rules import obstacles_to_turns
from streamrl.recipe.sections import BFLOAT16_CAPABILITY, EngineKind, GpuSharing, LoraSync, OptimizerKind, Recipe
from streamrl.recipe.topology import PreparedSet, Role, Topology, prepared_sets, served_models, served_name

CONTEXT_BYTES = 1 << 30
"""Memory of a process that is no engine, beside its tensors: CUDA's context, kernels, NCCL's buffers, fragmentation."""
SLEEPING_ENGINE_BYTES = 2 << 30
"""Memory that an engine keeps asleep: CUDA's context, kernels, captured graphs (measured on no GPU here)."""

PCIE_BYTES_S = 20e9
"""Bytes a second between pinned host memory and a GPU: PCIe 4.0 x16 has 25 GB/s (measured on no GPU here)."""

_SLACK = 0.04
"""Share of a GPU that stays free where engines take what other processes leave: vLLM's start wants its share whole."""
_SMALLER = 'use more GPUs or fewer engines, a smaller model, lora.rank, or training.optimizer = "adamw_offloaded"'

SAMPLER_BYTES = 12
"""Bytes of a logit while an engine samples: the logit in float32, a copy, and its sorted value or index."""
LAYER_COPIES = 2
"""Results of a layer, in widths of its MLP and of its residual stream, that an engine holds at one time."""
LORA_RANK = 16


class Demand(Struct, frozen=True, kw_only=True):
    """Memory in bytes of one GPU, by which logits at once and tokens of a step are chosen.

    ``engine``: weights of one engine, the cache of one request, and what its steps take.
    ``rank``: memory of one trainer rank.
    ``rewards``: memory of one reward worker on each of its GPUs.
    ``reward_gpus``: number of GPUs of one reward worker.
    ``weights``: weights of the judge and teacher, and the cache of one question whose length the recipe names; none for
    quantised ones, of which the sizes are not known."""

    engine: int = 0
    rank: int = 0
    rewards: int = 0
    reward_gpus: int = 0
    weights: Mapping[Role, int] = {}


class Tenant(Struct, frozen=True, kw_only=True):
    """A process and its GPUs, all of one host. An engine takes ``share`` of each GPU, any other process, the judge too,
    ``size`` bytes.
    ``least``: bytes of each GPU without which an engine, judge or teacher cannot run.
    ``asleep``: bytes of each GPU that it keeps while others have their turn (0: it takes no turns)."""

    gpus: tuple[Gpu, ...]
    share: float = 0.0
    size: int = 0
    least: int = 0
    asleep: int = 0

    def bytes_on(self, gpu: Gpu) -> int:
        """Bytes that the tenant takes of one of its GPUs."""
        return int(self.share * gpu.memory) or self.size


class GpuPlacement(Struct, kw_only=True):
    """Processes of a run on the GPUs of this host.

    ``tenants``: processes that use GPUs, by name.
    ``problems``: reasons why the run does not fit, each with its remedy.
    ``shares``: share of each GPU, by its name, that all engines of one set may take.
    ``is_share_fixed``: whether the recipe names the share.
    ``shortage``: sentence about memory that is lacking, as ``problems`` have it with its remedy (empty: all fits).
    ``in_turns``: whether engines and ranks have the memory of their GPUs in turns.
    ``keeps_weights``: whether the engines keep their weights on the GPU in the turn of the ranks.
    ``reason``: reason for ``in_turns`` (empty: no GPU is shared)."""

    gpus: tuple[Gpu, ...] = ()
    shares: dict[str, float] = {}
    is_share_fixed: bool = False
    shortage: str = ""
    in_turns: bool = False
    keeps_weights: bool = False
    reason: str = ""
    tenants: dict[str, Tenant] = {}
    problems: list[str] = []

    def on(self, gpu: Gpu) -> dict[str, Tenant]:
        """Return the tenants of one GPU, by name."""
        return {name: tenant for name, tenant in self.tenants.items() if gpu in tenant.gpus}

    def used(self, gpu: Gpu) -> int:
        """Bytes in use on one GPU, in the turn that uses more. Only one of the prepared sets of engines is awake at a
        time."""
        tenants = self.on(gpu).values()
        engine_share = min(sum(tenant.share for tenant in tenants), self.shares.get(gpu.name, 0.0))
        return max(int(engine_share * gpu.memory) + self.used_by_others(gpu), self.used_in_training(gpu))

    def used_in_training(self, gpu: Gpu) -> int:
        """Bytes in use on one GPU in the turn of the ranks; 0 where there are no turns."""
        if not self.in_turns:
            return 0
        tenants = self.on(gpu).values()
        engines = [tenant for tenant in tenants if tenant.share]
        size = sum(tenant.size for tenant in tenants) + sum(engine.asleep for engine in engines)
        if self.keeps_weights:
            size += sum(engine.least for engine in engines)
        return size

    def used_by_others(self, gpu: Gpu) -> int:
        """Bytes in use on one GPU, while engines sample, by processes that are no engines."""
        tenants = self.on(gpu).values()
        if self.in_turns:
            return sum(tenant.asleep or tenant.size for tenant in tenants if not tenant.share)
        return sum(tenant.size for tenant in tenants)

    @property
    def shared_gpus(self) -> list[Gpu]:
        """GPUs on which there are both engines and ranks."""
        ranks = {gpu for name, tenant in self.tenants.items() if name.startswith("trainer-") for gpu in tenant.gpus}
        return [gpu for gpu in self.gpus if gpu in ranks and any(tenant.share for tenant in self.on(gpu).values())]

    def room_order(self, gpu: Gpu, size: float) -> tuple[bool, bool, int]:
        """Key that sorts GPUs for a process of ``size`` bytes: first those that are large enough, then those that no
        process uses, then those with most memory left."""
        return 0 < gpu.memory < size, bool(self.on(gpu)), self.used(gpu) - gpu.memory

    def text(self, gpu: Gpu, *, engines: bool = True) -> str:
        """List the tenants of one GPU, with or without engines, with their GiB."""
        tenants = {name: tenant for name, tenant in self.on(gpu).items() if engines or not tenant.share}
        return ", ".join(f"{name} {_gib(tenant.bytes_on(gpu))}" for name, tenant in tenants.items())

    def lines(self) -> list[str]:
        """One line for each GPU, as the dry run prints it, and one that says how engines and ranks share GPUs."""
        lines = [
            f"  GPU {gpu.name:<4} {_gib(self.used(gpu)):>6} of {_gib(gpu.memory)} GiB: {self.text(gpu) or 'nothing'}"
            for gpu in self.gpus
        ]
        if self.reason and not self.in_turns:
            lines.append(f"  engines and trainer ranks share a GPU side by side: {self.reason}")
        elif self.reason:
            seconds = 2 * self.moved_bytes / PCIE_BYTES_S
            reason = self.reason
            if self.keeps_weights:
                reason += "; engines keep their weights there"
            lines.append(
                f"  engines and trainer ranks share a GPU in turns: {reason}; both switches of a step take about "
                f"{seconds:.1f} s at most (estimated: {_gib(self.moved_bytes)} GiB out and in over PCIe at "
                f"{PCIE_BYTES_S / 1e9:.0f} GB/s)"
            )
        return lines

    @property
    def moved_bytes(self) -> int:
        """Bytes that are moved to host memory and back in a step in turns, at most, on the GPU with most of them: the
        weights of engines that do not keep them, and the state of a rank, counted with its activations."""
        sizes = [0]
        for gpu in self.shared_gpus:
            tenants = [tenant for tenant in self.on(gpu).values() if not (tenant.share and self.keeps_weights)]
            sizes.append(
                sum(max(tenant.least or tenant.size - tenant.asleep, 0) for tenant in tenants if tenant.asleep)
            )
        return max(sizes)

    def decided(self, recipe: Recipe) -> Recipe:
        """``recipe`` with the decision of this placement in place of ``gpu_sharing = "auto"``, as a run records it: a
        run that is resumed on other GPUs keeps the decision, since its state may not fit the other one. A recipe that
        does not fit, or a run without GPUs, stays as it is."""
        if recipe.engines.gpu_sharing is not GpuSharing.AUTO or self.problems or not self.gpus:
            return recipe
        sharing = GpuSharing.IN_TURNS if self.in_turns else GpuSharing.SIDE_BY_SIDE
        return replace(recipe, engines=replace(recipe.engines, gpu_sharing=sharing))

    def placed(self, topology: Topology) -> Topology:
        """``topology`` whose processes know their GPUs."""
        processes = list(topology.processes)
        for index, process in enumerate(processes):
            if tenant := self.tenants.get(process.name):
                names = tuple(gpu.name for gpu in tenant.gpus)
                keeps_weights = self.keeps_weights and tenant.share > 0
                processes[index] = replace(
                    process, gpus=names, gpu_memory_utilization=tenant.share, keeps_weights=keeps_weights
                )
        return replace(topology, processes=tuple(processes))


def place(recipe: Recipe, gpus: Sequence[Gpu], demands: Mapping[Gpu, Demand]) -> GpuPlacement:
    """GPUs for the processes that this run starts. ``demands``: memory that they need, by the GPU that they are on.

    Engines come first, then ranks, judge, teacher and reward models, each on GPUs of its own. Where GPUs are too few,
    engines share them evenly, and each other process takes the GPU that has most memory left. Where the recipe names no
    share for engines, those beside other processes get what these leave. Where engines and ranks do not fit together,
    they take turns, unless the recipe says otherwise. A process is on a GPU that is too small for it only where all
    are.

    Engines take the largest GPUs, and the smallest that are large enough for them where without that a GPU is shared
    or something does not fit. The order of ``gpus`` decides among GPUs of one size alone."""
    placement = _placement(recipe, gpus, demands, in_turns=recipe.in_turns)
    if not placement.shared_gpus:
        return placement
    if recipe.engines.gpu_sharing is not GpuSharing.AUTO:
        placement.reason = "engines.advanced.gpu_sharing says so"
        return placement
    if not placement.problems:
        placement.reason = "they fit"
        return placement
    turns = _placement(recipe, gpus, demands, in_turns=True)
    if turns.problems:
        fit_alone = all(placement.used_by_others(gpu) <= gpu.memory for gpu in gpus)
        if placement.shortage and turns.shortage not in ("", placement.shortage) and fit_alone:
            both = f"{placement.shortage}, and in turns {turns.shortage}"
            placement.problems = [problem.replace(placement.shortage, both) for problem in placement.problems]
        return placement
    if obstacle := next(obstacles_to_turns(recipe), None):
        text = f"engines and ranks would fit in turns, which {obstacle.reason}, rules out: {obstacle.remedy}"
        placement.problems.append(f"engines.advanced.gpu_sharing: {as_written(Recipe, text)}")
        return placement
    turns.reason = "they do not fit side by side"
    return turns


def _placement(recipe: Recipe, gpus: Sequence[Gpu], demands: Mapping[Gpu, Demand], *, in_turns: bool) -> GpuPlacement:
    """The placement with engines on the largest GPUs, or on the smallest that are large enough, where only that one
    fits or fewer GPUs are shared."""
    placements = []
    for sign in (-1, 1):
        # By GiB: GPUs of one kind differ by some MiB, and stay neighbours.
        by_size = dict(sorted(demands.items(), key=lambda of_gpu: sign * (of_gpu[0].memory >> 30)))
        placements.append(_placement_in_order(recipe, gpus, by_size, in_turns))
    return min(placements, key=lambda placement: math.inf if placement.problems else len(placement.shared_gpus))


def _placement_in_order(
    recipe: Recipe, gpus: Sequence[Gpu], demands: Mapping[Gpu, Demand], in_turns: bool
) -> GpuPlacement:
    """Place all processes, where engines take the GPUs in the order of ``demands``."""
    fixed_share = recipe.engines.gpu_memory_utilization
    shares = {gpu.name: fixed_share or OWN_GPU_SHARE for gpu in gpus}
    placement = GpuPlacement(gpus=tuple(gpus), shares=shares, is_share_fixed=fixed_share > 0, in_turns=in_turns)
    if not gpus:
        return placement
    if recipe.engines.kind is EngineKind.VLLM and recipe.on_one_host:
        for prepared_set in prepared_sets(recipe):
            _place_engines(placement, prepared_set, demands)
    if recipe.training.device != "cpu" and recipe.on_one_host:
        _place_ranks(placement, recipe, demands)
    elif in_turns:
        placement.problems.append(
            'engines.advanced.gpu_sharing: "in_turns" does not fit ranks that use no GPU (training.device = "cpu"): '
            'set gpu_sharing = "side_by_side"'
        )
    if in_turns and recipe.training.ranks > 1:
        placement.problems.append(
            f"engines.advanced.gpu_sharing: training.ranks = {recipe.training.ranks} does not fit turns, in which one "
            'rank moves its state: set training.ranks = 1, or gpu_sharing = "side_by_side"'
        )
    for role, served_model in served_models(recipe).items():
        share = served_model.gpu_memory_utilization
        best = min(gpus, key=lambda gpu: placement.room_order(gpu, demands[gpu].weights.get(role, 0) / share))
        placement.tenants[served_name(role)] = Tenant(
            gpus=(best,), size=int(share * best.memory), least=demands[best].weights.get(role, 0)
        )
    _place_reward_workers(placement, recipe, demands)
    if not placement.is_share_fixed:
        _leave_room_for_others(placement)
    if in_turns:
        placement.keeps_weights = all(tenant.least for tenant in placement.tenants.values() if tenant.share)
        if any(placement.used_in_training(gpu) > (1 - _SLACK) * gpu.memory for gpu in placement.shared_gpus):
            placement.keeps_weights = False
    placement.problems += _dtype_problems(placement, recipe)
    if shortage := _shortage(placement):
        placement.shortage = shortage[0]
        placement.problems.append(f"memory: {': '.join(shortage)}")
    return placement


def _dtype_problems(placement: GpuPlacement, recipe: Recipe) -> Iterator[str]:
    """Problems of 16-bit dtypes on GPUs that have no bfloat16."""
    dtypes = {
        "engine": ("engines.dtype", recipe.engines.dtype),
        "trainer": ("training.compute_dtype", recipe.training.compute_dtype),
        "judge": ("judge.advanced.dtype", recipe.judge.dtype),
        "teacher": ("teacher.advanced.dtype", recipe.teacher.dtype),
    }
    capability = ".".join(map(str, BFLOAT16_CAPABILITY))
    for role, (key, dtype) in dtypes.items():
        gpus = [gpu for name, tenant in placement.tenants.items() if name.startswith(role) for gpu in tenant.gpus]
        older = [gpu.name for gpu in gpus if not gpu.has_bfloat16]
        if older and dtype == "bfloat16":
            yield (
                f'{key}: "bfloat16" needs a GPU of compute capability {capability}, and GPU {older[0]} has less: '
                'write "float32" or "auto"'
            )
        elif older and dtype == "float16" and role == "engine":
            yield (
                f'{key}: "float16" cannot hold the bfloat16 weights that are published, and GPU {older[0]} has no '
                'bfloat16: write "float32" or "auto"'
            )
        elif 0 < len(older) < len(gpus) and dtype == "auto" and role == "trainer":
            yield f'{key}: GPU {older[0]} has no bfloat16, and other GPUs of the ranks have: write "float32"'


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


def _place_engines(placement: GpuPlacement, prepared_set: PreparedSet, demands: Mapping[Gpu, Demand]) -> None:
    """Place each engine on GPUs that are neighbours in ``demands``, and each on GPUs of its own where these are
    enough."""
    width = prepared_set.workers
    gpus = tuple(demands)
    groups = [gpus[first : first + width] for first in range(0, len(gpus) - width + 1, width)]
    if not groups or (width > 1 and prepared_set.count > len(groups)):
        placement.problems.append(
            f"engines.tensor_parallel_size: engines {prepared_set.name} need {prepared_set.count} x {width} GPUs, "
            f"and there are {len(placement.gpus)}: lower count or tensor_parallel_size"
        )
        return
    sizes = {group: max(demands[gpu].engine for gpu in group) // width for group in groups}
    large = [group for group in groups if all(sizes[group] <= placement.shares[gpu.name] * gpu.memory for gpu in group)]
    if large and (width == 1 or prepared_set.count <= len(large)):
        groups = large
    on_group = Counter(number % len(groups) for number in range(prepared_set.count))
    for number, name in enumerate(prepared_set.engines):
        group = number % len(groups)
        share = min(placement.shares[gpu.name] for gpu in groups[group]) / on_group[group]
        placement.tenants[name] = Tenant(
            gpus=groups[group], share=share, least=sizes[groups[group]], asleep=SLEEPING_ENGINE_BYTES
        )


def _place_ranks(placement: GpuPlacement, recipe: Recipe, demands: Mapping[Gpu, Demand]) -> None:
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
        gpu = min(free_gpus, key=lambda gpu: placement.room_order(gpu, demands[gpu].rank))
        free_gpus.remove(gpu)
        placement.tenants[f"trainer-{rank}"] = Tenant(gpus=(gpu,), size=demands[gpu].rank, asleep=CONTEXT_BYTES)


def _place_reward_workers(placement: GpuPlacement, recipe: Recipe, demands: Mapping[Gpu, Demand]) -> None:
    count = max(demand.reward_gpus for demand in demands.values())
    if count > len(placement.gpus):
        placement.problems.append(
            f"rewards.advanced.gpus: a reward worker needs {count}, and there are {len(placement.gpus)}: lower it"
        )
    elif count:
        for index in range(recipe.reward_limits.workers):
            free = sorted(placement.gpus, key=lambda gpu: placement.room_order(gpu, demands[gpu].rewards))
            size = max(demands[gpu].rewards for gpu in free[:count])
            placement.tenants[f"reward-{index}"] = Tenant(gpus=tuple(free[:count]), size=size)


def _shortage(placement: GpuPlacement) -> tuple[str, str] | None:
    """Return a sentence about the GPU that lacks most memory, else about the first engine, judge or teacher whose share
    is too small, and the remedy. None: all fits."""
    gpu = max(placement.gpus, key=lambda gpu: (bool(gpu.memory), placement.used(gpu) - gpu.memory))
    engines = [tenant for tenant in placement.on(gpu).values() if tenant.share]
    bytes_used = placement.used(gpu)
    if gpu.memory and bytes_used > gpu.memory:
        free_share = int(100 * (1 - placement.used_by_others(gpu) / gpu.memory)) / 100
        remedy = _SMALLER
        scale = free_share / placement.shares[gpu.name]
        takers = placement.text(gpu)
        training = placement.used_in_training(gpu)
        if training > gpu.memory:
            bytes_used = training
            takers = f"{placement.text(gpu, engines=False)} beside engines that sleep"
        elif not placement.is_share_fixed and placement.used_by_others(gpu) > gpu.memory:
            bytes_used = placement.used_by_others(gpu)
            takers = placement.text(gpu, engines=False)
        elif (
            placement.is_share_fixed
            and engines
            and all(tenant.share * scale * gpu.memory > tenant.least for tenant in engines)
        ):
            remedy = f"set engines.gpu_memory_utilization = {free_share:g} or less, or remove it"
        return f"GPU {gpu.name} has {_gib(gpu.memory)} GiB, and {takers} need {_gib(bytes_used)}", remedy
    for name, engine in placement.tenants.items():
        smallest = min(engine.gpus, key=engine.bytes_on)
        bytes_given = engine.bytes_on(smallest)
        if 0 < bytes_given < engine.least:
            remedy = _SMALLER
            if not engine.share:
                remedy = f"raise {name[:-2]}.gpu_memory_utilization, or use a smaller model or a larger GPU"
            elif placement.is_share_fixed or not placement.used_by_others(smallest):
                remedy = "raise engines.gpu_memory_utilization or tensor_parallel_size, or lower count"
            share = f"{name} may take {_gib(bytes_given)} GiB of GPU {smallest.name}"
            return f"{share}, and its weights and one request need {_gib(engine.least)}", remedy
    return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"


def gpu_placement(recipe: Recipe, gpus: Sequence[Gpu] | None = None) -> GpuPlacement:
    """GPUs for the processes of ``recipe`` (see ``place``), where the reason why it does not fit names settings with
    which it would. ``gpus``: None: those of this host."""
    gpus = visible_gpus() if gpus is None else gpus
    placement = place(recipe, gpus, _demands(recipe, gpus))
    if any(_SMALLER in problem for problem in placement.problems):
        smaller = _smaller_recipes(recipe)
        remedies = [text for text, changed in smaller if not place(changed, gpus, _demands(changed, gpus)).problems]
        # Without those that have an earlier one as their beginning.
        remedies = [text for index, text in enumerate(remedies) if not text.startswith(tuple(remedies[:index]))]
        remedy = f"set {', or '.join(remedies[:2])}" if remedies else "use more or larger GPUs, or a smaller model"
        placement.problems = [problem.replace(_SMALLER, remedy) for problem in placement.problems]
    return placement


def _smaller_recipes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Settings that take less memory, each with ``recipe`` under them."""
    training = recipe.training
    checkpointing = replace(training, activation_checkpointing=True)
    checkpointed = replace(recipe, training=checkpointing)
    if recipe.engines.gpu_sharing is GpuSharing.SIDE_BY_SIDE and not any(obstacles_to_turns(recipe)):
        in_turns = replace(recipe.engines, gpu_sharing=GpuSharing.IN_TURNS)
        yield 'engines.advanced.gpu_sharing = "in_turns"', replace(recipe, engines=in_turns)
    if not training.activation_checkpointing:
        yield "training.activation_checkpointing = true", checkpointed
    if not recipe.lora.rank:
        for optimizer in (OptimizerKind.ADAMW_8BIT, OptimizerKind.ADAMW_OFFLOADED):
            changed = replace(checkpointed, training=replace(checkpointing, optimizer=optimizer))
            yield f'training.activation_checkpointing = true with training.optimizer = "{optimizer}"', changed
        adapters = replace(recipe.lora, rank=LORA_RANK)
        adapted = replace(recipe, lora=adapters, training=replace(training, optimizer=OptimizerKind.ADAMW))
        yield f"lora.rank = {LORA_RANK}", adapted
        smallest = replace(checkpointed, lora=adapters, training=replace(checkpointing, optimizer=OptimizerKind.ADAMW))
        text = f"lora.rank = {LORA_RANK} with training.activation_checkpointing = true"
        yield text, smallest
        served = replace(smallest, lora=replace(adapters, sync=LoraSync.ADAPTER))
        yield f'{text} with lora.sync = "adapter"', served


def _demands(recipe: Recipe, gpus: Sequence[Gpu]) -> dict[Gpu, Demand]:
    cards = {gpu: Card(gpu.memory, gpu.has_bfloat16) for gpu in gpus}
    of_card = {card: _demand(recipe, card) for card in set(cards.values())}
    return {gpu: of_card[card] for gpu, card in cards.items()}


def _demand(recipe: Recipe, card: Card) -> Demand:
    """Memory that the models need on ``card``; 0 for a model that cannot be read, which ``preflight`` reports."""
    model = facts_of(recipe.model.path)
    automatic = "auto" if card.has_bfloat16 else "float32"
    dtypes = {"auto": automatic}
    engine_dtype = dtypes.get(recipe.engines.dtype, recipe.engines.dtype)
    scorers = [
        _bytes(facts, str(reward.options.get("dtype", automatic)))
        for reward in recipe.rewards
        if (facts := facts_of(reward.model))
    ]
    reward_gpus = max((reward.worker_gpus for reward in recipe.rewards), default=0)
    return Demand(
        engine=_bytes(model, engine_dtype, recipe.context) + _step_bytes(recipe, model, card.memory) if model else 0,
        rank=device_bytes(recipe, model, card).total + CONTEXT_BYTES if model else 0,
        rewards=sum(scorers) + CONTEXT_BYTES,
        reward_gpus=reward_gpus,
        weights={
            role: _bytes(facts, dtypes.get(section.dtype, section.dtype), section.max_model_len)
            for role, section in served_models(recipe).items()
            if (facts := facts_of(section.model)) and not facts.is_quantised
        },
    )


def _bytes(facts: ModelFacts, dtype: str, context: int = 0) -> int:
    """Bytes of the weights and of the cache of one request with ``context`` tokens, or as many as the model has
    positions."""
    tokens = min(context, facts.positions or context)
    return (facts.parameters + tokens * facts.key_value_bytes // 4) * (4 if dtype == "float32" else 2)


def _step_bytes(recipe: Recipe, facts: ModelFacts, gpu_memory: int) -> int:
    """Bytes that the steps of an engine take beside weights and cache: what CUDA and kernels keep, the logits of all
    requests, and the results of a layer for all tokens of a step."""
    tokens = recipe.engines.max_num_batched_tokens or step_tokens(gpu_memory)
    requests = max(engine_set.max_num_seqs for engine_set in prepared_sets(recipe))
    layer = LAYER_COPIES * 2 * tokens * (facts.inner + 2 * facts.hidden)
    return CONTEXT_BYTES + SAMPLER_BYTES * requests * facts.vocabulary + layer
