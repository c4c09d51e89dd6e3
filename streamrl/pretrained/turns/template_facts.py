"""Behavior of a model's chat template in chats of several turns, found by rendering small chats (dry run and
environment workers); and removal of special tokens from untrusted text, which could close or open a turn."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from streamrl.base.types import JsonMapping
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam_tokens import CalledTool, ChatMessage, calling_message
from streamrl.pretrained.turns.tool_calls import CALL_FORMATS, ToolCall, parse_turn

_MARKS = ("qxv", "zjk")
_THOUGHT = "wqz"
_JOINER = "\N{ZERO WIDTH JOINER}"


class Appending(StrEnum):
    """Effect of a further message on the text before it, which the engine has sampled from."""

    APPENDS = "is appended"
    REWRITES_TURN = "rewrites the turn before it"
    REWRITES_EARLIER = "rewrites earlier turns"
    REFUSED = "is refused"


class TemplateFacts(Struct, frozen=True):
    """Behavior of a chat template.

    ``effects``: effect of a message by its role (``user``, ``tool``), and by role and ``after reasoning`` for a message
    after a turn with reasoning;
    ``shows_tools``: whether the prompt has the names and descriptions of the tools (True where there are no tools);
    ``calls``: number of calls that the template writes for a turn with two;
    ``opens_reasoning``: whether the prompt ends inside of ``<think>``;
    ``writes_date``: whether the prompt has today's date;
    ``written_call``: text that the template writes for a call of the first tool; empty: it writes none."""

    effects: Mapping[str, Appending]
    shows_tools: bool
    calls: int
    opens_reasoning: bool
    writes_date: bool
    written_call: str = ""

    def sentences(self) -> list[str]:
        """Return the facts as sentences for the dry run's summary."""
        calls_tools = self.effects.get("tool") is not Appending.REFUSED
        sentences = []
        for name, effect in self.effects.items():
            role = name[:4]  # the rest is " after reasoning"
            if name != role and effect is self.effects[role]:
                continue
            sender = "the user" if role == "user" else "a tool"
            sentences.append(f"a message of {sender}{name[4:]} {effect}")
        if not calls_tools:
            sentences.append("the model cannot call tools")
        elif not self.shows_tools:
            sentences.append("tools are not in the prompt: describe them in the system message")
        if calls_tools and "tool" in self.effects and self.calls < 2:
            sentences.append(f"a turn with two calls of tools is written {'with one' if self.calls else 'without'}")
        if self.writes_date:
            sentences.append("today's date stands in the prompt, which another day changes")
        return sentences


def template_facts(
    tokenizer: Tokenizer, tools: Sequence[JsonMapping] | None = None, arguments: JsonMapping | None = None
) -> TemplateFacts:
    """Find the behavior of a model's chat template. ``tools``: JSON schemas; ``arguments``: further variables of the
    template. Raises ``ChatError`` for a template that refuses even one message of a user."""

    def write(messages: Sequence[ChatMessage], *, prompt: bool = True, **variables: Any) -> str:
        return tokenizer.write_chat(messages, tools, {**(arguments or {}), **variables}, generation_prompt=prompt)

    first = [{"role": "user", "content": "a"}]
    prompt_text = write(first)
    dated_text = write(first, strftime_now=lambda layout: _MARKS[0])
    functions = [tool["function"] for tool in tools or ()]
    answer = {"role": "assistant", "content": _MARKS[0]}
    turns: dict[str, tuple[ChatMessage, list[ChatMessage]]] = {"user": (answer, [{"role": "user", "content": "b"}])}
    written_call = ""
    two_calls = ""
    if functions:
        name = functions[0]["name"]
        # Some templates join the arguments of a call to a text: they take arguments as text only.
        as_text = not _try(write, [*first, _calling_turn(name, 1)[0]])
        turns["tool"] = _calling_turn(name, 1, as_text=as_text)
        turn, results = _calling_turn(name, 2, as_text=as_text)
        two_calls = _try(write, [*first, turn, *results])
        with_call = _try(write, [*first, turns["tool"][0]], prompt=False)
        written_call = _written_call(tokenizer, with_call, _try(write, [*first, answer], prompt=False))
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    effects = {}
    for name, (turn, appended) in turns.items():
        effects[name] = _effect(write, first, turn, appended)
        if _THOUGHT in _try(write, [*first, {**turn, **thought}], prompt=False):
            effects[f"{name} after reasoning"] = _effect(write, first, {**turn, **thought}, appended)
    think_start = prompt_text.rfind("<think>")
    return TemplateFacts(
        effects=effects,
        shows_tools=all(
            function["name"] in prompt_text and function.get("description", "") in prompt_text for function in functions
        ),
        calls=sum(mark in two_calls for mark in _MARKS),
        opens_reasoning=think_start >= 0 and "</think>" not in prompt_text[think_start:],
        writes_date=_MARKS[0] in dated_text,
        written_call=written_call,
    )


