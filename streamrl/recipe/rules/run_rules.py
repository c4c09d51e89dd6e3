"""Rules of ``[run]``, ``[training]``, ``[lora]``, ``[evaluation]``, ``[checkpoint]``, ``[weights]`` and
``[metrics]``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from streamrl.base.host_addresses import wrong_port
from streamrl.recipe.environment import ENVIRONMENT_REWARD, Credit
from streamrl.recipe.objectives.distillation import NO_REWARD
from streamrl.recipe.problems import did_you_mean, short_toml
from streamrl.recipe.remote_names import is_url, name_in_address, url_problem
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule, unless
from streamrl.recipe.schedules.schedule import SCHEDULES, WITHOUT_END, options_of, rate_factor
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import ADAPTER_RANKS, SOLVED, Gathered, OptimizerKind, Recipe, Run, TrainingSet

DEVICES = ("auto", "cpu", "cuda")
LONGEST_RUN_NAME = 45
"""Limit of the journal (64 bytes for name and ``-YYYYMMDD-HHMMSS-NN``)."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
MOST_IN_FLIGHT = 1 << 20
NEEDS_A_METRIC = ("reduce_lr_on_plateau", "greedy")
DECAYS = ("cosine", "linear", "1-sqrt")

has_no_effect(
    "evaluation.limit",
    unless(
        lambda recipe: recipe.evaluation.every or recipe.evaluation.regular[0],
        " while evaluation.every = 0, because start and end take all prompts: remove it, or set every",
    ),
)
has_no_effect(
    "checkpoint.keep_best checkpoint.keep_every",
    unless(lambda recipe: recipe.checkpoint.every, " while checkpoint.every = 0: remove it, or set every"),
)
has_no_effect(
    "checkpoint.copy_to",
    unless(
        lambda recipe: recipe.checkpoint_every or recipe.checkpoint.at_end,
        " without checkpoints: remove it, or set every",
    ),
    "run",
)
has_no_effect(
    "lora.alpha lora.targets lora.sync lora.rslora lora.dora",
    unless(lambda recipe: recipe.lora.rank, " while lora.rank = 0: remove it, or set rank, such as 16"),
)


@rule("evaluation")
def evaluation(recipe: Recipe) -> Broken:
    """Evaluations need prompts, and sets need names that metrics can have."""
    evaluation = recipe.evaluation
    for name, value, default in (("every", evaluation.every, 0), ("samples", evaluation.samples, 1)):
        if value > default and not evaluation.prompts:
            yield Problem(
                "evaluation.prompts",
                f"is empty, but evaluation.{name} = {value}: name held-out prompts, or set {name} = {default}",
            )
    for name, held_out in evaluation.sets.items():
        if not re.fullmatch(NAME, name):
            yield Problem("evaluation.prompts", f'"{name}" cannot be part of a metric: use letters, digits and "._-"')
        if not held_out.prompts:
            yield Problem(f"evaluation.prompts.{name}", "is empty: name its prompts, or remove it")


@rule("prompts.train", "evaluation.prompts", "rewards", "sampling.max_tokens", "prompts.template", "environment")
def settings_of_sets(recipe: Recipe) -> Broken:
    """Settings of a training set must be possible in the run, and held-out sets must name one."""
    labels = [reward.label for reward in recipe.rewards]
    limit = recipe.sampling.max_tokens
    for name, training_set in recipe.prompts.sets.items():
        path = f"prompts.train.{name}"
        unknown = [label for label in training_set.rewards if label not in labels]
        for label in unknown:
            text = f'"{label}" is no reward of this recipe: write names out of {", ".join(labels)}'
            yield Problem(f"{path}.rewards", text)
        if not unknown and all(reward.shadow for reward in recipe.rewards if training_set.serves(reward)):
            yield Problem(f"{path}.rewards", "names no reward that is trained: add one that is no shadow")
        if training_set.environment_name is None:
            yield from _beside_environment(recipe, training_set, f"{path}.environment")
        if training_set.max_tokens > limit:
            text = f"{training_set.max_tokens} is above sampling.max_tokens = {limit}, the limit of all sets"
            yield Problem(f"{path}.max_tokens", f"{text}: raise that")
    held_out_settings = [recipe.settings_of_held_out(name) for name in recipe.evaluation.sets]
    for index, reward in enumerate(recipe.rewards):
        serving = [settings.serves(reward) for settings in (*recipe.prompts.sets.values(), *held_out_settings)]
        if serving and not any(serving):
            text = f'"{reward.label}" scores nothing, because no set names it: add it to prompts.train.NAME.rewards'
            yield Problem(f"rewards.{index}", f"{text}, or remove it")
    for name, held_out in recipe.evaluation.sets.items():
        if held_out.like and held_out.like not in recipe.prompts.all_sets:
            sets = ", ".join(filter(None, recipe.prompts.all_sets)) or "none: prompts.train is a single source"
            text = f'"{held_out.like}" is no training set; there are {sets}'
            yield Problem(f"evaluation.prompts.{name}.like", f"{text}: correct it, or remove the key")


