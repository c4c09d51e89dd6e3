"""The effects of a model's chat template on a chat that goes on, found by rendering small ones; and texts that may
stand in such a chat without closing or opening a turn."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam import CalledTool, ChatMessage, calling_message

_MARKS = ("qxv", "zjk")
_THOUGHT = "wqz"
_JOINER = "\N{ZERO WIDTH JOINER}"
_TAG = re.compile(r"[<\[][^\s<>\[\]{}()=\"']+[>\]]")


class Appending(StrEnum):
    """The effect of another message on the text before it, which the engine saw."""

    APPENDS = "is appended"
    REWRITES_TURN = "rewrites the turn before it"
    REWRITES_EARLIER = "rewrites earlier turns"
    REFUSED = "is refused"


class TemplateFacts(msgspec.Struct, frozen=True):
    """``effects``: by what is appended (``user``, ``tool``), and to which turn (``after reasoning``). ``shows_tools``:
    names and descriptions of the tools stand in the prompt (True where there are none). ``calls``: of one turn with two
    that the template writes. ``opens_reasoning``: the prompt ends inside of ``<think>``. ``writes_date``: today's date
    stands in it. ``call_tags``: around the calls of a turn, such as ``<tool_call>`` (empty: there is none)."""

    effects: Mapping[str, Appending]
    shows_tools: bool
    calls: int
    opens_reasoning: bool
    writes_date: bool
    call_tags: tuple[str, str] = ("", "")

    def sentences(self) -> list[str]:
        """List the effect of each kind of message, and what else a run with turns must know."""
        calls_tools = self.effects.get("tool") is not Appending.REFUSED
        found = [
            f"a message of {'the user' if name.startswith('user') else 'a tool'}{name[4:]} {effect}"
            for name, effect in self.effects.items()
            if name in ("user", "tool") or effect is not self.effects[name[:4]]
        ]
        if not calls_tools:
            found.append("the model cannot call tools")
        elif not self.shows_tools:
            found.append("tools are not in the prompt: describe them in the system message")
        if calls_tools and "tool" in self.effects and self.calls < 2:
            found.append(f"a turn with two calls of tools is written {'with one' if self.calls else 'without'}")
        if self.writes_date:
            found.append("today's date stands in the prompt, which another day changes")
        return found


def template_facts(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None, arguments: Mapping[str, Any] | None = None
) -> TemplateFacts:
    """Find the facts for ``tools`` (JSON schemas) and ``arguments`` (further variables of the template). Raises
    ``ChatError`` where the template takes not even one message of a user."""

    def write(messages: Sequence[ChatMessage], *, prompt: bool = True, **more: Any) -> str:
        return tokenizer.write_chat(messages, tools, {**(arguments or {}), **more}, generation_prompt=prompt)

    first = [{"role": "user", "content": "a"}]
    begun = write(first)
    dated = write(first, strftime_now=lambda layout: _MARKS[0])
    functions = [tool["function"] for tool in tools or ()]
    said = {"role": "assistant", "content": _MARKS[0]}
    turns: dict[str, tuple[ChatMessage, list[ChatMessage]]] = {"user": (said, [{"role": "user", "content": "b"}])}
    tags = ("", "")
    both = None
    if functions:
        name = functions[0]["name"]
        text = _try(write, [*first, _called(name, 1)[0]]) is None  # of arguments: some templates join it to theirs
        turns["tool"] = _called(name, 1, text=text)
        turn, results = _called(name, 2, text=text)
        both = _try(write, [*first, turn, *results])
        tags = _tags(tokenizer, [_try(write, [*first, one], prompt=False) or "" for one in (turns["tool"][0], said)])
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    effects = {}
    for name, (turn, appended) in turns.items():
        effects[name] = _effect(write, first, turn, appended)
        shown = _try(write, [*first, {**turn, **thought}], prompt=False)
        if shown is not None and _THOUGHT in shown:
            effects[f"{name} after reasoning"] = _effect(write, first, {**turn, **thought}, appended)
    opened = begun.rfind("<think>")
    return TemplateFacts(
        effects,
        all(one["name"] in begun and one.get("description", "") in begun for one in functions),
        sum(mark in both for mark in _MARKS) if both else 0,
        opened >= 0 and "</think>" not in begun[opened:],
        _MARKS[0] in dated,
        tags,
    )


def _try(write: Any, messages: Sequence[ChatMessage], *, prompt: bool = True) -> str | None:
    try:
        return str(write(messages, prompt=prompt))
    except ChatError:
        return None


def _effect(write: Any, first: Sequence[ChatMessage], turn: ChatMessage, appended: Sequence[ChatMessage]) -> Appending:
    begun = _try(write, first)
    alone = _try(write, [*first, turn], prompt=False)
    whole = _try(write, [*first, turn, *appended])
    history = _try(write, first, prompt=False)
    if begun is None or alone is None or whole is None or history is None:
        return Appending.REFUSED
    if alone.startswith(begun) and whole.startswith(alone):
        return Appending.APPENDS
    return Appending.REWRITES_TURN if whole.startswith(history) else Appending.REWRITES_EARLIER


def _tags(tokenizer: Tokenizer, turns: list[str]) -> tuple[str, str]:
    """The tags around calls. ``turns``: texts of a chat that ends with a call, and without."""
    called = turns[0][len(os.path.commonprefix(turns)) :]  # noqa: RUF071 (of texts)
    for stop in filter(None, map(tokenizer.token_text, tokenizer.eos_token_ids)):
        called = called.partition(stop)[0]
    called = called.strip()
    tags = _TAG.findall(called) or [""]
    return tags[0] if called.startswith(tags[0]) else "", tags[-1] if called.endswith(tags[-1]) else ""


def _called(name: str, count: int, *, text: bool = False) -> tuple[ChatMessage, list[ChatMessage]]:
    """Return a turn with ``count`` calls, and their results."""
    calls = [CalledTool(name, f"call0000{number}") for number in range(count)]
    results: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": call.call_id, "name": name, "content": "c"} for call in calls
    ]
    arguments: list[Any] = [{"x": mark} for mark in _MARKS[:count]]
    return calling_message(calls, list(map(json.dumps, arguments)) if text else arguments), results


def without_special_tokens(tokenizer: Tokenizer, text: str) -> tuple[str, int]:
    """Break special tokens that ``text`` spells, by a character without width: a page or a program could close the turn
    that it stands in, and open another. Returns the text and how many were broken."""
    specials = tokenizer.special_token_ids
    broken = 0
    while (found := next((one for one in tokenizer.encode_fragment(text) if one in specials), None)) is not None:
        spelled = tokenizer.token_text(found)
        if spelled not in text:  # the vocabulary writes it otherwise
            break
        broken += text.count(spelled)
        text = text.replace(spelled, spelled[0] + _JOINER + spelled[1:])
    return text, broken
