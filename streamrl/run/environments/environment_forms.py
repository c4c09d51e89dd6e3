"""The forms of an environment: ``episode``, ``env``, ``tools`` and ``agent`` of the recipe. Each becomes a coroutine
function that runs one episode.

``worker.py`` loads the form in the process of the environment worker and calls it for each episode;
``prepare/recipe_probe.py`` loads it before the start of a run, to check the user's code."""

from __future__ import annotations

import inspect
import numbers
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping, Texts
from streamrl.recipe.environment import VLLM, Environment, command_of, with_run_python
from streamrl.recipe.user_code import LASTING_ERRORS, describe_error, load_user_object
from streamrl.run.environments.agent_process import AgentFailedError, Agents
from streamrl.run.environments.agents.printed_reward import PrintedReward
from streamrl.run.environments.chat import ChatInput, EpisodePolicy
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_server import listening_socket
from streamrl.run.environments.endpoint_session import EndpointSession
from streamrl.run.environments.tools import ColumnParameters, Tool, ToolBox, ToolLimits, UserThread
from streamrl.run.environments.turns import EpisodeLimit

UserEpisode = Callable[[EpisodePolicy, JsonMapping], Awaitable[Any]]
"""Runs one episode with the columns of its row, and returns the reward or None."""


def load_episode(
    environment: Environment,
    chat_model: ChatModel | None = None,
    agents: Agents | None = None,
    server_tools: Sequence[Tool] = (),
) -> tuple[UserEpisode, Texts]:
    """Load the user's code, and return the episode and the columns that it requires. Raises ``RecipeError`` with every
    problem.

    ``chat_model``: model, which checks the format of calls; only episodes that are run need it;
    ``agents``: programs of the form ``agent``; only episodes that are run need them;
    ``server_tools``: tools of the MCP servers."""
    if chat_model is not None and (environment.tools or environment.tool_format.startswith(VLLM)):
        chat_model.call_reader(())  # a wrong format is refused here, and not in the first episode
    if environment.episode:
        return _episode(environment.episode)
    if environment.env:
        return _env(environment.env)
    if environment.agent:
        return _agent(environment, agents), ()
    return partial(_call_tools, load_tools(environment, server_tools)), ()


def load_tools(environment: Environment, server_tools: Sequence[Tool]) -> ToolBox:
    """Load the tools of an environment. ``server_tools``: tools of the MCP servers. Raises ``RecipeError``."""
    limits = ToolLimits(environment.tool_seconds, environment.tool_characters)
    user_tools = [load_user_object(spec) for spec in environment.tools if not command_of(spec)]
    return ToolBox([*user_tools, *server_tools], limits)


async def try_objects(environment: Environment) -> None:
    """Make each object of the user's code that every episode makes, and close it. Raises ``RecipeError`` where no
    episode can; other failures may pass, or concern this host alone."""
    specs = [spec for spec in (environment.env, *environment.tools) if spec and not command_of(spec)]
    for spec in specs:
        make: Any = load_user_object(spec)
        if spec != environment.env and not inspect.isclass(make):
            continue
        thread = UserThread()
        try:
            instance = await thread.call(make)
            if hasattr(instance, "close"):
                await thread.call(instance.close)
        except Exception as error:  # user code
            if isinstance(error, LASTING_ERRORS):
                problem = f'"{spec}" cannot be made, as every trajectory would make it: {describe_error(error)}'
                raise RecipeError(f"{problem}: it is called without arguments") from error
        finally:
            thread.close()


def _episode(spec: str) -> tuple[UserEpisode, Texts]:
    function = load_user_object(spec)
    if not inspect.iscoroutinefunction(function):
        raise RecipeError(
            f'environment.episode: "{spec}" is no coroutine function: write async def episode(model, ...)'
        )
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        raise RecipeError(f'environment.episode: "{spec}" takes no model: write async def episode(model, **columns)')
    column_parameters = ColumnParameters(function, skip=1)

    async def episode(model: EpisodePolicy, columns: JsonMapping) -> Any:
        reward = await function(model, **column_parameters.arguments(columns, model.prompt_seed))
        if not model.turn_rewards or not isinstance(reward, numbers.Real | None):
            return reward
        return sum(model.turn_rewards.values()) + (reward or 0.0)

    return episode, column_parameters.required