def _beside_environment(recipe: Recipe, training_set: TrainingSet, path: str) -> Broken:
    """Single completions are trained beside episodes whose credit is that of the trajectory, by rewards of the run."""
    credit = recipe.environment.credit
    if not recipe.environment.configured:
        yield Problem(path, "false has no effect without an [environment]: remove it")
    elif credit is not Credit.TRAJECTORY:
        text = f'false cannot be mixed with environment.credit = "{credit}", as a completion has one turn'
        yield Problem(path, f'{text}: set credit = "trajectory"')
    rewards = [reward for reward in recipe.rewards if training_set.serves(reward) and not reward.shadow]
    if rewards and all(reward.function == ENVIRONMENT_REWARD for reward in rewards):
        yield Problem(path, "false leaves the set without a reward: add [[rewards]] that score its completions")


@rule("prompts.skip_solved", "prompts.pools")
def pools(recipe: Recipe) -> Broken:
    """Pools need bounds, and names that metrics can have."""
    for name, pool in recipe.prompts.pools.items():
        path = f"prompts.pools.{name}"
        if not re.fullmatch(NAME, name) or (name == SOLVED and recipe.prompts.skip_solved is not None):
            text = f'"{name}" cannot name a pool: use letters, digits and "._-", and not the pool of skip_solved'
            yield Problem("prompts.pools", text)
        elif pool.minimum is None and pool.below is None:
            yield Problem(path, "has neither minimum nor below, and would hold all prompts: add one of them")
        elif pool.minimum is not None and pool.below is not None and pool.minimum >= pool.below:
            text = f"holds nothing from minimum = {pool.minimum:g} to below = {pool.below:g}: correct one of them"
            yield Problem(path, text)


@rule("prompts.train", "training.epochs", "environment")
def training_sets(recipe: Recipe) -> Broken:
    """A run trains on one source, or on sets with names that metrics can have."""
    sets = recipe.prompts.sets
    if not sets:
        problem = "has no set that is sampled: add one without imitate" if recipe.prompts.imitated else "is empty"
        yield Problem("prompts.train", f"{problem}: name the prompts")
    for name, training_set in recipe.prompts.all_sets.items():
        if training_set.imitate_steps and not training_set.imitate:
            yield Problem(
                f"prompts.train.{name}.imitate_steps", "has no effect without imitate: set it, or remove this"
            )
        if training_set.imitate and (training_set.rewards or training_set.max_tokens):
            key = "rewards" if training_set.rewards else "max_tokens"
            yield Problem(f"prompts.train.{name}.{key}", "has no effect with imitate, which samples nothing: remove it")
        path = f"prompts.train.{name}" if name else "prompts.train"
        if training_set.environment_name not in (None, *recipe.environment.by_name):
            yield Problem(
                f"{path}.environment",
                f'"{training_set.environment}" is no name in [[environment.advanced.further]]: correct it',
            )
        if isinstance(recipe.prompts.train, dict) and not re.fullmatch(NAME, name):
            yield Problem("prompts.train", f'"{name}" cannot be part of a metric: use letters, digits and "._-"')
        elif not training_set.prompts:
            yield Problem(path, "is empty: name its prompts, or remove it")
    if len(sets) > 1 and recipe.training.epochs:
        text = f"{recipe.training.epochs:g} passes over {len(sets)} sets, whose shares say how often each is read"
        yield Problem("training.epochs", f"{text}: set run.steps in its place")


@rule("evaluation", "rewards", "prompts.train")
def evaluated_reward(recipe: Recipe) -> Broken:
    """The score of evaluations must be a reward of the recipe, which scores all held-out sets."""
    name = recipe.evaluation.reward
    labels = [reward.label for reward in recipe.rewards]
    if name and name not in labels:
        yield Problem("evaluation.reward", f'"{name}" is no reward of this recipe: write one of {", ".join(labels)}')
        return
    for held_out in recipe.evaluation.sets:
        rewards = recipe.settings_of_held_out(held_out).rewards
        if name and rewards and name not in rewards:
            text = f'"{name}" does not score the held-out set {held_out}, as its training set has {", ".join(rewards)}'
            yield Problem("evaluation.reward", f"{text}: add it there, or remove this: the first of each is the score")


