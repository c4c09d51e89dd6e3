"""``streamrl try RECIPE``: completions of the recipe's own engine under its own rewards, before any training.
The command's own process samples, scores and reports; the engine, the rewards and the measured step are child
processes. ``try_recipe`` is also the Python interface."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from streamrl.base.atomic_files import write_durable
from streamrl.base.errors import RecipeError
from streamrl.base.types import FinishReason, JsonMapping, Prompt, Texts
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, print_json, recipe_file, refuse_no_folder
from streamrl.cli.run_for_report import run_for_report
from streamrl.cli.try_rewards.recipe_report import (
    RecipeTrial,
    advice_of,
    proposed_rate,
    report_page,
    rich_trial,
    trials_of_sets,
)
from streamrl.cli.try_rewards.trial_completions import groups_from_engine
from streamrl.cli.try_rewards.trial_report import histogram, spread, summarize
from streamrl.cli.try_rewards.trial_scoring import say, score_groups
from streamrl.control.mixture import sets_in_turn
from streamrl.observe.terminal.console import open_console
from streamrl.prepare.first_prompt import first_prompt_lines
from streamrl.prepare.gpu_placement import gpu_placement
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.measured_step import measure_step
from streamrl.prepare.memory import estimate_memory, gib
from streamrl.prepare.preflight import CheckedModel, check_model, preflight
from streamrl.pretrained.tokenizer import Tokenizer, chat_format, load_tokenizer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.served_models import asks_own_judge
from streamrl.run.prompts.prompt_sets import open_training_sets
from streamrl.run.prompts.prompt_spec import environment_writes
from streamrl.run.prompts.row_notes import RowNotes

STEP_TIMEOUT_S = 900.0
_SHOWN_TIMES = 8


class Try(Command, frozen=True):
    """Try a recipe before any training: sample completions as it says, score them with its rewards, measure a step, and
    say what to change. Nothing is kept but the page that is asked for."""

    recipe: RecipePath
    overrides: Overrides = ()
    completions: Annotated[int, Argument("to sample, in groups of rollout.group_size (default 64)", metavar="N")] = 64
    page: Annotated[Path | None, Argument("also write the report as one HTML page", metavar="FILE")] = None
    sampling_only: Annotated[bool, Argument("measure no training step")] = False

    def run(self) -> int:
        """1 when no completion got a value."""
        refuse_no_folder("--page", self.page)
        trial = run_for_report(self._try)
        if self.page is not None:
            write_durable(self.page, report_page(trial).encode())
        if self.json:
            print_json(trial)
        else:
            open_console(soft_wrap=True).print(rich_trial(trial))
        return 0 if trial.reward.scored else 1

    async def _try(self) -> RecipeTrial:
        recipe = load_recipe(recipe_file(self.recipe), self.overrides)
        return await try_recipe(recipe, self.completions, measure_training=not self.sampling_only)


async def try_recipe(
    recipe: Recipe | str | Path | JsonMapping, completions: int = 64, *, measure_training: bool = True
) -> RecipeTrial:
    """Report on ``completions`` completions of a recipe, in groups of its ``rollout.group_size``. An engine, the
    rewards' processes and a trainer rank are started one after the other, and ended. Progress goes to stderr. The judge
    that a run of the recipe would start is not started; rewards that call it are left out.

    Raises ``RecipeError`` for what the dry run finds, ``EngineError`` when the engine does not start or dies."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    rewards = _rewards_to_try(recipe, completions)
    size = recipe.rollout.group_size
    recipe = await asyncio.to_thread(with_hub_folders, recipe)
    notes: dict[str, RowNotes] = {}
    preflight(recipe, notes=notes)
    train = recipe.prompts.train
    if not isinstance(train, str):
        train = {name: part for name, part in recipe.prompts.sets.items() if not environment_writes(recipe, part)}
        if len(train) < len(recipe.prompts.sets):
            say(f"only {', '.join(train)} are tried: the other sets have episodes of [environment]")
        recipe = replace(recipe, prompts=replace(recipe.prompts, train=train))
    model = check_model(recipe)
    tokenizer = load_tokenizer(recipe.model.path)
    prompts = await _draw(recipe, tokenizer, completions // size)
    total = len(prompts) * size
    say(f"starting an engine of {recipe.model.path}: {len(prompts)} prompts x {size} completions")

    def progress(sampled_count: int) -> None:
        if not sampled_count:
            say("the engine is ready")
        elif sampled_count % max(1, total // _SHOWN_TIMES) == 0 or sampled_count == total:
            say(f"{sampled_count} of {total} completions sampled")

    groups, sampling_s = await groups_from_engine(recipe, prompts, size, progress)
    outcomes, scoring_s = await score_groups(rewards, recipe.reward_limits, groups, tokenizer)
    training = None
    if measure_training:
        say("measuring a training step in a process of its own, which loads torch and the model")
        trajectories = [group.trajectories for group in groups]
        training = await asyncio.to_thread(measure_step, recipe, trajectories, STEP_TIMEOUT_S)
    all_trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    lengths = [trajectory.generated_tokens for trajectory in all_trajectories]
    first_prompt = next((note.first for note in notes.values() if note.first and note.first.token_ids), prompts[0])
    length_spread = spread(lengths)
    batch = recipe.batch_trajectories
    step_training_s = None
    if training and not training.problem:
        step_training_s = training.seconds * batch / total / recipe.training.ranks
    assert length_spread is not None, "a trial has completions"
    label = ", ".join(reward.label for reward in rewards)
    rate, reason = proposed_rate(recipe, model.facts.parameters)
    trial = RecipeTrial(
        recipe=f"{recipe.run.name}: {recipe.model.path}",
        parameters=model.facts.parameters,
        prompts=", ".join(training_set.prompts for training_set in recipe.prompts.sets.values()),
        prompt=tuple(first_prompt_lines(first_prompt, tokenizer)),
        reward=summarize(label, outcomes, groups, scoring_s, tokenizer=tokenizer),
        lengths=length_spread,
        length_histogram=histogram(lengths),
        truncated=sum(trajectory.finish_reason is FinishReason.LENGTH for trajectory in all_trajectories),
        max_tokens=recipe.sampling.max_tokens,
        sampling_s=sampling_s,
        training=training,
        step_trajectories=batch,
        # Never below the measured time, which the longest completion bounds.
        step_sampling_s=sampling_s * max(1.0, batch / total / recipe.engines.count),
        step_training_s=step_training_s,
        memory=_memory(recipe, model),
        learning_rate=rate,
        rate_reason=reason,
        sets=tuple(trials_of_sets(recipe, [outcome for group in outcomes for outcome in group])),
    )
    columns = first_prompt.columns
    plain_text = isinstance(columns.get("prompt"), str) and columns.get("messages") is None
    unused_template = plain_text and bool(chat_format(recipe.model.path).templates)
    return replace(trial, advice=tuple(advice_of(trial, recipe, unused_template=unused_template)))


def _rewards_to_try(recipe: Recipe, completions: int) -> list[Reward]:
    """Return the rewards of ``recipe`` that can be called without a run. Raises ``RecipeError`` for a recipe or a
    number of ``completions`` that cannot be tried."""
    size = recipe.rollout.group_size
    if completions < size:
        raise RecipeError(
            f"--completions {completions}: a group has {size} (rollout.group_size): give as many at least"
        )
    if all(environment_writes(recipe, training_set) for training_set in recipe.prompts.sets.values()):
        raise RecipeError(
            "environment: `try` samples single completions, and this recipe has an environment: run a step of it "
            "(run.steps=1), and look at it with `streamrl samples`"
        )
    rewards = [reward for reward in recipe.rewards if not asks_own_judge(reward)]
    if len(rewards) < len(recipe.rewards):
        say("the run's own judge is not started: rewards that ask it are left out")
    if not rewards:
        raise RecipeError("all rewards ask the run's own judge, which `try` does not start: name an endpoint of it")
    return rewards


async def _draw(recipe: Recipe, tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """The first prompts of a run of ``recipe``, as many as there are."""
    source = open_training_sets(recipe, tokenizer, {})
    count = min(count, source.size or count)
    try:
        return await source.draw(count, sets_in_turn({}, recipe.prompts.shares, count))
    finally:
        await source.aclose()


def _memory(recipe: Recipe, model: CheckedModel) -> Texts:
    if lines := gpu_placement(recipe).lines():
        return tuple(line.strip() for line in lines)
    estimate = estimate_memory(recipe, model.facts, model.context)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in estimate.items())
    return (f"{gib(sum(estimate.values()))} of this host: {parts}",)
