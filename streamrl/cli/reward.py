"""``streamrl reward test FUNCTION --prompts FILE``: one reward on completions from a file or from an engine. The reward
runs as in a training run: in child processes of the same kind, with the same limits and checks of its results. The
command's own process prints the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.types import Prompt
from streamrl.cli.command import Argument, print_json, recipe_file
from streamrl.cli.control import FunctionName, RewardOptions
from streamrl.cli.run_for_report import run_for_report
from streamrl.cli.try_rewards.trial_completions import PlainText, groups_from_engine, groups_from_file
from streamrl.cli.try_rewards.trial_report import RewardReport, rich_report, summarize
from streamrl.cli.try_rewards.trial_scoring import say, score_groups
from streamrl.observe.terminal.console import open_console
from streamrl.prepare.hub.resolution import recipe_around, with_hub_folders, with_hub_prompts
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.rules.load_recipe import load_recipe, resolve_function
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.signature import RewardSignature, needed_columns
from streamrl.run.prompts.open_prompts import missing_columns, open_prompts

ModelPath = Annotated[Path | None, Argument("sample them from this model directory with vLLM", metavar="MODEL")]


class Test(RewardOptions, frozen=True, kw_only=True):
    """Score completions with one reward as a run would, and print what came of it. They come from a file, from a model,
    or from a recipe (default: recipe.toml here)."""

    function: FunctionName
    prompts: Annotated[str, Argument("what prompts.train of a recipe may say", metavar="PROMPTS")]
    prompt_count: Annotated[int, Argument("prompts (default 32)", metavar="N", flag="-n")] = 32
    completions: Annotated[
        Path | None, Argument('JSONL: "completion" with "prompt_id" or "prompt"', metavar="FILE")
    ] = None
    engine: ModelPath = None
    recipe: Annotated[Path | None, Argument("sample them as this recipe does", metavar="RECIPE")] = None
    samples: Annotated[int, Argument("sampled completions of a prompt (8)", metavar="G")] = 8
    max_tokens: Annotated[int | None, Argument("of one (default: the recipe's, else 512)", metavar="N")] = None
    temperature: Annotated[float | None, Argument("of sampling (default: the recipe's, else 1)", metavar="T")] = None
    tokenizer: Annotated[Path | None, Argument("for token_ids of completions from a file", metavar="MODEL")] = None

    def run(self) -> int:
        """1 when no completion got a value."""
        reward = _reward(self)
        report = run_for_report(lambda: _run(self, reward))
        if self.json:
            print_json(report)
        else:
            open_console(soft_wrap=True).print(rich_report(report, self.prompts))
        return 0 if report.scored else 1


def _reward(request: Test) -> Reward:
    if sum(flag is not None for flag in (request.completions, request.engine, request.recipe)) > 1:
        raise RecipeError("--completions, --engine and --recipe: give one of them")
    if min(request.timeout, request.memory, request.prompt_count, request.samples) <= 0:
        raise RecipeError("-n, --samples, --timeout and --memory must be above 0: correct them")
    reward = request.reward(request.function)
    return replace(reward, function=resolve_function(reward.function, Path.cwd()))


async def _run(request: Test, reward: Reward) -> RewardReport:
    signature = _signature(reward)
    columns = needed_columns([signature])
    recipe = None if request.completions is not None else _sampling_recipe(request)
    model = request.tokenizer if recipe is None else recipe.model.path
    tokenizer: Tokenizer = load_tokenizer(model) if model is not None else PlainText()
    source = open_prompts(with_hub_prompts(request.prompts), tokenizer, seed=0, shuffle=False)
    try:
        if recipe is None:
            assert request.completions is not None, "without completions there is a recipe"
            groups = await groups_from_file(request.completions, source, request.prompt_count, tokenizer)
            _require_columns(request, [group.prompt for group in groups], columns)
        else:
            prompts = await source.draw(min(request.prompt_count, source.size or request.prompt_count))
            _require_columns(request, prompts, columns)
            say(f"starting {recipe.model.path}: {len(prompts)} prompts x {request.samples} completions")
            groups, _ = await groups_from_engine(recipe, prompts, request.samples)
    finally:
        await source.aclose()
    outcomes, seconds = await score_groups([reward], RewardLimits(), groups, tokenizer)
    bytes_for_tokens = model is None and "token_ids" in signature.provided
    return summarize(reward.label, outcomes, groups, seconds, tokenizer=tokenizer, bytes_for_tokens=bytes_for_tokens)


def _sampling_recipe(request: Test) -> Recipe:
    """Return the recipe for sampling: the named recipe, or one made for just a model. Raises ``RecipeError``."""
    local_recipe = Path("recipe.toml")
    if request.engine is not None:
        recipe = recipe_around(model=str(request.engine))
    elif request.recipe is not None or local_recipe.is_file():
        recipe = load_recipe(recipe_file(request.recipe or local_recipe))
    else:
        remedy = "name --completions FILE, --engine MODEL or --recipe RECIPE"
        raise RecipeError(f"there is nothing to score: {remedy}, or start this in a directory with a recipe.toml")
    flags = {"max_tokens": request.max_tokens, "temperature": request.temperature}
    overrides = {name: value for name, value in flags.items() if value is not None}
    if any(value <= 0 for value in overrides.values()):
        raise RecipeError("--max-tokens and --temperature must be above 0: correct them")
    return with_hub_folders(replace(recipe, sampling=replace(recipe.sampling, **overrides)))


def _signature(reward: Reward) -> RewardSignature:
    """Read the signature in a child process, so that this process imports no user code. Raises ``RecipeError``."""
    (inspection,) = inspect_in_subprocess([reward])
    if inspection.signature is None:
        raise RecipeError(*inspection.problems)
    return inspection.signature


def _require_columns(request: Test, prompts: Sequence[Prompt], columns: Mapping[str, Sequence[str]]) -> None:
    if not prompts:
        raise RecipeError(f"prompts {request.prompts} is empty: add rows")
    for number, prompt in enumerate(prompts, start=1):
        if missing := missing_columns(prompt, columns):
            raise RecipeError(*(f"prompts {request.prompts}, prompt {number} {line}" for line in missing))