@rule("lora")
def adapters(recipe: Recipe) -> Broken:
    """A pattern of modules must be valid, and vLLM must be able to serve the adapter."""
    lora = recipe.lora
    merged = 'or set lora.sync = "merged"'
    try:
        re.compile(lora.pattern)
    except re.error as error:
        yield Problem("lora.targets", f"{short_toml(lora.pattern)} is no regular expression ({error}): correct it")
    if lora.syncs_adapter and lora.dora:
        yield Problem(
            "lora.dora", f'is not served by vLLM beside the base (lora.sync = "adapter"): remove it, {merged}'
        )
    if lora.syncs_adapter and lora.rank > ADAPTER_RANKS[-1]:
        yield Problem("lora.rank", f"{lora.rank} is more than the {ADAPTER_RANKS[-1]} of vLLM: lower it, {merged}")


@rule("training.updates_per_batch", "rollout", "length_sorted.single")
def updates(recipe: Recipe) -> Broken:
    """A batch needs a group for each of its optimizer steps."""
    updates = recipe.training.updates_per_batch
    rollout = recipe.rollout
    single = rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.single
    groups = rollout.prompts_per_batch * (rollout.group_size if single else 1)
    if updates > groups:
        unit = "single trajectories" if single else "groups"
        yield Problem(
            "training.updates_per_batch",
            f"{updates} steps do not fit a batch of {groups} {unit}, since each step trains its share of them: set "
            f"{groups} or less",
        )


@rule("training", "run.steps")
def schedule(recipe: Recipe) -> Broken:
    """A schedule needs a known name, valid options, and steps after the warm-up; it must not end before the run."""
    training = recipe.training
    name = recipe.training.schedule
    steps = recipe.run.steps
    if name in NEEDS_A_METRIC:
        why = "follows a metric, and a resumed run has the same rates because they depend on the step alone"
        yield Problem("training.schedule", f'"{name}" {why}: take another, such as "cosine"')
    elif name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES, ".")
        yield Problem("training.schedule", f'"{name}" is no schedule{hint} One of {", ".join(SCHEDULES)}')
    if name not in SCHEDULES:
        return
    options = options_of(name)
    has_wrong_option = False
    for option, value in training.schedule_options.items():
        if problem := _option_problem(options, option, value):
            has_wrong_option = True
            yield Problem(f"training.schedule_options.{option}", f'{problem}, with schedule = "{name}"')
    end = training.schedule_steps or (0 if training.epochs else steps)
    if name in WITHOUT_END and training.schedule_steps:
        yield Problem("training.schedule_steps", f'{end} has no effect with schedule = "{name}": remove it')
    if name in WITHOUT_END or not end or has_wrong_option:
        return
    remaining = end - training.warmup_steps
    if remaining < max(1.0, float(training.schedule_options.get("num_decay_steps", 0))):
        yield Problem(
            "training.warmup_steps",
            f"{training.warmup_steps} leaves {remaining} of {end} steps to the schedule: lower it",
        )
    elif end < steps and rate_factor(training, end + 1, end) == 0:
        yield Problem(
            "training.schedule_steps",
            f"{end} would leave steps {end + 1} to {steps} at learning rate 0: set it to {steps} or more, or take a "
            "schedule with an end above 0",
        )


def _option_problem(options: Mapping[str, float | str], name: str, value: float | str) -> str:
    """Return the problem with an option of a schedule; empty: it is valid. ``options``: options with their defaults."""
    if name not in options:
        return f"is no option (those are {', '.join(options) or 'none'}; an end is a share of the rate, min_lr_rate)"
    if isinstance(options[name], str):
        if value in DECAYS:
            return ""
        return f"{short_toml(value)} is none of {', '.join(DECAYS)}"
    largest = 1.0 if name.startswith("min_lr") else math.inf
    if isinstance(value, float) and 0 <= value <= largest:
        return ""
    return f"{short_toml(value)} is no number from 0 to {largest:g}"


