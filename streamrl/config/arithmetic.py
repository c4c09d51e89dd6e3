"""What a recipe adds up to, before anything is started: batches, slots, staleness, memory, processes. Pure."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from streamrl.config.model_facts import ModelFacts
from streamrl.config.recipe import InFlight, Recipe, RoundKind, StalePolicy
from streamrl.config.topology import Role, Topology

MIB = 1 << 20
# Proportional memory, measured on the demo: a vLLM CPU engine is three
# processes (owner 430, EngineCore 424, worker 500 MiB before weights and KV); torch in a trainer rank takes 450.
ENGINE_BASE_BYTES = 1350 * MIB
TRAINER_BASE_BYTES = 450 * MIB
CONTROLLER_BYTES = 120 * MIB
REWARD_WORKER_BYTES = 80 * MIB
# fp32 master, gradient and two AdamW moments, the published 16-bit copy and its shadow.
TRAINER_BYTES_PER_PARAMETER = 4 + 4 + 8 + 2 + 2
ENGINE_BYTES_PER_PARAMETER = 4 + 2  # float32 on CPU, and the mirror of the published bits
ACTIVATIONS_PER_HIDDEN = 16  # float32 values that one layer keeps for the backward, per token and hidden unit
LARGEST_CACHE_BYTES = 1 << 30
LOGIT_COPIES = 3  # logits, log-softmax and their gradient


class BatchArithmetic(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one run. ``micro_batches``: of one rank in one step when each completion reaches the given share
    of ``max_tokens``: (a quarter, all)."""

    prompts: int
    group_size: int
    trajectories: int
    steps: int
    slots: int
    running_capacity: int
    longest_trajectory_tokens: int
    tokens_in_flight: int
    micro_batches: tuple[int, int]

    @property
    def run_trajectories(self) -> int:
        """Trajectories trained in the whole run."""
        return self.trajectories * self.steps


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated host memory in bytes by process name; a CPU run. Within about 30 % on the demo."""

    by_process: dict[str, int]

    @property
    def total(self) -> int:
        """Sum over processes."""
        return sum(self.by_process.values())


def batch_arithmetic(recipe: Recipe, context: int = 0) -> BatchArithmetic:
    """Prompts x group size -> trajectories -> micro-batches -> steps.

    ``context``: tokens of the longest trajectory (0: what the recipe says, without prompts where it leaves it open).
    """
    longest = context or recipe.engines.max_context or recipe.sampling.max_tokens
    on_each_rank = math.ceil(recipe.rollout.batch_trajectories / recipe.training.ranks)
    return BatchArithmetic(
        prompts=recipe.rollout.prompts_per_batch,
        group_size=recipe.rollout.group_size,
        trajectories=recipe.rollout.batch_trajectories,
        steps=recipe.run.steps,
        slots=recipe.max_in_flight,
        running_capacity=recipe.engines.count * recipe.engines.max_running,
        longest_trajectory_tokens=longest,
        tokens_in_flight=recipe.max_in_flight * longest,
        micro_batches=(
            _micro_batches(on_each_rank, recipe.sampling.max_tokens // 4, recipe),
            _micro_batches(on_each_rank, recipe.sampling.max_tokens, recipe),
        ),
    )


def _micro_batches(samples: int, tokens_each: int, recipe: Recipe) -> int:
    """Micro-batches of ``samples`` equally long samples; a sample is never cut, so one may exceed the budget."""
    in_one = max(1, recipe.training.micro_batch_tokens // max(1, tokens_each))
    return math.ceil(samples / in_one)


def staleness_sentence(recipe: Recipe) -> str:
    """The staleness bound of a run, in one sentence."""
    rollout = recipe.rollout
    if rollout.rounds is RoundKind.SYNCHRONOUS:
        return "staleness 0: every token is trained by the version that sampled it"
    what = {
        StalePolicy.WAIT: "publishing waits for it",
        StalePolicy.DROP: "it is dropped (reason: stale)",
        StalePolicy.REGENERATE: "it is sampled again from its start",
    }[rollout.when_stale]
    update = {
        InFlight.KEEP: "requests in flight go on with the KV cache that older weights made",
        InFlight.RECOMPUTE: "the KV cache of requests in flight is computed again under the new weights",
        InFlight.RESUME: "requests in flight are cut and resumed from their tokens",
    }[rollout.in_flight]
    steps = "step" if rollout.max_staleness == 1 else "steps"
    return (
        f"staleness <= {rollout.max_staleness} {steps}: no token is trained more than {rollout.max_staleness} "
        f"optimizer {steps} after the version that sampled it; before a trajectory becomes older, {what}; "
        f"at a weight update {update}"
    )


def estimate_memory(recipe: Recipe, facts: ModelFacts, context: int) -> MemoryEstimate:
    """Host memory of a CPU run with ``context`` tokens a request, process by process.

    The KV cache counts whole, because vLLM touches it whole on CPU: room for every running request, one GiB at most.
    """
    ranks = recipe.training.ranks
    cache = min(recipe.engines.max_running * context * facts.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES)
    micro_tokens = max(recipe.training.micro_batch_tokens, context)
    activations = (
        4 * micro_tokens * (ACTIVATIONS_PER_HIDDEN * facts.hidden * facts.layers + LOGIT_COPIES * facts.vocabulary)
    )
    engine = ENGINE_BASE_BYTES + ENGINE_BYTES_PER_PARAMETER * facts.parameters
    engine += max(cache, context * facts.key_value_bytes)
    # While a batch is open every rank holds whole parameters and gradients (float32), its shard of the rest.
    whole = 8 if ranks > 1 else 0
    trainer = TRAINER_BASE_BYTES + activations
    trainer += facts.parameters * whole + facts.parameters * TRAINER_BYTES_PER_PARAMETER // ranks
    by_process = {"controller": CONTROLLER_BYTES}
    by_process |= {f"reward-{i}": REWARD_WORKER_BYTES for i in range(recipe.reward_limits.workers)}
    by_process |= {f"engine-{i}": engine for i in range(recipe.engines.count)}
    by_process |= {f"trainer-{i}": trainer for i in range(ranks)}
    return MemoryEstimate(by_process=by_process)


def gib(size: float) -> str:
    """Bytes as ``1.52 GiB``."""
    return f"{size / (1 << 30):.2f} GiB"


def arithmetic_lines(recipe: Recipe, facts: ModelFacts | None = None, context: int = 0) -> list[str]:
    """The arithmetic as the dry run prints it, one fact a line; memory only where the model is known."""
    counts = batch_arithmetic(recipe, context)
    few, many = counts.micro_batches
    ranks = recipe.training.ranks
    lines = [
        (
            f"batch       {counts.prompts} prompts x {counts.group_size} samples = {counts.trajectories} trajectories, "
            f"one optimizer step"
        ),
        f"training    {f'{few} to {many}' if few < many else many} micro-batches of at most "
        f"{recipe.training.micro_batch_tokens:,} tokens a step"
        + (f" on each of {ranks} ranks" if ranks > 1 else "")
        + f" (completions at a quarter of max_tokens = {recipe.sampling.max_tokens}, and at all of it)",
        f"run         {counts.steps} steps x {counts.trajectories} = {counts.run_trajectories:,} trajectories trained"
        + (" (groups without signal are refilled)" if recipe.rollout.dynamic_sampling else ""),
        (
            f"slots       {counts.slots} trajectories in flight at most, {counts.tokens_in_flight:,} tokens; "
            f"{recipe.engines.count} x {recipe.engines.max_running} = {counts.running_capacity} run at once"
        ),
        f"bound       {staleness_sentence(recipe)}",
    ]
    if recipe.evaluation.prompts:
        lines.append(f"evaluation  {_evaluation_text(recipe)}")
    if facts is not None:
        estimate = estimate_memory(recipe, facts, counts.longest_trajectory_tokens)
        engine, trainer = estimate.by_process["engine-0"], estimate.by_process["trainer-0"]
        lines.append(
            f"memory      about {gib(estimate.total)} on a CPU host ({gib(engine)} an engine, {gib(trainer)} a rank); "
            f"{facts.parameters:,} parameters"
        )
    return lines


def _evaluation_text(recipe: Recipe) -> str:
    evaluation = recipe.evaluation
    times = [
        name for name, wanted in (("at the start", evaluation.at_start), ("at the end", evaluation.at_end)) if wanted
    ]
    if evaluation.every:
        share = f"the first {evaluation.limit} prompts" if evaluation.limit else "all prompts"
        times.append(f"every {evaluation.every} steps on {share}")
    return f"{Path(evaluation.prompts).name}: " + (", ".join(times) or "never")


def process_lines(recipe: Recipe, topology: Topology, recipe_path: str) -> list[str]:
    """What would be started, the endpoints, and the commands for what a person starts (``external``)."""
    lines = [
        f"  {process.name:<12} " + ("started by this run" if process.local else "started by hand (external)")
        for process in topology.processes
    ]
    lines += ["endpoints"]
    lines += [f"  {name:<22} {endpoint}" for name, endpoint in topology.endpoints.items() if endpoint]
    if ports := [
        endpoint.rpartition(":")[2] for endpoint in topology.endpoints.values() if endpoint.startswith("tcp:")
    ]:
        lines.append(f"  ports {ports[0]} to {ports[-1]} of {recipe.transport.host} must be free")
    commands = [
        f"  streamrl serve {'engine' if p.role is Role.ENGINE else 'trainer'} {recipe_path} --index {p.index}"
        for p in topology.processes
        if not p.local
    ]
    return lines + (["start by hand", *commands] if commands else [])
