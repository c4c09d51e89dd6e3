"""What a recipe adds up to, before anything is started: batches, slots, staleness, memory, processes. Pure."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from streamrl.learning.rank_memory import MOMENT_BYTES, SHADOW_BYTES, TrainingSizes, activation_bytes, bytes_per_rank
from streamrl.plan.model_facts import ModelFacts
from streamrl.plan.topology import JUDGE, PreparedSet, ProcessPlan, Role, Topology, prepared_sets
from streamrl.recipe.algorithms import objective_settings
from streamrl.recipe.judge import JUDGE_CONTEXT
from streamrl.recipe.scheduling import InFlight, StalePolicy
from streamrl.recipe.sections import ComputeDtype, EngineKind, Gathered, OptimizerKind, Recipe
from streamrl.rules.learning_rates import learning_rate_notice
from streamrl.rules.objective_text import objective_lines, off_policy_sentence, streaming_sentence

MIB = 1 << 20
# Proportional memory, measured on the demo: a vLLM CPU engine is three
# processes (owner 430, EngineCore 424, worker 500 MiB before weights and KV); torch in a trainer rank takes 450.
ENGINE_BASE_BYTES = 1350 * MIB
SIMULATED_ENGINE_BYTES = 120 * MIB  # before its live copy and the mirror of the published bits
SIMULATED_BYTES_PER_PARAMETER = 2 + 2
ENGINE_WORKER_BYTES = 500 * MIB  # one more worker, before its share of weights and KV
TRAINER_BASE_BYTES = 450 * MIB
CONTROLLER_BYTES = 120 * MIB
REWARD_WORKER_BYTES = 80 * MIB
ENGINE_BYTES_PER_PARAMETER = 4 + 2  # float32 on CPU, and the mirror of the published bits
JUDGE_BYTES_PER_PARAMETER = 4  # float32 on CPU, in vLLM's own packed form
SIMULATED_SENTENCE = "simulated: random text, whatever the weights; nothing is learnt about a model (engines.kind)"
LARGEST_CACHE_BYTES = 1 << 30
LARGEST_LOGITS = 1 << 24  # the trainer's head runs over so many logits at a time
ADAPTED_PROJECTIONS = 2  # peft adapts the query and the value projection where ``lora.targets`` is empty
LINEAR_PROJECTIONS = 7  # of a layer: four of the attention, three of the gated network


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
    longest = context or recipe.engines.max_model_len or recipe.sampling.max_tokens
    on_each_rank = math.ceil(recipe.rollout.batch_trajectories / recipe.training.ranks)
    return BatchArithmetic(
        prompts=recipe.rollout.prompts_per_batch,
        group_size=recipe.rollout.group_size,
        trajectories=recipe.rollout.batch_trajectories,
        steps=recipe.run.steps,
        slots=recipe.max_in_flight,
        running_capacity=recipe.engines.count * recipe.engines.max_num_seqs,
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
    if recipe.on_policy:
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
        f"{steps} after the version that sampled it; before a trajectory becomes older, {what}; "
        f"at a weight update {update}"
    )


def estimate_memory(recipe: Recipe, facts: ModelFacts, context: int, judge: ModelFacts | None = None) -> MemoryEstimate:
    """Host memory of a CPU run with ``context`` tokens a request, process by process.

    The KV cache counts whole, because vLLM touches it whole on CPU: room for every running request, one GiB at most.
    Of several sets of engines, of which one is awake, those of the largest count. ``judge``: the run's own, where it
    has one.
    """
    ranks = recipe.training.ranks
    sets = [_engine_bytes(recipe, one, facts, context) for one in prepared_sets(recipe)]
    engines = max(sets, key=lambda of_set: sum(of_set.values()))
    trainer = TRAINER_BASE_BYTES + _activation_bytes(recipe, facts, context) + _weight_bytes(recipe, facts)
    by_process = {"controller": CONTROLLER_BYTES}
    by_process |= {f"reward-{i}": REWARD_WORKER_BYTES for i in range(recipe.reward_limits.workers)}
    by_process |= engines
    by_process |= {f"trainer-{i}": trainer for i in range(ranks)}
    if judge is not None:
        own = recipe.judge.max_model_len or JUDGE_CONTEXT
        cache = min(recipe.judge.max_num_seqs * own * judge.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES)
        by_process[JUDGE] = ENGINE_BASE_BYTES + JUDGE_BYTES_PER_PARAMETER * judge.parameters + cache
    return MemoryEstimate(by_process=by_process)


def _engine_bytes(recipe: Recipe, one: PreparedSet, facts: ModelFacts, context: int) -> dict[str, int]:
    """Of each engine of a set; workers share weights and cache."""
    if recipe.engines.kind is EngineKind.SIMULATED:
        simulated = SIMULATED_ENGINE_BYTES + SIMULATED_BYTES_PER_PARAMETER * facts.parameters
        return dict.fromkeys(one.engines, simulated)
    cache = min(
        one.max_num_seqs * context * facts.key_value_bytes * 9 // 8, LARGEST_CACHE_BYTES * one.tensor_parallel_size
    )
    engine = ENGINE_BASE_BYTES + ENGINE_BYTES_PER_PARAMETER * facts.parameters
    engine += max(cache, context * facts.key_value_bytes) + (one.tensor_parallel_size - 1) * ENGINE_WORKER_BYTES
    return dict.fromkeys(one.engines, engine)


def _activation_bytes(recipe: Recipe, facts: ModelFacts, context: int) -> int:
    """What one micro-batch keeps for its backward, and the logits of one chunk."""
    tokens = max(recipe.training.micro_batch_tokens, context)
    return activation_bytes(
        tokens=tokens,
        hidden=facts.hidden,
        layers=facts.layers,
        logits=min(tokens * facts.vocabulary, LARGEST_LOGITS),
        checkpointing=recipe.training.activation_checkpointing,
    )


def training_sizes(recipe: Recipe, facts: ModelFacts, *, on_device: bool = False) -> TrainingSizes:
    """What the bytes of a trainer rank depend on, as far as the files of the model say."""
    training, lora = recipe.training, recipe.lora
    adapted = LINEAR_PROJECTIONS if "all-linear" in lora.targets else len(lora.targets) or ADAPTED_PROJECTIONS
    outside = min(facts.parameters, 2 * facts.vocabulary * facts.hidden)  # tied embeddings are half of that
    return TrainingSizes(
        parameters=facts.parameters,
        outside=outside,
        layer=(facts.parameters - outside) // max(1, facts.layers),
        ranks=training.ranks,
        trained=2 * lora.rank * facts.hidden * adapted * facts.layers,
        moment_bytes=MOMENT_BYTES[training.optimizer],
        masters_on_host=on_device and training.optimizer is OptimizerKind.ADAMW_OFFLOADED,
        sixteen_bit=training.compute_dtype is ComputeDtype.BFLOAT16
        or (on_device and training.compute_dtype is ComputeDtype.AUTO),
        on_device=on_device,
        reference=objective_settings(recipe.objective).has_reference,
    )


def _weight_bytes(recipe: Recipe, facts: ModelFacts) -> int:
    """Weights, gradients and optimizer of one rank, and its copy of the reference model, in host memory."""
    gathered = Gathered.LAYER if recipe.training.gathered is Gathered.LAYER else Gathered.BATCH
    # The publisher's shadow of the published bits, which on a CPU are a view of what the forward runs on.
    shadow = SHADOW_BYTES * facts.parameters // recipe.training.ranks
    return bytes_per_rank(training_sizes(recipe, facts), gathered).total + shadow


def device_bytes(recipe: Recipe, facts: ModelFacts, context: int) -> int:
    """GPU memory that a trainer rank needs at least, layer by layer where ``training.advanced.gathered`` allows it."""
    gathered = Gathered.BATCH if recipe.training.gathered is Gathered.BATCH else Gathered.LAYER
    weights = bytes_per_rank(training_sizes(recipe, facts, on_device=True), gathered)
    return weights.total + _activation_bytes(recipe, facts, context)


def gib(size: float) -> str:
    """Bytes as ``1.52 GiB``."""
    return f"{size / (1 << 30):.2f} GiB"


def arithmetic_lines(recipe: Recipe, facts: ModelFacts | None = None, context: int = 0, held_out: int = 0) -> list[str]:
    """The arithmetic as the dry run prints it, one fact a line; memory only where the model is known.

    ``held_out``: prompts of ``evaluation.prompts`` (0: not known).
    """
    counts = batch_arithmetic(recipe, context)
    updates = recipe.training.updates_per_batch
    steps = "one optimizer step" if updates == 1 else f"{updates} optimizer steps, each on its share of the groups"
    objective, *more = objective_lines(recipe)
    batch = f"{counts.trajectories:,}"
    lines = [
        f"batch       {counts.prompts} prompts x {counts.group_size} samples = {batch} trajectories, {steps}",
        f"objective   {objective}",
        *(f"{'':<12}{line}" for line in more),
        f"off-policy  {off_policy_sentence(recipe)}",
        f"streaming   {streaming_sentence(recipe)}",
        f"training    {_training_text(recipe, counts)}",
        f"run         {counts.steps} steps x {batch} = {counts.run_trajectories:,} trajectories trained",
        *_set_lines(recipe),
        (
            f"slots       {counts.slots:,} trajectories in flight at most, {counts.tokens_in_flight:,} tokens; "
            f"{recipe.engines.count} x {recipe.engines.max_num_seqs} = {counts.running_capacity:,} run at once"
        ),
        f"bound       {staleness_sentence(recipe)}",
    ]
    if recipe.evaluation.prompts:
        lines.append(f"evaluation  {_evaluation_text(recipe, held_out)}")
    lines.append(f"checkpoints {_checkpoint_text(recipe)}")
    if facts is not None:
        rate, adapters = recipe.training.learning_rate, bool(recipe.lora.rank)
        if notice := learning_rate_notice(rate, facts.parameters, adapters=adapters):
            lines.append(f"warning     {notice}")
        lines.append(f"memory      {_memory_text(recipe, facts, counts)}")
    return lines


def _set_lines(recipe: Recipe) -> list[str]:
    """What serves, where several sets of engines are prepared, or where it is none of vLLM's."""
    first, *others = prepared_sets(recipe)
    if not others:
        return [f"engines     {SIMULATED_SENTENCE}"] if recipe.engines.kind is EngineKind.SIMULATED else []
    texts = []
    for one in (first, *others):
        always = f" ({', '.join(one.rounds)} rounds)" if one.rounds else ""
        texts.append(f"{_number(one.count, 'engine')} x {_number(one.tensor_parallel_size, 'worker')}{always}")
    return [f"engines     {texts[0]} at the start; instead of them, when it pays: {'; '.join(texts[1:])}"]


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _training_text(recipe: Recipe, counts: BatchArithmetic) -> str:
    few, many = counts.micro_batches
    ranks, updates = recipe.training.ranks, recipe.training.updates_per_batch
    return (
        f"{f'{few} to {many}' if few < many else many} micro-batches of at most "
        f"{recipe.training.micro_batch_tokens:,} tokens a {'step' if updates == 1 else 'batch'}"
        + (f" on each of {ranks} ranks" if ranks > 1 else "")
        + f" (completions at a quarter of max_tokens = {recipe.sampling.max_tokens}, and at all of it)"
    )