@rule("training.epochs", "run.steps")
def run_length(recipe: Recipe) -> Broken:
    """Only one of ``training.epochs`` and ``run.steps`` may set the length of the run."""
    if recipe.training.epochs and recipe.run.steps != Run().steps:
        yield Problem(
            "training.epochs",
            f"{short_toml(recipe.training.epochs)} and run.steps = {recipe.run.steps} both say how long the run is: "
            "remove one of them",
        )


@rule("evaluation", "checkpoint", "run.steps", "training.epochs", "rewards", "prompts.train")
def checkpoints(recipe: Recipe) -> Broken:
    """The best checkpoints need scores of the same steps; kept checkpoints must be written."""
    checkpoint = recipe.checkpoint
    sets = recipe.evaluation.sets
    first = next(iter(sets), "")  # it has the score
    every = next((held_out.every or 0 for held_out in sets.values()), 0)
    if checkpoint.keep_best and sets and recipe.score_of(first) is None:
        text = f'has no score to compare, as the only reward of {first} is "{NO_REWARD}": add a reward, or remove this'
        yield Problem("checkpoint.keep_best", f"{checkpoint.keep_best} {text}")
    elif checkpoint.keep_best and not every:
        yield Problem(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} needs held-out scores: set evaluation.prompts and evaluation.every, "
            "or keep_best = 0",
        )
    # With epochs the number of steps is known after the prompts are counted; all rules are then checked again.
    elif checkpoint.keep_best and not recipe.training.epochs and math.lcm(checkpoint.every, every) > recipe.run.steps:
        yield Problem(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} has nothing to compare: no step is both a multiple of checkpoint.every = "
            f"{checkpoint.every} and of evaluation.every = {every}; set one to a multiple of the "
            "other",
        )
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        yield Problem(
            "checkpoint.keep_every",
            f"{checkpoint.keep_every} is no multiple of checkpoint.every = {checkpoint.every}, so not every such "
            "step is written: set it to a multiple",
        )


@rule("weights.transport", "checkpoint")
def stores(recipe: Recipe) -> Broken:
    """URLs of object stores must be valid."""
    places = {"weights.transport": recipe.weights.transport, "checkpoint.copy_to": recipe.checkpoint.copy_to}
    if is_url(recipe.checkpoint.resume_from):
        places["checkpoint.resume_from"] = recipe.checkpoint.resume_from
    for key, url in places.items():
        problem = url_problem(url) if url else None
        if problem:
            yield Problem(key, problem)


@rule("training.device", "training.ranks", "training.optimizer")
def devices(recipe: Recipe) -> Broken:
    """The trainer's device must be valid, and fit the optimizer."""
    device = recipe.training.device
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        yield Problem(
            "training.device",
            f'"{device}" is not allowed: must be one of "auto", "cpu", "cuda", "cuda:0", "cuda:1", ...',
        )
    if device == "cpu" and recipe.training.optimizer is OptimizerKind.ADAMW_OFFLOADED:
        yield Problem(
            "training.optimizer",
            '"adamw_offloaded" has no effect on device = "cpu", where everything is in CPU memory: '
            'set optimizer = "adamw"',
        )


@rule("training", "lora.rank")
def split_of_ranks(recipe: Recipe) -> Broken:
    """Tensor and expert parallelism and replicas must divide the ranks, and fit adapters, compilation and optimizer."""
    training = recipe.training
    where = "training.tensor_parallel_size"
    tensor = training.tensor_parallel_size
    replicas = training.replicas
    ranks = training.ranks
    if ranks % (tensor * replicas):
        name = where if tensor > 1 else "training.replicas"
        text = f"training.ranks = {ranks} is no multiple of tensor_parallel_size x replicas = {tensor} x {replicas}"
        yield Problem(name, f"{text}: set ranks = {-(-ranks // (tensor * replicas)) * tensor * replicas}")
    if training.expert_parallel_size not in (1, tensor):
        text = f"{training.expert_parallel_size} is neither 1 nor tensor_parallel_size = {tensor}, whose ranks have the"
        yield Problem("training.expert_parallel_size", f"{text} same tokens: set both to one number")
    if recipe.lora.rank and tensor * replicas > 1:
        text = f"lora.rank = {recipe.lora.rank}: adapters are trained over FSDP2 alone: set tensor_parallel_size = 1"
        yield Problem(where if tensor > 1 else "training.replicas", f"{text} and replicas = 1")
    if tensor > 1 and training.compile:
        yield Problem("training.compile", f"is not possible with tensor_parallel_size = {tensor}: set it to false")
    if tensor > 1 and training.optimizer is OptimizerKind.ADAMW_8BIT:
        text = f'"{training.optimizer}" rounds moments by their neighbours, which differ between tensor parallel ranks'
        yield Problem("training.optimizer", f'{text}, and what all of them have would too: set "adamw"')


