"""Summary of a recipe in words, before anything is started: batches, staleness, objective, memory. It reads the
model's chat template, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from streamrl.engines.vllm.options import installed_device
from streamrl.learning.rank_memory import bytes_per_rank, training_sizes
from streamrl.prepare.memory import estimate_memory, gib
from streamrl.pretrained.model_facts import ModelFacts
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.turns.template_facts import template_facts
from streamrl.recipe.environment import FORMS
from streamrl.recipe.learning_rate import learning_rate_notice
from streamrl.recipe.objective import Proximal, RatioLevel, why_not_streaming
from streamrl.recipe.problems import shown
from streamrl.recipe.schedules.schedule import rate_factor
from streamrl.recipe.scheduling import InFlight, RoundKind, SizingKind, StalePolicy
from streamrl.recipe.sections import HELD_OUT, ClusterKind, EngineKind, EvaluationSet, Gathered, Recipe
from streamrl.recipe.topology import ProcessPlan, Role, Topology, prepared_sets, rank_host

SIMULATED_SENTENCE = "simulated: random text, whatever the weights; nothing is learnt about a model (engines.kind)"


def arithmetic_lines(
    recipe: Recipe, facts: ModelFacts | None = None, context: int = 0, held_out: Mapping[str, int] | None = None
) -> list[str]:
    """The arithmetic as the dry run prints it, one fact a line; memory only where the model is known.

    ``context``: tokens of the longest trajectory (0: what the recipe says, without prompts where it leaves it open).
    ``held_out``: prompts of each held-out set, where they are known."""
    rollout = recipe.rollout
    engines = recipe.engines
    longest = context or engines.max_model_len or recipe.most_tokens
    objective, *more = objective_lines(recipe)
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
        *(f"{'':<12}{line}" for line in more),
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
    for name, one in recipe.evaluation.sets.items():
        lines.append(f"{'evaluation':<12}{_evaluation_text(recipe, name, one, (held_out or {}).get(name, 0))}")
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
    named = ([f"project {run.project}"] if run.project else []) + ([f"tags {', '.join(run.tags)}"] if run.tags else [])
    return lines + ([f"record      {'; '.join(named)}"] if named else [])


def _environment_lines(recipe: Recipe) -> list[str]:
    """The form of the environment and its limits, and the effects of the model's chat template on a chat that goes on;
    nothing of a recipe without one."""
    environment = recipe.environment
    if not environment.given:
        return []
    form = next(form for form in FORMS if getattr(environment, form))
    named = getattr(environment, form)
    names = [one.rpartition(":")[2] for one in ([named] if isinstance(named, str) else named)]
    limits = f"{environment.max_turns} turns, {environment.max_tokens:,} tokens, {environment.seconds:g} s"
    lines = [f"environment {form}: {', '.join(names)}; a trajectory has at most {limits}"]
    if not Path(recipe.model.path).is_dir():
        return lines
    tokenizer = load_tokenizer(recipe.model.path)
    if not tokenizer.chat_templates:
        return [*lines, f"{'':<12}the model has no chat template: what is said is appended as plain text"]
    tool = {"name": "calculate", "description": "Compute.", "parameters": {"type": "object", "properties": {}}}
    tools = None if environment.env else [{"type": "function", "function": tool}]
    found = "; ".join(template_facts(tokenizer, tools).sentences())
    kept = "the model sees the tokens that it sampled all the same"
    rewritten = "a turn before which text is rewritten begins a sequence with the text of the template"
    seen = f'. history = "{environment.history}": {kept if environment.history == "keep" else rewritten}'
    return [*lines, f"{'':<12}the model's chat template: {found}{seen if 'rewrites' in found else ''}"]


def _sizing_lines(recipe: Recipe) -> list[str]:
    """Describe ``[group_sizing]`` where sizes vary."""
    sizing = recipe.group_sizing
    steps = recipe.run.steps
    sizes = f"group size  {sizing.kind} over {', '.join(map(str, sizing.sizes))}"
    if sizing.kind is not SizingKind.SAGC:
        return [sizes] if sizing.varies else []
    measured = sizing.calibration_over(steps)
    at = str(sizing.sizes[-1]) if sizing.informs_smaller else f"{sizing.sizes[-1]} and {sizing.sizes[0]}, half each"
    known = f"measured in the first {measured} steps at size {at}" if measured else f"= {sizing.budget:g}"
    return [f"{sizes}: budget {known}, tradeoff = {sizing.tradeoff_over(steps):g}, stragglers in {sizing.straggler}"]


def objective_lines(recipe: Recipe) -> list[str]:
    """The resolved objective: the algorithm, then each field that has an effect, in the words of the recipe."""
    settings = recipe.objective_settings
    clips = ["clip_low", "clip_high"] if settings.token_surrogate.clips else []
    clips += ["dual_clip"] if settings.dual_clip else []
    method = _assignments(settings, "surrogate", *clips, "advantages", "loss_normalization")
    lines = [f"{recipe.objective.algorithm}: {method}"]
    if settings.has_critic:
        names = ("discount", "gae_lambda", "value_coefficient", "value_clip")
        own_rate = ("value_learning_rate",) if settings.value_learning_rate else ()
        own_model = ("value_model",) if settings.has_value_model else ()
        lines.append("critic: " + _assignments(settings, *names, *own_rate, *own_model))
    if settings.estimator.of_cohort:
        lines.append(_assignments(settings, "cohort_batches"))
    if settings.has_reference:
        lines.append("reference: " + _assignments(settings, "kl_coefficient", "kl_estimator", "kl_in"))
    if settings.entropy_coefficient:
        lines.append(_assignments(settings, "entropy_coefficient"))
    if settings.overlong_buffer:
        lines.append(_assignments(settings, "overlong_buffer", "overlong_penalty"))
    if not settings.train_truncated:
        lines.append(_assignments(settings, "train_truncated"))
    if recipe.dynamic_sampling:
        lines.append("dynamic_sampling = true: groups of equal rewards are dropped and refilled")
    return lines


def _assignments(settings: msgspec.Struct, *names: str) -> str:
    return ", ".join(f"{name} = {shown(getattr(settings, name))}" for name in names)


def streaming_notice(recipe: Recipe) -> str:
    """Return why nothing streams although the recipe leaves it on; empty where it streams or was turned off."""
    training = recipe.training
    reason = why_not_streaming(recipe.objective_settings, training.updates_per_batch, training.epochs_per_batch)
    return f"off, although training.advanced.streaming = true: {reason}" if training.streaming and reason else ""


def streaming_sentence(recipe: Recipe) -> str:
    """Return whether groups are trained while others generate, and why not."""
    if not recipe.training.streaming:
        return "off: training.advanced.streaming = false; a batch is trained when it is complete"
    on = "on: groups are trained while others generate, with the gradient of the whole batch"
    return streaming_notice(recipe) or on


def off_policy_text(recipe: Recipe) -> str:
    """Describe the correction of tokens that another policy sampled: the keys of ``[off_policy]`` that have an
    effect."""
    off_policy = recipe.off_policy
    if recipe.on_policy and not off_policy.correct_mismatch:
        return "nothing to correct: every token is trained by the version that sampled it"
    names = ["correct_mismatch"] if off_policy.correct_mismatch else []
    names += [] if recipe.on_policy else ["proximal"]
    if off_policy.proximal is not Proximal.BEHAVIOR or off_policy.correct_mismatch:
        names += ["truncate", "cap"] if off_policy.truncate is not RatioLevel.NONE else ["truncate"]
        names += ["mask", "mask_low", "mask_high"] if off_policy.mask is not RatioLevel.NONE else []
    names += ["staleness_discount"] if off_policy.staleness_discount < 1 else []
    return _assignments(off_policy, *names)


def staleness_sentence(recipe: Recipe) -> str:
    """The staleness bound of a run, in one sentence."""
    rollout = recipe.rollout
    if recipe.on_policy:
        said = "staleness 0: every token is trained by the version that sampled it"
        batches = recipe.tail_batching.long_round_batches
        if batches == 1 or rollout.rounds not in (RoundKind.TAIL_BATCHING, RoundKind.AUTO):
            return said
        count = batches * recipe.training.updates_per_batch * recipe.training.epochs_per_batch
        along = " along one gradient" if count == batches else f", {batches} along each gradient"
        return f"{said}; a long round takes {count} optimizer steps{along}"
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


def _set_lines(recipe: Recipe) -> list[str]:
    """Describe the engines where several sets are prepared, or where they are not vLLM's."""
    first, *others = prepared_sets(recipe)
    if not others:
        return [f"engines     {SIMULATED_SENTENCE}"] if recipe.engines.kind is EngineKind.SIMULATED else []
    texts = []
    for one in (first, *others):
        always = f" ({', '.join(one.rounds)} rounds)" if one.rounds else ""
        texts.append(f"{_number(one.count, 'engine')} x {_number(one.workers, 'worker')}{always}")
    return [f"engines     {texts[0]} at the start; instead of them, when it pays: {'; '.join(texts[1:])}"]


