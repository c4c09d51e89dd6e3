"""Rules of ``[environment]``."""

from __future__ import annotations

from streamrl.base.host_addresses import is_wildcard
from streamrl.recipe.environment import ENVIRONMENT_REWARD, FORMS, TOOL_FORMATS, VLLM, Credit, Environment, command_of
from streamrl.recipe.rewards import COMBINE_WEIGHTS
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, names_are_unique, rule, unless
from streamrl.recipe.sections import Recipe

has_no_effect(
    " ".join(f"environment.{name}" for name in Environment.__struct_fields__ if name not in (*FORMS, "further")),
    unless(lambda recipe: recipe.environment.configured, f" without one of {', '.join(FORMS)}: name one, or remove it"),
)
has_no_effect(
    "environment.tool_format environment.tool_seconds environment.tool_characters",
    unless(lambda recipe: not recipe.environment.env, " with env, which calls no tools: remove it"),
)
has_no_effect(
    "environment.system environment.tool_seconds environment.tool_characters",
    unless(
        lambda recipe: not recipe.environment.agent,
        " with agent, which writes its own messages and runs its own tools: remove it",
    ),
)
has_no_effect(
    "environment.agent_tasks environment.agent_host environment.agent_address environment.limit_reward "
    "environment.late_reward",
    unless(
        lambda recipe: recipe.environment.has_agent or not recipe.environment.configured, " without an agent: remove it"
    ),
)


@rule("environment", "rewards", "reward_limits.combine", "objective")
def turns_can_have_credit(recipe: Recipe) -> Broken:
    """Credit of turns needs rewards of turns that are trained, and an objective with an advantage for each turn."""
    credit = recipe.environment.credit
    if not recipe.environment.configured or credit is Credit.TRAJECTORY:
        return
    surrogate = recipe.objective_settings.token_surrogate
    reasons = []
    if recipe.environment.has_agent:
        reasons.append("has no effect with agent, whose turns have no rewards: write an episode")
    if not any(
        reward.function == ENVIRONMENT_REWARD and not reward.shadow and reward.weight for reward in recipe.rewards
    ):
        reasons.append('divides the reward "environment", which is not trained: add it to [[rewards]]')
    if recipe.reward_limits.combine != COMBINE_WEIGHTS:
        reasons.append('divides a sum of rewards: set reward_limits.combine = "weights"')
    if surrogate.whole_sequences:
        remedy = 'set objective.surrogate = "token_clip"'
        reasons.append(f'is averaged out by surrogate = "{surrogate.name}": {remedy}')
    for reason in reasons:
        yield Problem("environment.credit", f'"{credit}" {reason}, or set credit = "trajectory"')


@rule("environment", "rewards")
def environment_is_one(recipe: Recipe) -> Broken:
    """Environments need code and unique names; the reward "environment" needs an environment."""
    yield from names_are_unique("environment.further", [other.name for other in recipe.environment.further])
    for name, environment in recipe.environment.by_name.items():
        path = recipe.environment.path_of(name)
        yield from _problems_of_code(path, environment)
        if recipe.environment.further and not environment.configured:
            yield Problem(path, f"has none of {', '.join(FORMS)}, and there are several environments: name one")
    for index, reward in enumerate(recipe.rewards):
        if reward.function == ENVIRONMENT_REWARD and not recipe.environment.configured:
            yield Problem(
                f"rewards.{index}.function",
                f'"{reward.function}" is what an environment returns, and the recipe has none: add [environment], or '
                "name another reward",
            )


def _problems_of_code(path: str, environment: Environment) -> Broken:
    """An environment must have one form with a valid name."""
    forms = [form for form in FORMS if getattr(environment, form)]
    if len(forms) > 1:
        yield Problem(path, f"has {' and '.join(forms)}: an environment is one of them, so remove the others")
    specs = {"episode": environment.episode, "env": environment.env}
    specs |= {f"tools.{index}": tool for index, tool in enumerate(environment.tools) if not command_of(tool)}
    for key, spec in specs.items():
        module, colon, name = spec.rpartition(":")
        if spec and not (module and colon and name.isidentifier()):
            yield Problem(
                f"{path}.{key}",
                f'"{spec}" names no object: write "module:name" or "path/to/file.py:name", or of a tool "mcp:COMMAND"',
            )
    if environment.tool_format not in ("auto", *TOOL_FORMATS) and not environment.tool_format.startswith(VLLM):
        yield Problem(
            f"{path}.tool_format",
            f'"{environment.tool_format}" is no format: write one of auto, {", ".join(TOOL_FORMATS)}, or vllm:PARSER',
        )


@rule("environment")
def agents_have_an_address(recipe: Recipe) -> Broken:
    """Agents need an address that they can reach: one at which the endpoint only listens is none."""
    environment = recipe.environment
    if is_wildcard(environment.agent_host) and not environment.agent_address:
        yield Problem(
            "environment.agent_address",
            f'is empty, and agent_host = "{environment.agent_host}" is no address that agents can reach: name one '
            "by which agents reach this host, such as host.docker.internal",
        )


@rule("environment", "sampling.max_tokens", "engines.max_model_len")
def conversations_fit(recipe: Recipe) -> Broken:
    """A conversation must have room for a turn, and an engine for a conversation."""
    conversation = recipe.environment.max_tokens
    turn = recipe.sampling.max_tokens
    context = recipe.engines.max_model_len
    if not recipe.environment.configured:
        return
    if conversation <= turn:
        yield Problem(
            "environment.max_tokens",
            f"{conversation} of a whole conversation leaves no room beside one turn of sampling.max_tokens = {turn}: "
            "raise it, or lower sampling.max_tokens",
        )
    if 0 < context < conversation:
        yield Problem(
            "engines.max_model_len",
            f"{context} is less than environment.max_tokens = {conversation} of a conversation: raise it, or set 0 "
            "(derived)",
        )
