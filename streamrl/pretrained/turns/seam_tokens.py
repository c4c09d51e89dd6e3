"""The *seam*: tokens between a sampled turn and the next one, which are the end of the turn, the appended messages, and
the begin of the assistant's next message. Sampled tokens are never decoded and tokenised again. Called by the
environment workers (``run.environments``) for every turn after the first.

The template renders the chat with a placeholder for the sampled turn, whose texts are random marks. The seam begins
after the last mark, at the text of the token that closes the turn. This is a special token, so the seam alone has the
same tokens as within the full text. Changes that the template makes to earlier turns have no effect, because these are
tokens already."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from msgspec import Struct

from streamrl.base.types import JsonMapping, JsonObject, TokenArray
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer

ChatMessage = JsonMapping


class CannotContinueError(ChatError):
    """The model's chat template cannot continue a chat by tokens; the message has the reason."""


class SeamKind(StrEnum):
    """Relation of the last sampled token to the token that the template writes after a turn.

    ``EXACT``: same token. ``CLOSED``: no end token was sampled (length limit, abort), so the seam has the template's.
    ``OTHER_CLOSER``: another end token was sampled. ``OTHER_OPENER``: another end token was sampled, and the template's
    token opens the appended message instead of closing the turn (GLM). ``REWRITTEN``: no seam; the chat as the template
    writes it replaces the earlier tokens."""

    EXACT = "exact"
    CLOSED = "closed"
    OTHER_CLOSER = "other_closer"
    OTHER_OPENER = "other_opener"
    REWRITTEN = "rewritten"


class Seam(Struct, frozen=True):
    """A seam. ``token_ids``: int32, appended to the sampled tokens and not trained."""

    token_ids: TokenArray
    kind: SeamKind


class CalledTool(Struct, frozen=True):
    """A tool call of a sampled turn. ``call_id``: id to which the tool message refers."""

    name: str
    call_id: str


class ChatSeams:
    """Continues chats of one model. ``tools``: JSON schemas, the same as of the first prompt; ``arguments``: further
    variables of the template."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[JsonMapping] | None, arguments: JsonMapping | None
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
        """Return the tokens between a sampled turn and the next one. Raises ``CannotContinueError``.

        ``history``: messages before the turn; those up to the first user message are enough;
        ``calls``: tool calls of the turn;
        ``appended``: messages after the turn;
        ``last``: last sampled token (None: nothing was sampled)."""
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
        """Return the text of the seam. Raises ``CannotContinueError``."""
        after = self._after_turn(history, calls, appended)
        # A template may close turns of a history with a special token that never ends a sampled one.
        stops = [*self._stops.values(), self._closer]
        places = [after.find(stop) for stop in stops if stop and stop in after]
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
        """Return the text that the template writes after the turn. Raises ``CannotContinueError``."""
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
        """Text of the special token that the template writes after a turn without calls; empty: it writes none."""
        mark = _mark()
        turns = [_message("x", role="user"), _message(mark), _message("x", role="user")]
        try:
            text = self._write(turns)
        except ChatError:
            return ""
        after = self._tokenizer.encode_fragment(text[text.rfind(mark) + len(mark) :])
        specials = self._tokenizer.special_token_ids
        return next((self._tokenizer.token_text(token_id) for token_id in after[:2] if token_id in specials), "")

    def _write(self, messages: Sequence[ChatMessage], *, generation_prompt: bool = True) -> str:
        write = self._tokenizer.write_chat
        return write(messages, self._tools, self._arguments, generation_prompt=generation_prompt)


def _opening(history: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return the messages up to the first user message: further messages cost time and do not change the seam."""
    user = next((place for place, message in enumerate(history) if message.get("role") == "user"), len(history))
    return history[: user + 1]


def _mark() -> str:
    return "x" + secrets.token_hex(8)


def _message(text: str, *, role: str = "assistant") -> JsonObject:
    return {"role": role, "content": text}


def _placeholders(calls: Sequence[CalledTool]) -> Iterator[tuple[JsonObject, list[str]]]:
    """Yield messages to render in place of the turn, the best first, each with its marks."""
    if calls:
        marks = [_mark() for _ in calls]
        yield calling_message(calls, [{"x": mark} for mark in marks]), marks
        # A template may write the text beside a call but no call. One that takes arguments as text refuses this message
        # and the one before; then the plain message is left.
        mark = _mark()
        yield calling_message(calls, [{} for _ in calls], text=mark), [mark]
    mark = _mark()
    yield _message(mark), [mark]


def calling_message(calls: Sequence[CalledTool], arguments: Sequence[Any], text: str = "") -> JsonObject:
    """Return the assistant's message that calls tools, in the form that chat templates take. ``arguments``: arguments
    of each call."""
    tool_calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call_arguments}}
        for call, call_arguments in zip(calls, arguments, strict=True)
    ]
    return _message(text) | {"tool_calls": tool_calls}