def _from_to(each: int, sizes: Sequence[int]) -> str:
    low = each * min(sizes)
    high = each * max(sizes)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def micro_batches(recipe: Recipe, tokens_each: int, row: int) -> int:
    """Count the micro-batches of one rank in one batch, where each completion has ``tokens_each``; a sample is never
    cut, so one may exceed the ``row``."""
    in_one = max(1, row // max(1, tokens_each))
    return math.ceil(math.ceil(recipe.batch_trajectories / recipe.training.ranks) / in_one)


def _steps_text(recipe: Recipe) -> str:
    """Optimizer steps on one batch."""
    updates = recipe.training.updates_per_batch
    epochs = recipe.training.epochs_per_batch
    if updates * epochs == 1:
        return "one optimizer step"
    order = ", shortest first" if recipe.rollout.rounds is RoundKind.LENGTH_SORTED else ""
    share = f", each on its share of the groups{order}" if updates > 1 else ""
    return f"{updates * epochs} optimizer steps" + (f" in {epochs} passes" if epochs > 1 else "") + share


def _training_text(recipe: Recipe, parameters: int) -> str:
    limit = recipe.most_tokens
    row, longest = (recipe.training.row_tokens(installed_device(), parameters, prompt) for prompt in (0, limit))
    few = micro_batches(recipe, limit // 4, row)
    many = micro_batches(recipe, limit, row)
    ranks = recipe.training.ranks
    updates = recipe.training.updates_per_batch
    return (
        f"{f'{few} to {many}' if few < many else many} micro-batches of at most {row:,} tokens"
        f"{f' ({longest:,} where prompts are long)' if longest > row else ''} a "
        f"{'step' if updates == 1 else 'pass over the batch'}"
        + (f" on each of {ranks} ranks" if ranks > 1 else "")
        + f" (completions at a quarter of max_tokens = {limit}, and at all of it)"
    )


def _evaluation_text(recipe: Recipe, name: str, one: EvaluationSet, held_out: int) -> str:
    evaluation = recipe.evaluation
    times = [
        name for name, wanted in (("at the start", evaluation.at_start), ("at the end", evaluation.at_end)) if wanted
    ]
    if one.every:
        share = f"the first {one.limit} prompts" if one.limit else "all prompts"
        times.append(f"every {one.every} steps on {share}")
    file = Path(one.prompts).name
    text = f"{file if name == HELD_OUT else f'{name} ({file})'}: " + (", ".join(times) or "never")
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


def _memory_text(recipe: Recipe, facts: ModelFacts, context: int) -> str:
    estimate = estimate_memory(recipe, facts, context)
    engine = max(size for name, size in estimate.items() if name.startswith("engine-"))
    extra = ", with a reference model" if recipe.objective_settings.has_reference else ""
    extra += ", with a value model" if recipe.objective_settings.has_value_model else ""
    if recipe.training.ranks > 1:
        sizes = training_sizes(recipe.training, recipe.lora, recipe.objective_settings, facts)
        batch, layer = (gib(bytes_per_rank(sizes, kind).total) for kind in (Gathered.BATCH, Gathered.LAYER))
        extra += (
            f'; weights and optimizer of a rank: {batch} with training.advanced.gathered = "{Gathered.BATCH}", {layer} '
            f'with "{Gathered.LAYER}"; it is "{recipe.training.gathered}"'
        )
    return (
        f"about {gib(sum(estimate.values()))} on a CPU host ({gib(engine)} an engine, "
        f"{gib(estimate['trainer-0'])} a rank{extra}); {facts.parameters:,} parameters"
    )


def _started(process: ProcessPlan) -> str:
    if not process.local:
        return "started by hand (external)"
    return "started when its set of engines serves" if process.starts_inactive else "started by this run"


def process_lines(recipe: Recipe, topology: Topology, recipe_path: str) -> list[str]:
    """List the processes that would be started, the endpoints, and the commands for what a person starts
    (``external``)."""
    lines = [f"  {process.name:<12} {_started(process)}" for process in topology.processes]
    if recipe.cluster.kind is not ClusterKind.LOCAL:  # endpoints are chosen when the hosts say which ports are free
        return lines
    lines += ["endpoints"]
    lines += [f"  {name:<22} {endpoint}" for name, endpoint in topology.endpoints.items() if endpoint]
    if ports := [
        endpoint.rpartition(":")[2] for endpoint in topology.endpoints.values() if endpoint.startswith("tcp:")
    ]:
        lines.append(f"  ports {ports[0]} to {ports[-1]} must be free on the hosts above")
    apart = recipe.transport.training_hosts
    commands = [
        f"  streamrl serve {p.role.value} {recipe_path} --index {p.index}"
        + (f"  (on {rank_host(recipe, p.index)})" if apart and p.role is Role.TRAINER else "")
        for p in topology.processes
        if not p.local
    ]
    return lines + (["start by hand", *commands] if commands else [])
