"""Rules between fields, in one place: each says what does not fit together and what to write instead.

A rule names the fields that it reads, so that it is skipped where one of them is already known to be wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Set
from functools import cache

import msgspec

from streamrl.recipe.fields import as_written, written_path
from streamrl.recipe.problems import shown
from streamrl.recipe.sections import Lora, OptimizerKind, Recipe, ReleaseKind
from streamrl.rules import (
    judge_rules,
    objective_rules,
    reward_rules,
    scheduling_rules,
    sizing_rules,
    transport_rules,
)
from streamrl.rules.engine_rules import (
    batched_tokens,
    engine_restarts,
    evaluation_temperature,
    prepared_engine_sets,
    sampling_temperature,
)
from streamrl.rules.foreign_keys import foreign_answer

__all__ = ["broken_rules", "foreign_answer"]  # what ``recipe.load`` calls

DEVICES = ("auto", "cpu", "cuda")
LONGEST_RUN_NAME = 45
"""The journal takes 64 bytes, and ``-YYYYMMDD-HHMMSS-NN`` follows the name."""
MOST_IN_FLIGHT = 1 << 20
ENGINE_DTYPES = ("auto", "float32", "bfloat16", "float16")


class Rule(msgspec.Struct, frozen=True):
    """``check`` yields (path, what is wrong and the remedy). ``reads``: paths whose values it relies on."""

    reads: tuple[str, ...]
    check: Callable[[Recipe], Iterator[tuple[str, str]]]


def broken_rules(recipe: Recipe, bad_paths: Set[str] = frozenset()) -> list[tuple[str, str]]:
    """Every (path, message) of the rules that ``recipe`` breaks, with keys as they are written (``[run.advanced]``);
    rules that read a bad path are left out."""
    bad = {".".join(part for part in path.split(".") if not part.isdigit()) for path in bad_paths}
    above_bad = {above for path in bad for above in _upwards(path)}
    found = [one for rule in RULES if not _reads_any(rule, bad, above_bad) for one in rule.check(recipe)]
    return [(written_path(Recipe, path), as_written(Recipe, text)) for path, text in found]


def _reads_any(rule: Rule, bad: Set[str], above_bad: Set[str]) -> bool:
    """Whether it reads a bad path, something in it, or what holds it."""
    return bool(bad) and not (above_bad.isdisjoint(rule.reads) and bad.isdisjoint(_above_reads(rule)))


@cache
def _above_reads(rule: Rule) -> Set[str]:
    return {above for read in rule.reads for above in _upwards(read)}


def _upwards(path: str) -> Set[str]:
    """``path`` and every table that holds it."""
    parts = path.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _evaluation(recipe: Recipe) -> Iterator[tuple[str, str]]:
    evaluation = recipe.evaluation
    for name, value, unset in (("every", evaluation.every, 0), ("samples", evaluation.samples, 1)):
        if value > unset and not evaluation.prompts:
            yield (
                "evaluation.prompts",
                f"is empty, but evaluation.{name} = {value}: name held-out prompts, or set {name} = {unset}",
            )
    if evaluation.limit and not evaluation.every:
        yield (
            "evaluation.limit",
            (
                f"{evaluation.limit} has no effect while evaluation.every = 0, because start and end take all prompts: "
                "remove it, or set every"
            ),
        )


def _evaluated_reward(recipe: Recipe) -> Iterator[tuple[str, str]]:
    name, labels = recipe.evaluation.reward, [reward.label for reward in recipe.rewards]
    if name and name not in labels:
        yield "evaluation.reward", f'"{name}" is no reward of this recipe: write one of {", ".join(labels)}'


def _updates(recipe: Recipe) -> Iterator[tuple[str, str]]:
    updates, groups = recipe.training.updates_per_batch, recipe.rollout.prompts_per_batch
    if updates > groups:
        yield (
            "training.updates_per_batch",
            (
                f"{updates} steps do not fit a batch of rollout.prompts_per_batch = {groups} groups, since each step "
                f"trains its share of them: set {groups} or less"
            ),
        )


def _checkpoints(recipe: Recipe) -> Iterator[tuple[str, str]]:
    checkpoint = recipe.checkpoint
    for name in ("keep_best", "keep_every"):
        if getattr(checkpoint, name) and not checkpoint.every:
            yield (
                f"checkpoint.{name}",
                f"{getattr(checkpoint, name)} has no effect while checkpoint.every = 0: remove it, or set every",
            )
    if checkpoint.keep_best and not (recipe.evaluation.prompts and recipe.evaluation.every):
        yield (
            "checkpoint.keep_best",
            (
                f"{checkpoint.keep_best} needs held-out scores: set evaluation.prompts and evaluation.every, "
                "or keep_best = 0"
            ),
        )
    elif checkpoint.keep_best and math.lcm(checkpoint.every, recipe.evaluation.every) > recipe.run.steps:
        yield (
            "checkpoint.keep_best",
            (
                f"{checkpoint.keep_best} has nothing to compare: no step is both a multiple of checkpoint.every = "
                f"{checkpoint.every} and of evaluation.every = {recipe.evaluation.every}; set one to a multiple of the "
                "other"
            ),
        )
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        yield (
            "checkpoint.keep_every",
            (
                f"{checkpoint.keep_every} is no multiple of checkpoint.every = {checkpoint.every}, so not every such "
                "step is written: set it to a multiple"
            ),
        )


def _lora(recipe: Recipe) -> Iterator[tuple[str, str]]:
    lora, default = recipe.lora, Lora()
    for name in ("alpha", "targets"):
        if lora.rank == 0 and getattr(lora, name) != getattr(default, name):
            yield (
                f"lora.{name}",
                f"{shown(getattr(lora, name))} has no effect while lora.rank = 0: remove it, or set rank, such as 16",
            )


def _devices(recipe: Recipe) -> Iterator[tuple[str, str]]:
    device = recipe.training.device
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        yield (
            "training.device",
            f'"{device}" is not allowed: must be one of "auto", "cpu", "cuda", "cuda:0", "cuda:1", ...',
        )
    if device == "cpu" and recipe.training.optimizer is OptimizerKind.ADAMW_OFFLOADED:
        yield (
            "training.optimizer",
            (
                '"adamw_offloaded" has no effect on device = "cpu", where everything is in host memory: '
                'set optimizer = "adamw"'
            ),
        )


def _engine_dtype(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.engines.dtype not in ENGINE_DTYPES:
        names = ", ".join(f'"{name}"' for name in ENGINE_DTYPES)
        yield "engines.dtype", f'"{recipe.engines.dtype}" is not allowed: must be one of {names}'


def _engine_cores(recipe: Recipe) -> Iterator[tuple[str, str]]:
    cores, count = recipe.engines.cores, recipe.engines.count
    if len(cores) not in (0, count):
        yield (
            "engines.cores",
            f'has {len(cores)} entries for {count} engines: give one for each, such as ["0-3", "4-7"], or none',
        )
    places = {f"engines.cores.{index}": entry for index, entry in enumerate(cores)}
    for number, shape in enumerate(recipe.engines.sets):
        places |= {f"engines.sets.{number}.cores.{index}": entry for index, entry in enumerate(shape.cores)}
    for place, entry in places.items():
        if not judge_rules.are_cores(entry):
            yield place, f'"{entry}" is not a list of cores: write "0", "0-3" or "0,2,4-7"'


def _in_flight(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.max_in_flight > MOST_IN_FLIGHT:
        yield (
            "rollout",
            (
                f"{recipe.max_in_flight} completions would be in flight at once, at most {MOST_IN_FLIGHT}: lower "
                "prompts_per_batch, group_size or max_staleness"
            ),
        )


def _engine_context(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if 0 < recipe.engines.max_model_len <= recipe.sampling.max_tokens:
        yield (
            "engines.max_model_len",
            (
                f"{recipe.engines.max_model_len} leaves no room for a prompt beside sampling.max_tokens = "
                f"{recipe.sampling.max_tokens}: raise it, lower max_tokens, or set 0 (derived)"
            ),
        )


def _released_engines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Engines are freed late in a round and are back before the next: there must be such a time, and others."""
    release, field = recipe.engines.release, "engines.release"
    if release is ReleaseKind.NEVER:
        return
    said = f'"{release}"'
    if recipe.engines.count < 2:
        yield field, f'{said} needs an engine that goes on: set engines.count = 2 or more, or release = "never"'
    if not recipe.on_policy:
        yield (
            field,
            (
                f'{said} does not fit rounds = "{recipe.rollout.rounds}" at staleness {recipe.rollout.max_staleness}, '
                'where one round runs into the next: set release = "never", or rounds that train on-policy'
            ),
        )
    if recipe.rollout.presubmit:
        yield (
            field,
            (
                f"{said} does not fit rollout.presubmit, which needs all engines while the step ends: "
                'set presubmit = false, or release = "never"'
            ),
        )


