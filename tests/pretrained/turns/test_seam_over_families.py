"""The seam of a chat over published templates of many families: what the engine saw stays as it is, and behind it
stands what the template writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from streamrl.base.types import token_array
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam_tokens import CalledTool, CannotContinueError, ChatSeams, SeamKind
from tests.pretrained.turns.families import FAMILIES, TOOL

SYSTEM = {"role": "system", "content": "You are a calculator."}
USER = {"role": "user", "content": "What is 2 + 3?"}
MORE = {"role": "user", "content": "And 4 + 5?"}
WORDS = [
    "5",
    "-3.25",
    "naïve café",
    "东京",
    "🙂",
    '{"a": [1, 2]}',
    "line\nline",
    "two  spaces",
    "<b>html</b>",
    "x" * 40,
    "it's",
]


APPENDING = {
    "qwen2.5": 6,
    "qwen3": 1,
    "qwen3-2507": 6,
    "qwen3.5": 2,
    "qwen3.5 nothink": 1,
    "qwen3.6": 2,
    "qwen3.6 preserving": 6,
    "llama3": 6,
    "llama3.1": 6,
    "llama3.2": 6,
    "gemma": 4,
    "gemma3": 4,
    "glm-4.5": 4,
    "gpt-oss": 2,
    "lfm2": 4,
    "nemotron-3": 1,
    "command-r": 4,
}
"""Kinds of turns behind which the template leaves all earlier text as the engine saw it; others rewrite some."""


def as_sampled(tokenizer: Tokenizer, text: str, chance: random.Random) -> list[int]:
    """A tokenisation of ``text`` that is not the canonical one, as a model may sample it."""
    ids: list[int] = []
    while text:
        length = chance.choice((1, 2, 3, 5, 40))
        ids += tokenizer.encode_fragment(text[:length])
        text = text[length:]
    return ids


def calls(*, text: bool = False) -> list[dict[str, Any]]:
    arguments: Any = {"a": 2, "b": 3}
    function = {"name": "add", "arguments": json.dumps(arguments) if text else arguments}
    return [{"id": "call00000", "type": "function", "function": function}]


class Turn(NamedTuple):
    history: list[dict[str, Any]]
    said: dict[str, Any]
    appended: list[dict[str, Any]]
    tools: list[Any] | None = None
    called: tuple[CalledTool, ...] = ()


def turns_of(tokenizer: Tokenizer, arguments: dict[str, Any], chance: random.Random) -> Iterator[tuple[str, Turn]]:
    """Turns of a chat: plain ones, with reasoning, and calls of a tool, as far as the template takes them."""

    def takes(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> bool:
        try:
            tokenizer.write_chat(messages, tools, arguments)
        except ChatError:
            return False
        return True

    history = [SYSTEM, USER] if takes([SYSTEM, USER]) else [USER]
    content = " ".join(chance.choices(WORDS, k=4))
    thought = {"reasoning_content": "Two and three.", "thinking": "Two and three."}
    for name, extra in (("plain", {}), ("reasoning", thought)):
        said = {"role": "assistant", "content": content} | extra
        yield name, Turn(history, said, [MORE])
        later = [*history, said, {"role": "user", "content": "So?"}]
        yield f"second {name}", Turn(later, {"role": "assistant", "content": "It is 5."} | extra, [MORE])
    result = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": chance.choice(WORDS)}
    for text in (False, True):
        said = {"role": "assistant", "content": "", "tool_calls": calls(text=text)}
        if takes([*history, said, result], [TOOL]):
            for extra in ({}, thought):
                name = "call with reasoning" if extra else "call"
                yield name, Turn(history, said | extra, [result], [TOOL], (CalledTool("add", "call00000"),))
            return


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(token_array([*ids, 0]), skip_special=False)[: -len(tokenizer.token_text(0))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_seam_is_what_the_template_writes_behind_a_turn(name: str, of_family: Callable[[str], Tokenizer]) -> None:
    tokenizer, arguments, chance = of_family(name), FAMILIES[name].arguments, random.Random(name)
    stops = {text: tokenizer.encode_fragment(text)[0] for text in FAMILIES[name].stops}
    appending, refused = 0, []
    for kind, turn in turns_of(tokenizer, arguments, chance):
        seams = ChatSeams(tokenizer, turn.tools, arguments)
        prompt = tokenizer.write_chat(turn.history, turn.tools, arguments)
        alone = tokenizer.write_chat([*turn.history, turn.said], turn.tools, arguments, generation_prompt=False)
        whole = tokenizer.write_chat([*turn.history, turn.said, *turn.appended], turn.tools, arguments)
        try:
            text = seams.text(turn.history, turn.called, turn.appended)
        except CannotContinueError as error:
            refused.append(f"{kind}: {error}")
            continue
        assert whole.endswith(text), (kind, text)
        body = alone.removeprefix(prompt) if alone.startswith(prompt) else "A thought.</think>It is 5."
        at = min((place for one in stops if (place := body.find(one)) >= 0), default=len(body))
        begun = next((one for one in stops if text.startswith(one)), "")
        appends = alone.startswith(prompt) and whole.startswith(alone)
        appending += appends
        opens = bool(begun) and begun not in alone.removeprefix(prompt)
        for last in ("", *stops):
            sampled = as_sampled(tokenizer, body[:at], chance) + ([stops[last]] if last else [])
            seam = seams.seam(turn.history, turn.called, turn.appended, sampled[-1] if sampled else None)
            kinds = (SeamKind.OTHER_OPENER if opens else SeamKind.OTHER_CLOSER) if last else SeamKind.CLOSED
            assert seam.kind is (SeamKind.EXACT if last and text.startswith(last) else kinds), (kind, last)
            whole_seam = seam.kind in (SeamKind.CLOSED, SeamKind.OTHER_OPENER)
            assert seam.token_ids == tokenizer.encode_fragment(text)[not whole_seam :]
            ids = seam.token_ids.tolist()
            assert tokenizer.encode_fragment(whole).tolist()[-len(ids) :] == ids, (kind, last)
            if appends and (not last or seam.kind is SeamKind.EXACT):
                before = tokenizer.encode_fragment(prompt).tolist()
                assert text_of(tokenizer, [*before, *sampled, *ids]) == text_of(
                    tokenizer, tokenizer.encode_fragment(whole)
                )
    assert not refused
    assert appending == APPENDING.get(name, 0)
