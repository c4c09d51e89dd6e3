"""Rules of the run itself: its name, training, evaluation, checkpoints, metrics."""

from __future__ import annotations

import math
import re

from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import OptimizerKind, Recipe

DEVICES = ("auto", "cpu", "cuda")
LONGEST_RUN_NAME = 45
"""The journal takes 64 bytes, and ``-YYYYMMDD-HHMMSS-NN`` follows the name."""
MOST_IN_FLIGHT = 1 << 20

has_no_effect(
    "evaluation.limit",
    lambda r: (
        ""
        if r.evaluation.every
        else " while evaluation.every = 0, because start and end take all prompts: remove it, or set every"
    ),
)
has_no_effect(
    "checkpoint.keep_best checkpoint.keep_every",
    lambda r: "" if r.checkpoint.every else " while checkpoint.every = 0: remove it, or set every",
)
has_no_effect(
    "lora.alpha lora.targets",
    lambda r: "" if r.lora.rank else " while lora.rank = 0: remove it, or set rank, such as 16",
)


@rule("evaluation")
def evaluation(recipe: Recipe) -> Broken:
    evaluation = recipe.evaluation
    for name, value, unset in (("every", evaluation.every, 0), ("samples", evaluation.samples, 1)):
        if value > unset and not evaluation.prompts:
            yield Problem(
                "evaluation.prompts",
                f"is empty, but evaluation.{name} = {value}: name held-out prompts, or set {name} = {unset}",
            )


@rule("evaluation.reward", "rewards")
def evaluated_reward(recipe: Recipe) -> Broken:
    name, labels = recipe.evaluation.reward, [reward.label for reward in recipe.rewards]
    if name and name not in labels:
        yield Problem("evaluation.reward", f'"{name}" is no reward of this recipe: write one of {", ".join(labels)}')


@rule("training.updates_per_batch", "rollout", "length_sorted.single")
def updates(recipe: Recipe) -> Broken:
    updates, rollout = recipe.training.updates_per_batch, recipe.rollout
    single = rollout.rounds is RoundKind.LENGTH_SORTED and recipe.length_sorted.single
    groups = rollout.prompts_per_batch * (rollout.group_size if single else 1)
    if updates > groups:
        what = "single trajectories" if single else "groups"
        yield Problem(
            "training.updates_per_batch",
            f"{updates} steps do not fit a batch of {groups} {what}, since each step trains its share of them: set "
            f"{groups} or less",
        )


@rule("evaluation.every", "evaluation.prompts", "checkpoint", "run.steps")
def checkpoints(recipe: Recipe) -> Broken:
    checkpoint = recipe.checkpoint
    if checkpoint.keep_best and not (recipe.evaluation.prompts and recipe.evaluation.every):
        yield Problem(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} needs held-out scores: set evaluation.prompts and evaluation.every, "
            "or keep_best = 0",
        )
    elif checkpoint.keep_best and math.lcm(checkpoint.every, recipe.evaluation.every) > recipe.run.steps:
        yield Problem(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} has nothing to compare: no step is both a multiple of checkpoint.every = "
            f"{checkpoint.every} and of evaluation.every = {recipe.evaluation.every}; set one to a multiple of the "
            "other",
        )
    if checkpoint.every and checkpoint.keep_every % checkpoint.every:
        yield Problem(
            "checkpoint.keep_every",
            f"{checkpoint.keep_every} is no multiple of checkpoint.every = {checkpoint.every}, so not every such "
            "step is written: set it to a multiple",
        )


@rule("training.device", "training.ranks", "training.optimizer")
def devices(recipe: Recipe) -> Broken:
    device = recipe.training.device
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        yield Problem(
            "training.device",
            f'"{device}" is not allowed: must be one of "auto", "cpu", "cuda", "cuda:0", "cuda:1", ...',
        )
    if device == "cpu" and recipe.training.optimizer is OptimizerKind.ADAMW_OFFLOADED:
        yield Problem(
            "training.optimizer",
            '"adamw_offloaded" has no effect on device = "cpu", where everything is in host memory: '
            'set optimizer = "adamw"',
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout", "group_sizing")
def in_flight(recipe: Recipe) -> Broken:
    if recipe.max_in_flight > MOST_IN_FLIGHT:
        yield Problem(
            "rollout",
            f"{recipe.max_in_flight} completions would be in flight at once, at most {MOST_IN_FLIGHT}: lower "
            "prompts_per_batch, group_size or max_staleness",
        )


@rule("metrics.endpoint")
def metrics_endpoint(recipe: Recipe) -> Broken:
    endpoint = recipe.metrics.endpoint
    if endpoint and not re.fullmatch(r"ipc://.+|tcp://[^:]+:\d+", endpoint):
        yield Problem(
            "metrics.endpoint",
            f'"{endpoint}" is not an endpoint: write "tcp://127.0.0.1:5690" or "ipc:///path/socket", or leave it empty',
        )


@rule("run.name")
def run_name(recipe: Recipe) -> Broken:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.run.name):
        yield Problem("run.name", f'"{recipe.run.name}" cannot name a directory: use letters, digits, ".", "_" and "-"')
    elif len(recipe.run.name) > LONGEST_RUN_NAME:
        yield Problem(
            "run.name", f'"{recipe.run.name}" is longer than {LONGEST_RUN_NAME} characters: choose a shorter one'
        )
