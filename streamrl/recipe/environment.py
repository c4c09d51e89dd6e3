"""The recipe's ``[environment]``: what a trajectory of several turns meets between them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Literal

from streamrl.recipe.fields import Count, Natural, Positive, PositiveFloat, Section, advanced, doc

ENVIRONMENT_REWARD = "environment"
"""The built-in reward that is what the environment returned; a recipe with an environment needs no other."""
MCP = "mcp:"
"""Prefix of a tool that is the command of an MCP server."""
TOOL_FORMATS = ("hermes", "qwen_xml", "llama_json", "mistral")
"""Ways to write calls of tools that streamrl reads itself; ``pretrained/turns/tool_calls.py`` has their readers."""
VLLM = "vllm:"
"""Prefix of a ``tool_format`` that is one of vLLM's tool parsers."""
FORMS = ("episode", "env", "tools", "agent")
"""Keys of which an environment has one."""


class Credit(StrEnum):
    """Source of the advantage of a turn. ``trajectory``: the whole reward. ``return_to_go``: the reward without that of
    earlier turns, compared with the siblings' in the same turn, or in their last one where they have fewer. ``turn``:
    the turn's own reward, compared so (0 where a sibling has no such turn), plus the rest of the reward, which is no
    turn's, compared by itself (MT-GRPO, arXiv 2505.11821)."""

    TRAJECTORY = "trajectory"
    TURN = "turn"
    RETURN_TO_GO = "return_to_go"


class Environment(Section, frozen=True):
    """Several turns: one of ``episode``, ``env``, ``tools`` and ``agent``; none: a trajectory is one completion. The
    environment writes the prompt of a row, from its columns, in the model's own chat template."""

    episode: Annotated[
        str, doc("a coroutine function, episode(model, **columns), that talks to the model and may return the reward")
    ] = ""
    env: Annotated[
        str, doc("a class with reset(**columns) and step(text), which returns Gymnasium's five values; sync or async")
    ] = ""
    tools: Annotated[
        tuple[str, ...],
        doc(
            "typed functions, or classes whose public methods are typed, with docstrings, or mcp:COMMAND of an MCP "
            "server (stdio): the model calls them until a turn has no call"
        ),
    ] = ()
    agent: Annotated[
        tuple[str, ...],
        doc(
            "a program that talks to the model as to an API: it gets OPENAI_BASE_URL and OPENAI_API_KEY (also "
            'Anthropic\'s), and the row on stdin; a last line {"reward": 1.0} is the reward'
        ),
    ] = ()
    max_turns: Annotated[Positive, doc("turns that the model samples in a trajectory, at most")] = 16
    max_tokens: Annotated[
        Positive, doc("tokens of a conversation, at most: prompt, turns, and what stands between them")
    ] = 4096
    seconds: Annotated[
        PositiveFloat, doc("time limit of a trajectory in its environment, without the time of the model")
    ] = 600.0
    system: Annotated[str, doc("a system message of every conversation")] = ""
    tool_format: Annotated[
        str, doc('how the model writes calls: hermes, qwen_xml, llama_json, mistral or vllm:PARSER; "auto": found out')
    ] = "auto"
    history: Annotated[
        Literal["keep", "template"], advanced("earlier turns as they were sampled, or as the chat template writes them")
    ] = "keep"
    tool_seconds: Annotated[PositiveFloat, advanced("time limit of a call of a tool")] = 30.0
    tool_characters: Annotated[Positive, advanced("length of the result of a tool, at most; what is longer is cut")] = (
        8000
    )
    agent_tasks: Annotated[
        Natural,
        advanced("trajectories that one process of the agent takes at once, as lines of stdin; 0: a process for each"),
    ] = 0
    agent_variables: Annotated[
        tuple[str, ...], advanced("names of environment variables that the agent gets, such as an API key")
    ] = ()
    credit: Annotated[Credit, advanced("")] = Credit.TRAJECTORY
    workers: Annotated[Count, doc("processes that run environments")] = 1

    @property
    def given(self) -> bool:
        """Return whether the run has an environment."""
        return any(getattr(self, form) for form in FORMS)

    @property
    def servers(self) -> tuple[Sequence[str], ...]:
        """Commands of MCP servers among the tools, in words."""
        return tuple(filter(None, map(command_of, self.tools)))


def with_run_python(command: Sequence[str]) -> Sequence[str]:
    """Return ``command`` with the run's own interpreter in place of ``python``, also without an activated venv."""
    return (sys.executable, *command[1:]) if command[0] == "python" else command


def command_of(tool: str) -> Sequence[str]:
    """Words of the command of an MCP server. Empty: ``tool`` is none, or has a quote without its end."""
    with suppress(ValueError):
        return shlex.split(tool.removeprefix(MCP)) if tool.startswith(MCP) else ()
    return ()