def _metrics_endpoint(recipe: Recipe) -> Iterator[tuple[str, str]]:
    endpoint = recipe.metrics.endpoint
    if endpoint and not re.fullmatch(r"ipc://.+|tcp://[^:]+:\d+", endpoint):
        yield (
            "metrics.endpoint",
            f'"{endpoint}" is not an endpoint: write "tcp://127.0.0.1:5690" or "ipc:///path/socket", or leave it empty',
        )


def _run_name(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.run.name):
        yield "run.name", f'"{recipe.run.name}" cannot name a directory: use letters, digits, ".", "_" and "-"'
    elif len(recipe.run.name) > LONGEST_RUN_NAME:
        yield "run.name", f'"{recipe.run.name}" is longer than {LONGEST_RUN_NAME} characters: choose a shorter one'


_ROUNDS = ("rollout.rounds", "tail_batching", "length_sorted")


def _deterministic(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.run.deterministic:
        yield from scheduling_rules.reproducible_rounds(recipe)


RULES = (
    Rule(("run.name",), _run_name),
    Rule(("run.deterministic", *_ROUNDS), _deterministic),
    Rule((*_ROUNDS, "rollout.max_staleness"), scheduling_rules.staleness_of_rounds),
    Rule((*_ROUNDS, "rollout.in_flight", "rollout.when_stale"), scheduling_rules.nothing_in_flight_at_an_update),
    Rule((*_ROUNDS, "rollout.presubmit"), scheduling_rules.submitted_in_advance),
    Rule(("rollout.rounds", "rollout.policy"), scheduling_rules.custom_policy),
    Rule(_ROUNDS, scheduling_rules.sections_of_other_rounds),
    Rule((*_ROUNDS, "rollout", "group_sizing"), scheduling_rules.races),
    Rule((*_ROUNDS, "objective"), scheduling_rules.cohorts),
    Rule(("group_sizing",), sizing_rules.sizing_has_an_effect),
    Rule(("group_sizing", "rollout", "training.updates_per_batch"), sizing_rules.sizes_fit_the_batch),
    Rule(("group_sizing", "rollout", "run.steps"), sizing_rules.sizes_show_stragglers),
    Rule(("group_sizing", "objective"), sizing_rules.shares_for_chance),
    Rule(("group_sizing", "rollout", "length_sorted", "objective"), sizing_rules.sizes_mean_something),
    Rule(("rollout.group_size", "rollout.dynamic_sampling", "objective"), objective_rules.groups_have_a_baseline),
    Rule(("objective",), objective_rules.clips),
    Rule(("objective",), objective_rules.reference_kl),
    Rule(("objective",), objective_rules.advantage_fields),
    Rule(("objective", "sampling.max_tokens"), objective_rules.overlong),
    Rule(("off_policy",), objective_rules.correction_bounds),
    Rule(("off_policy", "rollout.rounds"), objective_rules.corrections_have_work),
    Rule(("rewards.function", "rewards.name"), reward_rules.rewards_are_named),
    Rule(("rewards.weight", "rewards.shadow"), reward_rules.some_reward_counts),
    Rule(("rewards",), reward_rules.limits_fit),
    Rule(("rewards",), reward_rules.failures_have_one_meaning),
    Rule(("rewards", "reward_limits.combine", "objective"), reward_rules.combination),
    Rule(("rewards", "judge"), judge_rules.judges_are_there),
    Rule(("rewards", "judge"), judge_rules.questions_come_in_time),
    Rule(("rewards", "judge", "reward_limits"), judge_rules.batches_come_together),
    Rule(("judge",), judge_rules.judge_cores),
    Rule(("evaluation",), _evaluation),
    Rule(("evaluation.reward", "rewards"), _evaluated_reward),
    Rule(("evaluation.every", "evaluation.prompts", "checkpoint", "run.steps"), _checkpoints),
    Rule(("lora",), _lora),
    Rule(("training.updates_per_batch", "rollout.prompts_per_batch"), _updates),
    Rule(("training.device", "training.ranks", "training.optimizer"), _devices),
    Rule(("engines.dtype",), _engine_dtype),
    Rule(("engines.cores", "engines.count", "engines.sets"), _engine_cores),
    Rule((*_ROUNDS, "rollout", "group_sizing"), _in_flight),
    Rule(("engines.max_model_len", "sampling.max_tokens"), _engine_context),
    Rule((*_ROUNDS, "rollout.presubmit", "engines", "transport.engines"), _released_engines),
    Rule((*_ROUNDS, "rollout.presubmit", "engines", "transport.engines"), prepared_engine_sets),
    Rule(("engines",), engine_restarts),
    Rule(("engines",), batched_tokens),
    Rule(("engines.kind", "sampling.temperature"), sampling_temperature),
    Rule(("engines.kind", "evaluation.temperature"), evaluation_temperature),
    Rule(("transport",), transport_rules.external_needs_tcp),
    Rule(("transport",), transport_rules.hosts_are_named),
    Rule(("transport", "metrics.endpoint"), transport_rules.nothing_leaves_without_keys),
    Rule(("metrics.endpoint",), _metrics_endpoint),
)