def _try(write: Any, messages: Sequence[ChatMessage], *, prompt: bool = True) -> str:
    """Return the text of ``messages``; empty: the template refuses them."""
    try:
        return str(write(messages, prompt=prompt))
    except ChatError:
        return ""


def _effect(write: Any, first: Sequence[ChatMessage], turn: ChatMessage, appended: Sequence[ChatMessage]) -> Appending:
    """Find the effect of the messages ``appended`` after ``turn``."""
    prompt_text = _try(write, first)
    turn_text = _try(write, [*first, turn], prompt=False)
    full_text = _try(write, [*first, turn, *appended])
    history = _try(write, first, prompt=False)
    if not (prompt_text and turn_text and full_text and history):
        return Appending.REFUSED
    if turn_text.startswith(prompt_text) and full_text.startswith(turn_text):
        return Appending.APPENDS
    return Appending.REWRITES_TURN if full_text.startswith(history) else Appending.REWRITES_EARLIER


def _written_call(tokenizer: Tokenizer, with_call: str, without_call: str) -> str:
    """Find the text of a call, by the texts of two chats that differ in the call at their end."""
    prefix = os.path.commonprefix([with_call, without_call])  # noqa: RUF071 (of texts)
    call_text = with_call[len(prefix) :]
    for stop in filter(None, map(tokenizer.token_text, tokenizer.eos_token_ids)):
        call_text = call_text.partition(stop)[0]
    return call_text.strip()


def _calling_turn(name: str, count: int, *, as_text: bool = False) -> tuple[ChatMessage, list[ChatMessage]]:
    """Return a turn with ``count`` calls, and their results. ``as_text``: whether arguments are JSON texts."""
    calls = [CalledTool(name, f"call0000{number}") for number in range(count)]
    results: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": call.call_id, "name": name, "content": "c"} for call in calls
    ]
    arguments: list[Any] = [{"x": mark} for mark in _MARKS[:count]]
    if as_text:
        arguments = [json.dumps(argument) for argument in arguments]
    return calling_message(calls, arguments), results


def format_of_template(tokenizer: Tokenizer, arguments: JsonMapping | None = None) -> tuple[str, str]:
    """Find the format of ``tool_calls.CALL_FORMATS`` that reads a call as the model's chat template writes it (empty:
    none does). Return it, and the text that the template writes. ``arguments``: further variables of the template."""
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    written = template_facts(tokenizer, tools, arguments).written_call
    calls = (ToolCall("f", {"x": _MARKS[0]}),)
    return next((name for name in CALL_FORMATS if parse_turn(written, name, tools).calls == calls), ""), written


def without_special_tokens(tokenizer: Tokenizer, text: str) -> tuple[str, int]:
    """Break the special tokens in ``text`` with a character without width. Otherwise the text of a page or a program
    could close the turn that it stands in, and open another. Returns the text and the number of broken tokens."""
    specials = tokenizer.special_token_ids
    broken = 0
    while True:
        special = next((token_id for token_id in tokenizer.encode_fragment(text) if token_id in specials), None)
        if special is None:
            break
        spelling = tokenizer.token_text(special)
        if spelling not in text:  # the vocabulary spells it otherwise
            break
        broken += text.count(spelling)
        text = text.replace(spelling, spelling[0] + _JOINER + spelling[1:])
    return text, broken