def _env(spec: str) -> tuple[UserEpisode, Texts]:
    make = load_user_object(spec)
    missing = [name for name in ("reset", "step") if inspect.isclass(make) and not hasattr(make, name)]
    if missing or not callable(make):
        problem = f"has no {' and no '.join(missing)}" if missing else "cannot be called"
        raise RecipeError(
            f'environment.env: "{spec}" {problem}: name a class with reset(**columns) and step(text), or a function '
            "that returns such an object"
        )
    required: Texts = ()
    if inspect.isclass(make):  # the object that a function returns is not known before the first episode
        required = ColumnParameters(make.reset, skip=1).required  # skips self
    return partial(_play, make), required


async def _play(make: Callable[[], Any], model: EpisodePolicy, columns: JsonMapping) -> float:
    """Play until the environment ends or a limit is met. Return the sum of the rewards of all steps."""
    thread = UserThread()
    model.at_end(thread.close)
    env = await thread.call(make)
    if hasattr(env, "close"):
        model.at_end(partial(thread.call, env.close))
    arguments = ColumnParameters(env.reset).arguments(columns, model.prompt_seed)
    observation = await thread.call(env.reset, **arguments)
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):
        observation = observation[0]  # (observation, info), as in Gymnasium
    chat = model.chat()
    total = 0.0
    while True:
        try:
            reply = await chat.say(observation)
        except EpisodeLimit:
            return total
        step = await thread.call(env.step, reply.text)
        if not isinstance(step, tuple) or len(step) != 5:
            raise TypeError("step returns (observation, reward, terminated, truncated, info): return all five")
        observation, reward, terminated, truncated, _ = step
        model.reward(reply, reward)
        total += float(reward)
        if terminated or truncated:
            return total


async def _call_tools(box: ToolBox, model: EpisodePolicy, columns: JsonMapping) -> float | None:
    """Run tools until a turn has no call or a limit is met. Return the reward of their objects; None: none has one."""
    chat = model.chat(tools=box)
    tools = await chat.open_tools(columns)
    try:
        reply = await chat.say(_first_messages(columns, tools.reset_text))
        while reply.ended and (reply.calls or reply.problem):
            calling_turn = reply
            reward_before = tools.reward or 0.0
            try:
                reply = await chat.run_tools(calling_turn)
            finally:  # calls may have run before a limit refused the next turn
                model.reward(calling_turn, (tools.reward or 0.0) - reward_before)
    except EpisodeLimit:
        pass  # the trajectory is trained as it is
    return tools.reward


def _first_messages(columns: JsonMapping, reset_text: str) -> ChatInput:
    """Return the messages of a row, the last one followed by the text of the tools' ``reset`` methods."""
    row_messages = columns.get("messages")
    messages: list[Any] = list(row_messages or [{"role": "user", "content": str(columns.get("prompt", ""))}])
    if reset_text:
        content: Any = messages[-1].get("content") or ""
        addition: Any = [{"type": "text", "text": reset_text}] if isinstance(content, list) else reset_text
        messages[-1] = {**messages[-1], "content": content + addition}
    if not row_messages and not messages[-1]["content"]:
        raise ValueError('the row has no column "prompt" or "messages", and no tool wrote one when it was reset')
    return messages


def _agent(environment: Environment, agents: Agents | None) -> UserEpisode:
    command = with_run_python(environment.agent)
    if agents is None:  # they listen themselves
        listening_socket(environment.agent_host).close()
    if shutil.which(command[0]) is None:
        raise RecipeError(f'environment.agent: there is no program "{command[0]}": correct it, or install it')

    async def episode(model: EpisodePolicy, columns: JsonMapping) -> float | None:
        assert agents is not None, "only a caller that runs no episode has no agents"
        session = EndpointSession(secrets.token_hex(16), model.turns, model.chat_model)
        printed = PrintedReward()
        try:
            await agents.run(session, columns, printed)
        except AgentFailedError:
            if model.turns.finish is None:
                raise
            # else: the limit refused a turn, and the program failed for that reason
        finally:
            model.turns.refusal = session.refusal
            model.turns.printed_reward = printed.value
            model.turns.remark = printed.remark
            # A name of a note is the last part of the name of a metric, and has no slash.
            model.notes.update({name.replace("/", "_"): count for name, count in session.figures.items()})
        if printed.problem:
            raise AgentFailedError(printed.remark)
        if printed.value is None and model.turns.finish is not None:
            model.notes["limit_reward"] += 1
            model.turns.remark = f"its reward is environment.limit_reward: {model.turns.limit}"
            return environment.limit_reward
        return printed.value

    return episode
