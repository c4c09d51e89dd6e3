"""Summary of a recipe in words: batches, staleness, objective, memory. The dry run and the head of a run's output print
it, in the process of the command, before anything is started. It reads the model's chat template, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.learning.rank_memory import bytes_per_rank, training_sizes
from streamrl.prepare.memory import estimate_memory, gib
from streamrl.pretrained.model_facts import ModelFacts
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.turns.template_facts import template_facts
from streamrl.recipe.environment import FORMS
from streamrl.recipe.learning_rate import learning_rate_notice
from streamrl.recipe.objective import Mask, Proximal, RatioLevel, why_not_streaming
from streamrl.recipe.problems import short_toml
from streamrl.recipe.schedules.schedule import rate_factor
from streamrl.recipe.scheduling import InFlight, RoundKind, SizingKind, StalePolicy
from streamrl.recipe.sections import HELD_OUT, EngineKind, EvaluationSet, Gathered, Recipe
from streamrl.recipe.served_models import compares_siblings
from streamrl.recipe.topology import Topology, prepared_sets

SIMULATED_SENTENCE = "simulated: random text, whatever the weights; nothing is learnt about a model (engines.kind)"


def arithmetic_lines(
    recipe: Recipe, facts: ModelFacts | None = None, context: int = 0, held_out: Mapping[str, int] | None = None
) -> list[str]:
    """The arithmetic as the dry run prints it, one fact a line; memory only where the model is known.

    ``context``: tokens of the longest trajectory (0: the limit of the recipe, without prompts where it has none).
    ``held_out``: number of prompts of each held-out set, where it is known."""
    rollout = recipe.rollout
    engines = recipe.engines
    longest = context or engines.max_model_len or recipe.max_tokens
    objective, *objective_details = objective_lines(recipe)
    prompts = rollout.prompts_per_batch
    slots = recipe.max_in_flight
    keeps_prompts = recipe.group_sizing.keeps_prompts
    sizes = recipe.group_sizing.sizes if keeps_prompts else (rollout.group_size,)
    batch = _from_to(prompts, sizes)
    trained = f"{_from_to(recipe.run.steps * prompts, sizes)} trajectories trained"
    at_once = f"{engines.count} x {engines.max_num_seqs} = {engines.count * engines.max_num_seqs:,} run at once"
    lines = [
        f"batch       {prompts} prompts x {_from_to(1, sizes)} samples = {batch} trajectories, {_steps_text(recipe)}",
        *_sizing_lines(recipe),
        f"objective   {objective}",
        *(f"{'':<12}{line}" for line in objective_details),
        f"off-policy  {off_policy_text(recipe)}",
        f"streaming   {streaming_sentence(recipe)}",
        f"training    {_training_text(recipe, facts.parameters if facts else 0)}",
        f"run         {recipe.run.steps} steps x {batch} = {trained}",
        *_environment_lines(recipe),
        *_record_lines(recipe),
        *_set_lines(recipe),
        f"slots       {slots:,} trajectories in flight at most, {slots * longest:,} tokens; {at_once}",
        f"bound       {staleness_sentence(recipe)}",
    ]
    prompts_held_out = held_out or {}
    for name, held_out_set in recipe.evaluation.sets.items():
        text = _evaluation_text(recipe, name, held_out_set, prompts_held_out.get(name, 0))
        lines.append(f"{'evaluation':<12}{text}")
    lines.append(f"checkpoints {_checkpoint_text(recipe)}")
    if facts is not None:
        rate = recipe.training.learning_rate
        adapters = bool(recipe.lora.rank)
        if notice := learning_rate_notice(rate, facts.parameters, adapters=adapters):
            lines.append(f"warning     {notice}")
        lines.append(f"memory      {_memory_text(recipe, facts, longest)}")
    return lines


def _record_lines(recipe: Recipe) -> list[str]:
    """The schedule of the learning rate, the project and the tags, where there are any."""
    training = recipe.training
    run = recipe.run
    lines = []
    if not training.schedule.startswith("constant"):
        steps = sorted({1, training.warmup_steps + 1, (run.steps + 1) // 2, run.steps})
        rates = (f"{training.learning_rate * rate_factor(training, step, run.steps):.3g} at {step}" for step in steps)
        lines.append(f"schedule    {training.schedule}: learning rate {', '.join(rates)}")
    record = []
    if run.project:
        record.append(f"project {run.project}")
    if run.tags:
        record.append(f"tags {', '.join(run.tags)}")
    if record:
        lines.append(f"record      {'; '.join(record)}")
    return lines


def _environment_lines(recipe: Recipe) -> list[str]:
    """The form of the environment, its limits, and what the model's chat template does to a chat of several turns. No
    line for a recipe without environment."""
    environment = recipe.environment
    if not environment.configured:
        return []
    lines = []
    for name, settings in environment.by_name.items():
        form = next(form for form in FORMS if getattr(settings, form))
        specs = getattr(settings, form)
        if isinstance(specs, str):
            specs = [specs]
        functions = ", ".join(spec.rpartition(":")[2] for spec in specs)
        limits = f"{settings.max_turns} turns, {settings.max_tokens:,} tokens, {settings.seconds:g} s"
        lines.append(f"environment {name or form}: {functions}; a trajectory has at most {limits}")
    if not Path(recipe.model.path).is_dir():
        return lines
    tokenizer = load_tokenizer(recipe.model.path)
    if not tokenizer.chat_templates:
        return [*lines, f"{'':<12}the model has no chat template: what is said is appended as plain text"]
    tool = {"name": "calculate", "description": "Compute.", "parameters": {"type": "object", "properties": {}}}
    tools = None if environment.env else [{"type": "function", "function": tool}]
    facts = "; ".join(template_facts(tokenizer, tools, recipe.prompts.template_arguments).sentences())
    if "rewrites" in facts:
        effect = "a turn before which text is rewritten begins a sequence with the text of the template"
        if environment.history == "keep":
            effect = "the model sees the tokens that it sampled all the same"
        facts += f'. history = "{environment.history}": {effect}'
    return [*lines, f"{'':<12}the model's chat template: {facts}"]


def _sizing_lines(recipe: Recipe) -> list[str]:
    """Describe ``[group_sizing]`` where sizes vary."""
    sizing = recipe.group_sizing
    steps = recipe.run.steps
    sizes = f"group size  {sizing.kind} over {', '.join(map(str, sizing.sizes))}"
    if not sizing.varies and sizing.kind is not SizingKind.SAGC:
        return []
    if sizing.kind is not SizingKind.SAGC:
        return [sizes]
    measured = sizing.calibration_over(steps)
    at = str(sizing.sizes[-1]) if sizing.informs_smaller else f"{sizing.sizes[-1]} and {sizing.sizes[0]}, half each"
    budget = f"measured in the first {measured} steps at size {at}" if measured else f"= {sizing.budget:g}"
    return [f"{sizes}: budget {budget}, tradeoff = {sizing.tradeoff_over(steps):g}, stragglers in {sizing.straggler}"]


def objective_lines(recipe: Recipe) -> list[str]:
    """The resolved objective: the algorithm, then each field that has an effect, in the words of the recipe."""
    settings = recipe.objective_settings
    names = ["surrogate"]
    if settings.is_custom:
        names.append("function")
    if settings.options:
        names.append("options")
    if settings.token_surrogate.clips:
        names += ["clip_low", "clip_high"]
    if settings.dual_clip:
        names.append("dual_clip")
    method = _assignments(settings, *names, "advantages", "loss_normalization")
    lines = [f"{recipe.objective.algorithm}: {method}"]
    if settings.has_critic:
        names = ["discount", "gae_lambda", "value_coefficient", "value_clip"]
        if settings.value_learning_rate:
            names.append("value_learning_rate")
        if settings.has_value_model:
            names.append("value_model")
        lines.append("critic: " + _assignments(settings, *names))
    if settings.estimator.of_cohort:
        lines.append(_assignments(settings, "cohort_batches"))
    if settings.has_reference:
        model = settings.reference or "the initial model"
        lines.append(f"reference: {model}")
    if settings.kl_coefficient:
        lines.append("KL to the reference: " + _assignments(settings, "kl_coefficient", "kl_estimator", "kl_in"))
    if settings.distils:
        names = ["distillation_coefficient", "divergence"]
        if settings.exact_divergence:
            names.append("divergence_beta")
        lines.append("teacher: " + _assignments(settings, *names))
    if settings.entropy_coefficient:
        lines.append(_assignments(settings, "entropy_coefficient"))
    if settings.overlong_buffer:
        lines.append(_assignments(settings, "overlong_buffer", "overlong_penalty"))
    if not settings.train_truncated:
        lines.append(_assignments(settings, "train_truncated"))
    if recipe.dynamic_sampling:
        lines.append("dynamic_sampling = true: groups of equal rewards are dropped and refilled")
    return lines


def _assignments(settings: Struct, *names: str) -> str:
    return ", ".join(f"{name} = {short_toml(getattr(settings, name))}" for name in names)


def streaming_notice(recipe: Recipe) -> str:
    """The reason why no group is trained early although the recipe leaves streaming on; empty where groups stream or
    streaming is off."""
    training = recipe.training
    reason = why_not_streaming(recipe.objective_settings, training.updates_per_batch, training.epochs_per_batch)
    if recipe.in_turns:
        reason = "engines and trainer ranks take turns (engines.advanced.gpu_sharing)"
    if not training.streaming or not reason:
        return ""
    return f"off, although training.advanced.streaming = true: {reason}"


def streaming_sentence(recipe: Recipe) -> str:
    """Whether groups are trained while others generate, with the reason where they are not."""
    if not recipe.training.streaming:
        return "off: training.advanced.streaming = false; a batch is trained when it is complete"
    on = "on: groups are trained while others generate, with the gradient of the whole batch"
    return streaming_notice(recipe) or on


def off_policy_text(recipe: Recipe) -> str:
    """Describe the correction of tokens that another policy sampled: the keys of ``[off_policy]`` that have an
    effect."""
    off_policy = recipe.off_policy
    if recipe.on_policy and not off_policy.corrects_mismatch:
        return "nothing to correct: every token is trained by the version that sampled it"
    names = []
    if off_policy.correct_mismatch:
        names.append("correct_mismatch")
    if not recipe.on_policy:
        names.append("proximal")
    if off_policy.mask is Mask.ICEPOP:
        names.append("mask")
    elif off_policy.proximal is not Proximal.BEHAVIOR or off_policy.correct_mismatch:
        names.append("truncate")
        if off_policy.truncate is not RatioLevel.NONE:
            names.append("cap")
        if off_policy.mask is not Mask.NONE:
            names.append("mask")
    if "mask" in names:
        names += ["mask_low", "mask_high"]
    if off_policy.staleness_discount < 1:
        names.append("staleness_discount")
    return _assignments(off_policy.with_bounds, *names)


def staleness_sentence(recipe: Recipe) -> str:
    """The staleness bound of a run, in one sentence."""
    rollout = recipe.rollout
    if recipe.on_policy:
        sentence = "staleness 0: every token is trained by the version that sampled it"
        batches = recipe.tail_batching.long_round_batches
        if batches == 1 or rollout.rounds not in (RoundKind.TAIL_BATCHING, RoundKind.AUTO):
            return sentence
        count = batches * recipe.training.updates_per_batch * recipe.training.epochs_per_batch
        along = " along one gradient" if count == batches else f", {batches} along each gradient"
        return f"{sentence}; a long round takes {count} optimizer steps{along}"
    stale_action = {
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
        f"{steps} after the version that sampled it; before a trajectory becomes older, "
        f"{stale_action}; "
        f"at a weight update {update}"
    )


def _set_lines(recipe: Recipe) -> list[str]:
    """Describe the engines where several sets are prepared, or where they are not vLLM's."""
    texts = []
    for engine_set in prepared_sets(recipe):
        text = f"{_number(engine_set.count, 'engine')} x {_number(engine_set.workers, 'worker')}"
        if engine_set.rounds:
            text += f" ({', '.join(engine_set.rounds)} rounds)"
        texts.append(text)
    if len(texts) > 1:
        return [f"engines     {texts[0]} at the start; instead of them, when it pays: {'; '.join(texts[1:])}"]
    if recipe.engines.kind is EngineKind.SIMULATED:
        return [f"engines     {SIMULATED_SENTENCE}"]
    return []