def _evaluation_text(recipe: Recipe, held_out: int) -> str:
    evaluation = recipe.evaluation
    times = [
        name for name, wanted in (("at the start", evaluation.at_start), ("at the end", evaluation.at_end)) if wanted
    ]
    if evaluation.every:
        share = f"the first {evaluation.limit} prompts" if evaluation.limit else "all prompts"
        times.append(f"every {evaluation.every} steps on {share}")
    text = f"{Path(evaluation.prompts).name}: " + (", ".join(times) or "never")
    if held_out:
        text += f"; all prompts: {held_out:,} x {evaluation.samples} = {held_out * evaluation.samples:,} completions"
    elif evaluation.samples > 1:
        text += f"; {evaluation.samples} completions of each prompt"
    return text


def _checkpoint_text(recipe: Recipe) -> str:
    checkpoint = recipe.checkpoint
    own = "" if checkpoint.every or not recipe.checkpoint_every else " (for the journal: checkpoint.every = 0)"
    times = [f"every {recipe.checkpoint_every} steps{own}"] if recipe.checkpoint_every else []
    times += ["at the end"] if checkpoint.at_end else []
    kept = [f"the last {checkpoint.keep}"]
    kept += [f"the best {checkpoint.keep_best}"] if checkpoint.keep_best else []
    kept += [f"every {checkpoint.keep_every}-th step"] if checkpoint.keep_every else []
    text = " and ".join(times) + (f"; kept: {', '.join(kept)}" if recipe.checkpoint_every else "")
    start = f"; starts from {checkpoint.resume_from}" if checkpoint.resume_from else ""
    return (text or "none") + start


