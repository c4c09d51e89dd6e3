"""The tokens between a sampled turn and the next one: the end of the turn, the appended messages, and the begin of the
assistant's next message. What was sampled is never decoded and tokenised again.

The template renders the chat with a stand-in for the sampled turn, whose texts are random marks. Behind the last mark,
at the text of the token that closes the turn, begins the *seam*. It begins with a special token, so that its own tokens
are those that it has inside of the whole text. Changes that the template makes to earlier turns have no effect: they
are tokens already."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec

from streamrl.base.types import TokenArray
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer

ChatMessage = Mapping[str, Any]


class CannotContinueError(ChatError):
    """A chat that the model's template cannot continue by tokens; the message says why."""


class SeamKind(StrEnum):
    """Relation of the last sampled token to the one that the template writes after a turn of a history.

    ``EXACT``: they are the same. ``CLOSED``: no end token was sampled (length limit, abort), so the seam has it.
    ``OTHER_CLOSER``: another end token was sampled. ``OTHER_OPENER``: another end token was sampled, and the template's
    one opens the appended message rather than closing the turn (GLM). ``REWRITTEN``: there is no seam, but the whole
    chat as the template writes it, which begins otherwise."""

    EXACT = "exact"
    CLOSED = "closed"
    OTHER_CLOSER = "other_closer"
    OTHER_OPENER = "other_opener"
    REWRITTEN = "rewritten"


class Seam(msgspec.Struct, frozen=True):
    """``token_ids``: int32, to be appended to the sampled ones; none of them is trained."""

    token_ids: TokenArray
    kind: SeamKind


class CalledTool(msgspec.Struct, frozen=True):
    """A tool call of a sampled turn. ``call_id``: that a tool message answers."""

    name: str
    call_id: str


class ChatSeams:
    """Continues chats of one model. ``tools``: JSON schemas, as the first prompt has them; ``arguments``: further
    variables of the template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._arguments = arguments
        self._stops = {token_id: tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}

    def seam(
        self,
        history: Sequence[ChatMessage],
        calls: Sequence[CalledTool],
        appended: Sequence[ChatMessage],
        last: int | None,
    ) -> Seam:
        """Return the tokens between a sampled turn and the next one. ``history``: messages before the turn, of which
        those up to the first user message are enough; ``calls``: of the turn; ``appended``: messages after it;
        ``last``: the last sampled token (None: there is none). Raises ``CannotContinueError``."""
        text = self.text(history, calls, appended)
        ids = self._tokenizer.encode_fragment(text)
        if last not in self._stops:
            return Seam(ids, SeamKind.CLOSED)
        if ids[0] == last:
            return Seam(ids[1:], SeamKind.EXACT)
        # A stop token that opens the next message (GLM) is not written after a turn that is the last message.
        stop = self._stops.get(ids[0])
        if stop and stop not in self._after_turn(history, calls, (), generation_prompt=False):
            return Seam(ids, SeamKind.OTHER_OPENER)
        return Seam(ids[1:], SeamKind.OTHER_CLOSER)

    def text(self, history: Sequence[ChatMessage], calls: Sequence[CalledTool], appended: Sequence[ChatMessage]) -> str:
        """The text of the seam. Raises ``CannotContinueError``."""
        after = self._after_turn(history, calls, appended)
        # A template may close turns of a history with a special token that never ends a sampled one.
        stops = [*self._stops.values(), self._closer]
        places = [at for stop in stops if stop and (at := after.find(stop)) >= 0]
        if not places:
            raise CannotContinueError("the model's chat template cannot be continued: it writes no token after a turn")
        return after[min(places) :]

    def _after_turn(
        self,
        history: Sequence[ChatMessage],
        calls: Sequence[CalledTool],
        appended: Sequence[ChatMessage],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return what the template writes after the texts of the turn."""
        problems = []
        for message, marks in _placeholders(calls):
            try:
                text = self._write([*_opening(history), message, *appended], generation_prompt=generation_prompt)
            except ChatError as error:
                problems.append(str(error))
                continue
            ends = [text.rfind(mark) + len(mark) for mark in marks if mark in text]
            if 0 < len(ends) < len(marks):
                raise CannotContinueError(
                    f"the model's chat template writes {len(ends)} of the {len(marks)} calls of a turn: let the model "
                    "call one tool a turn"
                )
            if ends:
                return text[max(ends) :]
            problems.append("it does not show the text of the turn")
        raise CannotContinueError(f"the model's chat template cannot be continued: {'; '.join(problems)}")

    @cached_property
    def _closer(self) -> str:
        """The special token right after a plain turn of a history; empty: there is none."""
        mark = _mark()
        turns = [_message("x", role="user"), _message(mark), _message("x", role="user")]
        try:
            text = self._write(turns)
        except ChatError:
            return ""
        after = self._tokenizer.encode_fragment(text[text.rfind(mark) + len(mark) :])
        specials = self._tokenizer.special_token_ids
        return next((self._tokenizer.token_text(one) for one in after[:2] if one in specials), "")

    def _write(self, messages: Sequence[ChatMessage], *, generation_prompt: bool = True) -> str:
        write = self._tokenizer.write_chat
        return write(messages, self._tools, self._arguments, generation_prompt=generation_prompt)


def _opening(history: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages up to the first user message: more of them cost time and change no seam."""
    user = next((place for place, message in enumerate(history) if message.get("role") == "user"), len(history))
    return history[: user + 1]


def _mark() -> str:
    return "x" + secrets.token_hex(8)


def _message(text: str, *, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": text}


def _placeholders(calls: Sequence[CalledTool]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Messages to render in place of the turn, the best first, each with its marks."""
    if calls:
        marks = [_mark() for _ in calls]
        yield calling_message(calls, [{"x": mark} for mark in marks]), marks
        # A template that writes no call may show the text beside it; one that wants arguments as text refuses both.
        mark = _mark()
        yield calling_message(calls, [{} for _ in calls], text=mark), [mark]
    mark = _mark()
    yield _message(mark), [mark]


def calling_message(calls: Sequence[CalledTool], arguments: Sequence[Any], text: str = "") -> dict[str, Any]:
    """Make the assistant's message that calls tools, as chat templates take it."""
    written = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": given}}
        for call, given in zip(calls, arguments, strict=True)
    ]
    return _message(text) | {"tool_calls": written}