def _from_to(each: int, sizes: Sequence[int]) -> str:
    low = each * min(sizes)
    high = each * max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def micro_batches(recipe: Recipe, tokens_each: int, row: int) -> int:
    """Number of micro-batches of one rank in one batch, where each completion has ``tokens_each`` tokens. A sample is
    never split, so a micro-batch may exceed ``row`` tokens."""
    samples_a_row = max(1, row // max(1, tokens_each))
    return math.ceil(math.ceil(recipe.batch_trajectories / recipe.training.ranks) / samples_a_row)


def _steps_text(recipe: Recipe) -> str:
    """Optimizer steps on one batch."""
    updates = recipe.training.updates_per_batch
    epochs = recipe.training.epochs_per_batch
    if updates * epochs == 1:
        return "one optimizer step"
    text = f"{updates * epochs} optimizer steps"
    if epochs > 1:
        text += f" in {epochs} passes"
    if updates > 1:
        text += ", each on its share of the groups"
        if recipe.rollout.rounds is RoundKind.LENGTH_SORTED:
            text += ", shortest first"
    return text


def _training_text(recipe: Recipe, parameters: int) -> str:
    limit = recipe.max_tokens
    device = installed_device()
    row = recipe.training.row_tokens(device, parameters)
    longest_row = recipe.training.row_tokens(device, parameters, limit)
    few = micro_batches(recipe, limit // 4, row)
    many = micro_batches(recipe, limit, row)
    text = f"{few} to {many}" if few < many else str(many)
    text += f" micro-batches of at most {row:,} tokens"
    if longest_row > row:
        text += f" ({longest_row:,} where prompts are long)"
    text += " a step" if recipe.training.updates_per_batch == 1 else " a pass over the batch"
    if recipe.training.ranks > 1:
        text += f" on each of {recipe.training.ranks} ranks"
    return f"{text} (completions at a quarter of max_tokens = {limit}, and at all of it)"


def _evaluation_text(recipe: Recipe, name: str, held_out_set: EvaluationSet, held_out: int) -> str:
    evaluation = recipe.evaluation
    times = []
    if evaluation.at_start:
        times.append("at the start")
    if evaluation.at_end:
        times.append("at the end")
    if held_out_set.every:
        share = f"the first {held_out_set.limit} prompts" if held_out_set.limit else "all prompts"
        times.append(f"every {held_out_set.every} steps on {share}")
    file = Path(held_out_set.prompts).name
    text = f"{file if name == HELD_OUT else f'{name} ({file})'}: " + (", ".join(times) or "never")
    if held_out:
        text += f"; all prompts: {held_out:,} x {evaluation.samples} = {held_out * evaluation.samples:,} completions"
    elif evaluation.samples > 1:
        text += f"; {evaluation.samples} completions of each prompt"
    if recipe.score_of(name) is None:
        text += "; no score, because no reward scores them"
    serves = recipe.settings_of_held_out(name).serves
    comparing = [reward.label for reward in recipe.rewards if compares_siblings(reward) and serves(reward)]
    if comparing and evaluation.samples == 1:
        text += f"; without {', '.join(comparing)}, which compares siblings: evaluation.samples = 1 has none"
    return text


def _checkpoint_text(recipe: Recipe) -> str:
    checkpoint = recipe.checkpoint
    times = []
    if recipe.checkpoint_every:
        times.append(f"every {recipe.checkpoint_every} steps")
        if not checkpoint.every:
            times[0] += " (for the journal: checkpoint.every = 0)"
    if checkpoint.at_end:
        times.append("at the end")
    text = " and ".join(times) or "none"
    if recipe.checkpoint_every:
        kept_checkpoints = [f"the last {checkpoint.keep}"]
        if checkpoint.keep_best:
            kept_checkpoints.append(f"the best {checkpoint.keep_best}")
        if checkpoint.keep_every:
            kept_checkpoints.append(f"every {checkpoint.keep_every}-th step")
        text += f"; kept: {', '.join(kept_checkpoints)}"
    if checkpoint.resume_from:
        text += f"; starts from {checkpoint.resume_from}"
    return text


def _memory_text(recipe: Recipe, facts: ModelFacts, context: int) -> str:
    estimate = estimate_memory(recipe, facts, context)
    engine = max(size for name, size in estimate.items() if name.startswith("engine-"))
    rank = f"{gib(estimate['trainer-0'])} a rank"
    if recipe.objective_settings.has_reference:
        rank += ", with a reference model"
    if recipe.objective_settings.has_value_model:
        rank += ", with a value model"
    if recipe.training.ranks > 1:
        sizes = training_sizes(recipe.training, recipe.lora, recipe.objective_settings, facts)
        batch = gib(bytes_per_rank(sizes, Gathered.BATCH).total)
        layer = gib(bytes_per_rank(sizes, Gathered.LAYER).total)
        rank += (
            f'; weights and optimizer of a rank: {batch} with training.advanced.gathered = "{Gathered.BATCH}", {layer} '
            f'with "{Gathered.LAYER}"; it is "{recipe.training.gathered}"'
        )
    return (
        f"about {gib(sum(estimate.values()))} on a CPU host ({gib(engine)} an engine, {rank}); "
        f"{facts.parameters:,} parameters"
    )


def process_lines(recipe: Recipe, topology: Topology) -> list[str]:
    """Processes that the run would start, and their endpoints."""
    lines = []
    for process in topology.processes:
        start = "by this run"
        if process.starts_inactive:
            start = "after the trainer ranks" if recipe.in_turns else "when its set of engines serves"
        lines.append(f"  {process.name:<12} started {start}")
    if not recipe.on_one_host:  # endpoints are chosen when the hosts say which ports are free
        return lines
    lines.append("endpoints")
    lines += [f"  {name:<22} {endpoint}" for name, endpoint in topology.endpoints.items() if endpoint]
    return lines
