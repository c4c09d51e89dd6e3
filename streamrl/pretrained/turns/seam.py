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
from typing import Any

import msgspec

from streamrl.base.types import TokenArray
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer

ChatMessage = Mapping[str, Any]


class CannotContinueError(ChatError):
    """A chat that the model's template cannot continue by tokens; the message says why."""


class SeamKind(StrEnum):
    """Meeting of the sampled tokens and the seam.

    ``EXACT``: as the template writes it. ``CLOSED``: the turn ended without a token that ends it (its length, a stop),
    and the seam closes it. ``OTHER_CLOSER``: it ended with another token than the template writes in a history.
    ``OTHER_OPENER``: with a token that opens another message than the appended one."""

    EXACT = "exact"
    CLOSED = "closed"
    OTHER_CLOSER = "other_closer"
    OTHER_OPENER = "other_opener"


class Seam(msgspec.Struct, frozen=True):
    """``token_ids``: int32, to be put behind the sampled ones; none of them is trained."""

    token_ids: TokenArray
    kind: SeamKind


class CalledTool(msgspec.Struct, frozen=True):
    """A call of a sampled turn, by what messages of tools refer to."""

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
        self._tokenizer, self._tools, self._arguments = tokenizer, tools, arguments
        self._stops = {token_id: tokenizer.token_text(token_id) for token_id in tokenizer.eos_token_ids}

    def seam(
        self,
        history: Sequence[ChatMessage],
        calls: Sequence[CalledTool],
        appended: Sequence[ChatMessage],
        last: int | None,
    ) -> Seam:
        """Return what continues a chat behind a sampled turn. ``history``: its messages before the turn, of which those
        up to the first one of the user are enough; ``calls``: of the turn; ``appended``: messages behind it; ``last``:
        the last sampled token (None: there is none). Raises ``CannotContinueError``."""
        text = self.text(history, calls, appended)
        ids = self._tokenizer.encode_fragment(text)
        if last not in self._stops:
            return Seam(ids, SeamKind.CLOSED)
        if ids[0] == last:
            return Seam(ids[1:], SeamKind.EXACT)
        # One that opens the appended message does not stand behind a turn that is the last one.
        stop = self._stops.get(ids[0])
        if stop and stop not in self._behind_turn(history, calls, (), generation_prompt=False):
            return Seam(ids, SeamKind.OTHER_OPENER)
        return Seam(ids[1:], SeamKind.OTHER_CLOSER)

    def text(self, history: Sequence[ChatMessage], calls: Sequence[CalledTool], appended: Sequence[ChatMessage]) -> str:
        """The text of the seam. Raises ``CannotContinueError``."""
        behind = self._behind_turn(history, calls, appended)
        # A template may close turns of a history with a special token that never ends a sampled one.
        stops = [*self._stops.values(), self._closer]
        places = [at for stop in stops if stop and (at := behind.find(stop)) >= 0]
        if not places:
            raise CannotContinueError("the model's chat template cannot be continued: it writes no token behind a turn")
        return behind[min(places) :]

    def _behind_turn(
        self,
        history: Sequence[ChatMessage],
        calls: Sequence[CalledTool],
        appended: Sequence[ChatMessage],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return what the template writes behind the texts of the turn."""
        problems = []
        for message, marks in _stand_ins(calls):
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

    @property
    def _closer(self) -> str:
        """The special token right behind a plain turn of a history; empty: there is none."""
        mark = _mark()
        turns = [_said("x", role="user"), _said(mark), _said("x", role="user")]
        try:
            text = self._write(turns)
        except ChatError:
            return ""
        behind = self._tokenizer.encode_fragment(text[text.rfind(mark) + len(mark) :])
        specials = self._tokenizer.special_token_ids
        return next((self._tokenizer.token_text(one) for one in behind[:2] if one in specials), "")

    def _write(self, messages: Sequence[ChatMessage], *, generation_prompt: bool = True) -> str:
        write = self._tokenizer.write_chat
        return write(messages, self._tools, self._arguments, generation_prompt=generation_prompt)


def _opening(history: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Messages to the first of the user: more of them cost time and do not change a seam."""
    user = next((place for place, message in enumerate(history) if message.get("role") == "user"), len(history))
    return history[: user + 1]


def _mark() -> str:
    return "x" + secrets.token_hex(8)


def _said(text: str, *, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": text}


def _stand_ins(calls: Sequence[CalledTool]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Messages that may stand for the turn, the best first, each with its marks."""
    if calls:
        marks = [_mark() for _ in calls]
        yield _said("") | {"tool_calls": _called(calls, [{"x": mark} for mark in marks])}, marks
        # A template that writes no call may show the text beside it; one that wants arguments as text refuses both.
        mark = _mark()
        yield _said(mark) | {"tool_calls": _called(calls, [{} for _ in calls])}, [mark]
    mark = _mark()
    yield _said(mark), [mark]


def _called(calls: Sequence[CalledTool], arguments: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": given}}
        for call, given in zip(calls, arguments, strict=True)
    ]
