"""The effects of a model's chat template on a chat that goes on, found by rendering small ones; and texts that may
stand in such a chat without closing or opening a turn."""

from __future__ import annotations

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


class Appending(StrEnum):
    """The effect of another message on the text before it, which the engine saw."""

    APPENDS = "is appended"
    REWRITES_TURN = "rewrites the turn before it"
    REWRITES_EARLIER = "rewrites earlier turns"
    REFUSED = "is refused"


class TemplateFacts(msgspec.Struct, frozen=True):
    """``effects``: by what is appended (``user``, ``tool``), and to which turn (``after reasoning``). ``shows_tools``:
    names and descriptions of the tools stand in the prompt (True where there are none). ``calls``: of one turn with two
    that the template writes. ``opens_reasoning``: the prompt ends inside of ``<think>``."""

    effects: Mapping[str, Appending]
    shows_tools: bool
    calls: int
    opens_reasoning: bool

    def problems(self) -> list[str]:
        """List what a run with turns must know, a sentence each; empty: each message is appended, tools are shown."""
        found = [
            f"a message of {'the user' if name.startswith('user') else 'a tool'}{name[4:]} {effect}"
            for name, effect in self.effects.items()
            if effect is not Appending.APPENDS
        ]
        if not self.shows_tools:
            found.append("tools are not in the prompt: describe them in the system message")
        if self.calls < 2 and self.effects.get("tool", Appending.REFUSED) is not Appending.REFUSED:
            found.append(
                "a turn with two calls of tools is " + ("written with one" if self.calls else "written without")
            )
        return found


def template_facts(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None, arguments: Mapping[str, Any] | None = None
) -> TemplateFacts:
    """Find the facts for ``tools`` (JSON schemas) and ``arguments`` (further variables of the template). Raises
    ``ChatError`` where the template takes not even one message of a user."""

    def write(messages: Sequence[ChatMessage], *, prompt: bool = True) -> str:
        return tokenizer.write_chat(messages, tools, arguments, generation_prompt=prompt)

    first = [{"role": "user", "content": "a"}]
    begun = write(first)
    functions = [tool["function"] for tool in tools or ()]
    said = {"role": "assistant", "content": _MARKS[0]}
    turns: dict[str, tuple[ChatMessage, list[ChatMessage]]] = {"user": (said, [{"role": "user", "content": "b"}])}
    if functions:
        turns["tool"] = _called(functions[0]["name"], 1)
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    effects = {}
    for name, (turn, appended) in turns.items():
        effects[name] = _effect(write, first, turn, appended)
        shown = _try(write, [*first, {**turn, **thought}], prompt=False)
        if shown is not None and _THOUGHT in shown:
            effects[f"{name} after reasoning"] = _effect(write, first, {**turn, **thought}, appended)
    both = None
    if functions:
        turn, results = _called(functions[0]["name"], 2)
        both = _try(write, [*first, turn, *results])
    opened = begun.rfind("<think>")
    return TemplateFacts(
        effects,
        all(one["name"] in begun and one.get("description", "") in begun for one in functions),
        sum(mark in both for mark in _MARKS) if both else 0,
        opened >= 0 and "</think>" not in begun[opened:],
    )


def _try(write: Any, messages: Sequence[ChatMessage], *, prompt: bool = True) -> str | None:
    try:
        return str(write(messages, prompt=prompt))
    except ChatError:
        return None


def _effect(write: Any, first: Sequence[ChatMessage], turn: ChatMessage, appended: Sequence[ChatMessage]) -> Appending:
    begun, alone = _try(write, first), _try(write, [*first, turn], prompt=False)
    whole, history = _try(write, [*first, turn, *appended]), _try(write, first, prompt=False)
    if begun is None or alone is None or whole is None or history is None:
        return Appending.REFUSED
    if alone.startswith(begun) and whole.startswith(alone):
        return Appending.APPENDS
    return Appending.REWRITES_TURN if whole.startswith(history) else Appending.REWRITES_EARLIER


def _called(name: str, count: int) -> tuple[ChatMessage, list[ChatMessage]]:
    """Return a turn with ``count`` calls, and their results."""
    calls = [CalledTool(name, f"call0000{number}") for number in range(count)]
    results: list[ChatMessage] = [
        {"role": "tool", "tool_call_id": call.call_id, "name": name, "content": "c"} for call in calls
    ]
    return calling_message(calls, [{"x": mark} for mark in _MARKS[:count]]), results


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
