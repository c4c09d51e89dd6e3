"""Rules of ``[environment]``."""

from __future__ import annotations

from streamrl.recipe.environment import ENVIRONMENT_REWARD, FORMS, TOOL_FORMATS, VLLM, Credit, Environment, command_of
from streamrl.recipe.rewards import COMBINE_WEIGHTS
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, rule
from streamrl.recipe.sections import Recipe

has_no_effect(
    " ".join(f"environment.{name}" for name in Environment.__struct_fields__ if name not in FORMS),
    lambda r: "" if r.environment.given else f" without one of {', '.join(FORMS)}: name one, or remove it",
)
has_no_effect(
    "environment.tool_format environment.tool_seconds environment.tool_characters",
    lambda r: "" if not r.environment.env else " with env, which calls no tools: remove it",
)
has_no_effect(
    "environment.system environment.tool_seconds environment.tool_characters",
    lambda r: (
        ""
        if not r.environment.agent
        else " with agent, which writes its own messages and runs its own tools: remove it"
    ),
)
has_no_effect(
    "environment.agent_tasks environment.agent_variables",
    lambda r: "" if r.environment.agent or not r.environment.given else " without an agent: remove it",
)


@rule("environment", "rewards", "reward_limits.combine", "objective")
def turns_can_have_credit(recipe: Recipe) -> Broken:
    """Turns have parts of the reward, and the objective an advantage for each of them."""
    credit = recipe.environment.credit
    surrogate = recipe.objective_settings.token_surrogate
    untrained = all(one.function != ENVIRONMENT_REWARD or one.shadow or not one.weight for one in recipe.rewards)
    separate = recipe.reward_limits.combine != COMBINE_WEIGHTS
    one_ratio = surrogate.whole_sequences
    reasons = [
        recipe.environment.agent and "has no effect with agent, whose turns have no rewards: write an episode",
        untrained and 'divides the reward "environment", which is not trained: add it to [[rewards]]',
        separate and 'divides a sum of rewards: set reward_limits.combine = "weights"',
        one_ratio and f'is averaged out by surrogate = "{surrogate.name}": set objective.surrogate = "token_clip"',
    ]
    for reason in filter(None, reasons if recipe.environment.given and credit is not Credit.TRAJECTORY else ()):
        yield Problem("environment.credit", f'"{credit}" {reason}, or set credit = "trajectory"')


@rule("environment", "rewards")
def environment_is_one(recipe: Recipe) -> Broken:
    """An environment has one form, and names what it needs."""
    environment = recipe.environment
    given = [form for form in FORMS if getattr(environment, form)]
    if len(given) > 1:
        yield Problem("environment", f"has {' and '.join(given)}: an environment is one of them, so remove the others")
    named = {"episode": environment.episode, "env": environment.env}
    named |= {f"tools.{place}": tool for place, tool in enumerate(environment.tools) if not command_of(tool)}
    for place, spec in named.items():
        module, colon, name = spec.rpartition(":")
        if spec and not (module and colon and name.isidentifier()):
            yield Problem(
                f"environment.{place}",
                f'"{spec}" names no object: write "module:name" or "path/to/file.py:name", or of a tool "mcp:COMMAND"',
            )
    if environment.tool_format not in ("auto", *TOOL_FORMATS) and not environment.tool_format.startswith(VLLM):
        yield Problem(
            "environment.tool_format",
            f'"{environment.tool_format}" is no format: write one of auto, {", ".join(TOOL_FORMATS)}, or vllm:PARSER',
        )
    for index, reward in enumerate(recipe.rewards):
        if reward.function == ENVIRONMENT_REWARD and not environment.given:
            yield Problem(
                f"rewards.{index}.function",
                f'"{reward.function}" is what an environment returns, and the recipe has none: add [environment], or '
                "name another reward",
            )


@rule("environment", "sampling.max_tokens", "engines.max_model_len")
def conversations_fit(recipe: Recipe) -> Broken:
    """A conversation has room for a turn, and the engines for a conversation."""
    most = recipe.environment.max_tokens
    turn = recipe.sampling.max_tokens
    context = recipe.engines.max_model_len
    if not recipe.environment.given:
        return
    if most <= turn:
        yield Problem(
            "environment.max_tokens",
            f"{most} of a whole conversation leaves no room beside one turn of sampling.max_tokens = {turn}: raise it, "
            "or lower sampling.max_tokens",
        )
    if 0 < context < most:
        yield Problem(
            "engines.max_model_len",
            f"{context} is less than environment.max_tokens = {most} of a conversation: raise it, or set 0 (derived)",
        )
