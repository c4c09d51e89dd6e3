"""The recipe's ``[environment]``: user code that runs between the turns of a trajectory. Environment workers run it
(``run.environments``); the controller, the dry run and the trainer read some of its keys."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Literal

from msgspec.structs import replace

from streamrl.base.types import Texts
from streamrl.recipe.field_types import Count, Natural, NaturalFloat, Positive, PositiveFloat, Section, advanced

ENVIRONMENT_REWARD = "environment"
"""Name of the built-in reward with the value that the environment returned; a recipe with an environment needs no
other."""
MCP = "mcp:"
"""Prefix of the command of an MCP server among the tools."""
TOOL_FORMATS = ("hermes", "qwen_xml", "llama_json", "mistral")
"""Formats of tool calls that streamrl reads itself (``pretrained/turns/tool_calls.py``)."""
VLLM = "vllm:"
"""Prefix of a ``tool_format`` that names one of vLLM's tool parsers."""
RUN_ENVIRONMENT = ""
"""Name of the environment that ``[environment]`` itself describes."""
FORMS = ("episode", "env", "tools", "agent")
"""Keys that name the user's code; an environment has one of them."""


class Credit(StrEnum):
    """Source of the advantage of a turn. ``trajectory``: the reward of the trajectory. ``return_to_go``: the reward
    without that of earlier turns, compared with the siblings' in the same turn, or in their last turn where they have
    fewer.
    ``turn``: the reward of the turn, compared with the siblings' in the same turn (0 where a sibling has no such turn),
    plus the part of the reward that belongs to no turn, compared separately (MT-GRPO, arXiv 2505.11821)."""

    TRAJECTORY = "trajectory"
    TURN = "turn"
    RETURN_TO_GO = "return_to_go"


class EnvironmentCode(Section, frozen=True):
    """The user's code of an environment, by one of ``episode``, ``env``, ``tools`` and ``agent``, and its limits. The
    environment makes the prompt from the columns of a row, in the model's chat template."""

    episode: Annotated[
        str, "a coroutine function, episode(model, **columns), that talks to the model and may return the reward"
    ] = ""
    env: Annotated[
        str, "a class with reset(**columns) and step(text), which returns Gymnasium's five values; sync or async"
    ] = ""
    tools: Annotated[
        Texts,
        "typed functions, or classes whose public methods are typed, with docstrings, or mcp:COMMAND of an MCP "
        "server (stdio): the model calls them until a turn has no call",
    ] = ()
    agent: Annotated[
        Texts,
        "a program that talks to the model through an API: it gets OPENAI_BASE_URL and OPENAI_API_KEY (also "
        'Anthropic\'s), and the row on stdin; its last line with {"reward": 1.0} is the reward',
    ] = ()
    max_turns: Annotated[Positive, "limit of the turns that the model samples in a trajectory"] = 16
    seconds: Annotated[
        PositiveFloat, "time limit of a trajectory in its environment, without the time of the model"
    ] = 600.0
    system: Annotated[str, "a system message of every conversation"] = ""
    tool_format: Annotated[
        str, 'format of tool calls: hermes, qwen_xml, llama_json, mistral or vllm:PARSER; "auto": by the chat template'
    ] = "auto"
    history: Annotated[
        Literal["keep", "template"], advanced, "earlier turns as they were sampled, or as the chat template writes them"
    ] = "keep"
    tool_seconds: Annotated[PositiveFloat, advanced, "time limit of a tool call"] = 30.0
    tool_characters: Annotated[
        Positive, advanced, "limit of the length of a tool's result, which is shortened to it"
    ] = 8000
    agent_tasks: Annotated[
        Natural,
        advanced,
        "trajectories that one process of the agent runs at once, as lines of stdin; 0: one process for each",
    ] = 0
    limit_reward: Annotated[
        float,
        advanced,
        "reward of an agent that has printed none and was refused a turn by `max_turns` or `max_tokens`",
    ] = 0.0
    late_reward: Annotated[
        float | None,
        advanced,
        "reward of an agent that has printed none after `seconds` (not set: its trajectory has failed, and is not "
        "trained)",
    ] = None

    @property
    def servers(self) -> tuple[Sequence[str], ...]:
        """Commands of the MCP servers among the tools, each as its words."""
        return tuple(filter(None, map(command_of, self.tools)))


class FurtherEnvironment(EnvironmentCode, frozen=True, kw_only=True):
    """An additional environment, which sets of prompts choose by its name."""

    name: Annotated[str, "its name, for prompts.train.NAME.environment"]


class Environment(EnvironmentCode, frozen=True):
    """Trajectories of several turns; without code a trajectory is one completion."""

    max_tokens: Annotated[
        Positive, "limit of the tokens of a conversation: prompt, turns, and the messages between them"
    ] = 4096
    variables: Annotated[
        Texts, advanced, "names of environment variables that environments, tools, MCP servers and the agent see"
    ] = ()
    agent_host: Annotated[
        str,
        advanced,
        "address of this host at which the endpoint for agents listens: one that agents in containers and on other "
        "hosts reach, or 0.0.0.0 for all",
    ] = "127.0.0.1"
    agent_address: Annotated[
        str,
        advanced,
        "name or address by which agents reach the endpoint, such as host.docker.internal; empty: `agent_host`",
    ] = ""
    credit: Annotated[Credit, advanced] = Credit.TRAJECTORY
    learn_observations: Annotated[
        NaturalFloat,
        advanced,
        "weight of the cross-entropy of tokens that tools and games wrote behind a turn; with 1 each counts as much as "
        "a sampled token of its trajectory (0: they are not trained)",
    ] = 0.0
    workers: Annotated[Count, "processes that run environments"] = 1
    further: Annotated[
        tuple[FurtherEnvironment, ...],
        advanced,
        "additional environments, which sets of prompts choose by name; keys that they do not have, such as "
        "max_tokens, are those of [environment]",
    ] = ()

    @property
    def configured(self) -> bool:
        """Whether the run has an environment."""
        return any(getattr(self, form) for form in FORMS)

    @property
    def by_name(self) -> dict[str, Environment]:
        """All environments by name: this one as ``RUN_ENVIRONMENT``, further ones with the shared keys of this one."""
        environments = {RUN_ENVIRONMENT: self}
        for other in self.further:
            code = {key: getattr(other, key) for key in EnvironmentCode.__struct_fields__}
            environments[other.name] = replace(self, further=(), **code)
        return environments

    def path_of(self, name: str) -> str:
        """Return the recipe path of the environment ``name`` of ``by_name``, without ``advanced``."""
        if name == RUN_ENVIRONMENT:
            return "environment"
        return f"environment.further.{list(self.by_name).index(name) - 1}"

    @property
    def has_agent(self) -> bool:
        """Whether one of the environments is an agent."""
        return any(environment.agent for environment in self.by_name.values())


def with_run_python(command: Sequence[str]) -> Sequence[str]:
    """Return ``command`` with the run's interpreter in place of ``python``, so that no venv need be activated."""
    return (sys.executable, *command[1:]) if command[0] == "python" else command


def command_of(tool: str) -> Sequence[str]:
    """Return the words of an MCP server's command. Empty: ``tool`` is no MCP server, or has an open quote."""
    if not tool.startswith(MCP):
        return ()
    with suppress(ValueError):
        return shlex.split(tool.removeprefix(MCP))
    return ()
