"""The forms of an environment, each as an episode: ``episode``, ``env``, ``tools`` and ``agent`` of the recipe."""

from __future__ import annotations

import inspect
import numbers
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.recipe.environment import VLLM, Environment, command_of, with_run_python
from streamrl.recipe.user_code import load_user_object
from streamrl.run.environments.agent_process import AgentFailedError, Agents
from streamrl.run.environments.chat import EpisodePolicy, Said
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_session import EndpointSession
from streamrl.run.environments.tools import TakenColumns, Tool, ToolBox, ToolLimits, call_user
from streamrl.run.environments.turns import EpisodeLimit

UserEpisode = Callable[[EpisodePolicy, Mapping[str, Any]], Awaitable[Any]]
"""Runs one episode with the columns of its row; what it returns is the reward, or None."""


def load_episode(
    environment: Environment,
    chat_model: ChatModel | None = None,
    agents: Agents | None = None,
    served: Sequence[Tool] | None = None,
) -> tuple[UserEpisode, tuple[str, ...]]:
    """Load what ``environment`` names: the episode, and the columns that it cannot do without. ``chat_model`` and
    ``agents`` may be missing where no episode is run; without ``served``, tools of MCP servers, these are started,
    asked and ended. Raises ``RecipeError`` with every problem."""
    if chat_model is not None and (environment.tools or environment.tool_format.startswith(VLLM)):
        chat_model.call_reader(())  # now, and not in the first episode
    if environment.episode:
        return _episode(environment.episode)
    if environment.env:
        return _env(environment.env)
    if environment.agent:
        return _agent(with_run_python(environment.agent), agents), ()
    limits = ToolLimits(environment.tool_seconds, environment.tool_characters)
    own = [load_user_object(spec) for spec in environment.tools if not command_of(spec)]
    if environment.servers and served is None:
        from streamrl.run.environments.mcp_tools import list_tools

        served = list_tools(environment.servers)
    box = ToolBox([*own, *(served or ())], limits)
    return _tools(box), ()


def _episode(spec: str) -> tuple[UserEpisode, tuple[str, ...]]:
    function = load_user_object(spec)
    if not inspect.iscoroutinefunction(function):
        raise RecipeError(
            f'environment.episode: "{spec}" is no coroutine function: write async def episode(model, ...)'
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise RecipeError(f'environment.episode: "{spec}" takes no model: write async def episode(model, **columns)')
    taken = TakenColumns(function, 1)

    async def episode(model: EpisodePolicy, columns: Mapping[str, Any]) -> Any:
        returned = await function(model, **taken.of(columns, model.prompt_seed))
        if not model.turn_rewards or not isinstance(returned, numbers.Real | None):
            return returned
        return sum(model.turn_rewards.values()) + (returned or 0.0)

    return episode, taken.needed


def _env(spec: str) -> tuple[UserEpisode, tuple[str, ...]]:
    make = load_user_object(spec)
    missing = [name for name in ("reset", "step") if inspect.isclass(make) and not hasattr(make, name)]
    if missing or not callable(make):
        what = f"has no {' and no '.join(missing)}" if missing else "cannot be called"
        raise RecipeError(
            f'environment.env: "{spec}" {what}: name a class with reset(**columns) and step(text), or a function that '
            "returns such an object"
        )
    needed = TakenColumns(make.reset, 1).needed if inspect.isclass(make) else ()

    async def episode(model: EpisodePolicy, columns: Mapping[str, Any]) -> float:
        env = await call_user(make)
        if hasattr(env, "close"):
            model.at_end(env.close)
        return await _play(model, env, TakenColumns(env.reset).of(columns, model.prompt_seed))

    return episode, needed


async def _play(model: EpisodePolicy, env: Any, arguments: Mapping[str, Any]) -> float:
    """Play until the environment ends, or a limit: the sum of its rewards."""
    observation = await call_user(env.reset, **arguments)
    if isinstance(observation, tuple):  # Gymnasium's, with an info
        observation = observation[0]
    chat = model.chat()
    total = 0.0
    while True:
        try:
            reply = await chat.say(_said(observation))
        except EpisodeLimit:
            return total
        answer = await call_user(env.step, reply.text)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise TypeError("step returns (observation, reward, terminated, truncated, info): return all five")
        observation, reward, terminated, truncated, _ = answer
        model.reward(reply, reward)
        total += float(reward)
        if terminated or truncated:
            return total


def _said(observation: Any) -> Said:
    return observation if isinstance(observation, str | Mapping | Sequence) else str(observation)


def _tools(box: ToolBox) -> UserEpisode:
    async def episode(model: EpisodePolicy, columns: Mapping[str, Any]) -> float | None:
        chat = model.chat(tools=box)
        tools = await chat.open_tools(columns)
        try:
            reply = await chat.say(_first(columns, tools.opening))
            while (asked := reply).ended and (reply.calls or reply.problem):
                before = tools.reward or 0.0
                try:
                    reply = await chat.run_tools(asked)
                finally:
                    model.reward(asked, (tools.reward or 0.0) - before)
        except EpisodeLimit:
            pass  # trained as it is
        return tools.reward

    return episode


def _first(columns: Mapping[str, Any], opening: str) -> Said:
    """The messages of a row, and after them what classes of tools said when they were reset."""
    messages = columns.get("messages")
    said: list[Any] = list(messages) if messages else [{"role": "user", "content": str(columns.get("prompt", ""))}]
    if opening:
        said[-1] = {**said[-1], "content": f"{said[-1].get('content', '')}{opening}"}
    if not messages and not said[-1]["content"]:
        raise ValueError('the row has no column "prompt" or "messages", and no tool wrote one when it was reset')
    return said


def _agent(command: Sequence[str], agents: Agents | None) -> UserEpisode:
    if shutil.which(command[0]) is None:
        raise RecipeError(f'environment.agent: there is no program "{command[0]}": correct it, or install it')

    async def episode(model: EpisodePolicy, columns: Mapping[str, Any]) -> float | None:
        assert agents is not None, "there are agents where episodes are run"
        session = EndpointSession(secrets.token_hex(16), model.turns, model.chat_model)
        try:
            return await agents.run(session, columns)
        except AgentFailedError:
            if model.turns.finish is None:
                raise
            return None  # its harness gave up at a limit
        finally:
            model.notes.update({name.replace("/", "_"): count for name, count in session.figures.items()})

    return episode