def _memory_text(recipe: Recipe, facts: ModelFacts, counts: BatchArithmetic) -> str:
    estimate = estimate_memory(recipe, facts, counts.longest_trajectory_tokens)
    engine = max(size for name, size in estimate.by_process.items() if name.startswith("engine-"))
    trainer = estimate.by_process["trainer-0"]
    extra = ", with a reference model" if objective_settings(recipe.objective).has_reference else ""
    if recipe.training.ranks > 1:
        sizes = training_sizes(recipe, facts)
        batch, layer = (gib(bytes_per_rank(sizes, kind).total) for kind in (Gathered.BATCH, Gathered.LAYER))
        extra += (
            f'; weights and optimizer of a rank: {batch} with training.advanced.gathered = "{Gathered.BATCH}", '
            f"{layer} with "
            f'"{Gathered.LAYER}"; it is "{recipe.training.gathered}"'
        )
    return (
        f"about {gib(estimate.total)} on a CPU host ({gib(engine)} an engine, {gib(trainer)} a rank{extra}); "
        f"{facts.parameters:,} parameters"
    )


def _started(process: ProcessPlan) -> str:
    if not process.local:
        return "started by hand (external)"
    return "started when its set of engines serves" if process.resting else "started by this run"


def process_lines(recipe: Recipe, topology: Topology, recipe_path: str) -> list[str]:
    """What would be started, the endpoints, and the commands for what a person starts (``external``)."""
    lines = [f"  {process.name:<12} {_started(process)}" for process in topology.processes]
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