@rule("training", "lora.rank")
def context_of_ranks(recipe: Recipe) -> Broken:
    """Context parallelism must divide the ranks, and does not fit adapters."""
    training = recipe.training
    size = recipe.training.context_parallel_size
    ranks = recipe.training.ranks
    unit = size * training.tensor_parallel_size * training.replicas
    if size > 1 and ranks % unit:
        text = f"training.ranks = {ranks} is no multiple of context_parallel_size x tensor_parallel_size x replicas ="
        sizes = f"{size} x {training.tensor_parallel_size} x {training.replicas}"
        yield Problem("training.context_parallel_size", f"{text} {sizes}: set ranks = {-(-ranks // unit) * unit}")
    if size > 1 and recipe.lora.rank:
        text = f"lora.rank = {recipe.lora.rank}: adapters are trained over FSDP2 alone: set context_parallel_size = 1"
        yield Problem("training.context_parallel_size", text)


@rule("training")
def gathered_where_rows_are_collective(recipe: Recipe) -> Broken:
    """Parameters cannot stay gathered where ranks compute each row together."""
    training = recipe.training
    if training.gathered is not Gathered.BATCH:
        return
    for name in ("tensor_parallel_size", "context_parallel_size"):
        size = getattr(training, name)
        if size > 1:
            text = f'"{training.gathered}" is not possible with {name} = {size}, where each row is a collective'
            yield Problem("training.gathered", f'{text}: set "auto" or "layer"')


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout", "group_sizing")
def in_flight(recipe: Recipe) -> Broken:
    """The number of trajectories in flight has a limit."""
    if recipe.max_in_flight > MOST_IN_FLIGHT:
        yield Problem(
            "rollout",
            f"{recipe.max_in_flight} completions would be in flight at once, at most {MOST_IN_FLIGHT}: lower "
            "prompts_per_batch, group_size or max_staleness",
        )


@rule("model.path", "judge.model", "teacher", "objective.reference", "prompts.train", "evaluation.prompts")
def no_addresses(recipe: Recipe) -> Broken:
    """Models and data are paths or names of the Hub, not addresses of pages."""
    places = [("model.path", recipe.model.path), ("judge.model", recipe.judge.model)]
    if recipe.teacher.is_own:
        places.append(("teacher.model", recipe.teacher.model))
    places += [("objective.reference", recipe.objective.reference)]
    places += [("prompts.train", training_set.prompts) for training_set in recipe.prompts.all_sets.values()]
    places += [("evaluation.prompts", held_out.prompts) for held_out in recipe.evaluation.sets.values()]
    if not recipe.model.path:
        yield Problem("model.path", "is empty: name a directory, or a model of the Hub (owner/name)")
    for field, text in places:
        address = text.partition("?")[0]
        if name := name_in_address(address):
            yield Problem(field, f'"{address}" is an address of the Hub: write "{name}"')
        elif "://" in address:
            yield Problem(field, f'"{address}" is an address: download the file, and name the copy')


@rule("metrics.endpoint")
def metrics_endpoint(recipe: Recipe) -> Broken:
    """The endpoint of the metrics must be a ZeroMQ endpoint."""
    endpoint = recipe.metrics.endpoint
    if endpoint and not re.fullmatch(r"ipc://.+|tcp://[^:]+:\d+", endpoint):
        yield Problem(
            "metrics.endpoint",
            f'"{endpoint}" is not an endpoint: write "tcp://127.0.0.1:5690" or "ipc:///path/socket", or leave it empty',
        )
    elif endpoint.startswith("tcp://") and (problem := wrong_port(endpoint.rpartition(":")[2])):
        yield Problem("metrics.endpoint", problem)


@rule("run.name")
def run_name(recipe: Recipe) -> Broken:
    """The name of the run must be valid for a directory, and not too long for the journal."""
    if not re.fullmatch(NAME, recipe.run.name):
        yield Problem("run.name", f'"{recipe.run.name}" cannot name a directory: use letters, digits, ".", "_" and "-"')
    elif len(recipe.run.name) > LONGEST_RUN_NAME:
        yield Problem(
            "run.name", f'"{recipe.run.name}" is longer than {LONGEST_RUN_NAME} characters: choose a shorter one'
        )
