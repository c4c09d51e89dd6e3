"""Chats of a model as tokens: the model's own chat template makes token ids of messages, and a sampled turn is parsed
into text, reasoning and calls. Sampled tokens are never tokenised again.

``chat.py`` (user code that talks to the model) and ``endpoint_session.py`` (agents) call it in the process of the
environment worker; the dry run of a recipe makes a ``ChatModel`` to check that calls can be read."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.base.types import FinishReason, JsonMapping, JsonObject, TokenArray, Turn
from streamrl.pretrained.chat_template import ARGUMENTS_COLUMN, ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam_tokens import CalledTool, ChatMessage, ChatSeams, SeamKind, calling_message
from streamrl.pretrained.turns.template_facts import format_of_template, template_facts, without_special_tokens
from streamrl.pretrained.turns.tool_calls import CallReader, ParsedTurn, ToolCall, parse_turn
from streamrl.recipe.environment import TOOL_FORMATS, VLLM, Environment
from streamrl.run.environments.tools import ToolBox, ToolLimits

_CACHED_TOOL_SETS = 64
"""Largest number of tool sets in a cache: an episode may make a tool set of its own, so that they are without limit."""


class AppendedTokens(NamedTuple):
    """Tokens of messages, to be put before the next turn. ``token_ids``: int32; ``seam``: a ``SeamKind``, empty for the
    first prompt of a chat; ``broken``: number of special tokens in texts that were broken apart."""

    token_ids: TokenArray
    seam: str
    broken: int


class ChatModel:
    """The model of a run, as chats of ``environment`` need it: the tokenizer with its chat template, and the format in
    which the model writes calls."""

    def __init__(self, tokenizer: Tokenizer, environment: Environment | None = None) -> None:
        self.tokenizer = tokenizer
        self.environment = environment or Environment()
        self.template_arguments: JsonMapping = {}
        self.toolbox = lru_cache(_CACHED_TOOL_SETS)(self._toolbox)
        self._tokens: dict[Hashable, ChatTokens] = {}

    def call_reader(self, tools: Sequence[Any]) -> str | CallReader:
        """Return the ``call_format`` of ``parse_turn`` for calls of ``tools`` (JSON schemas). Raises ``RecipeError``
        where the format in which the model writes calls is not known."""
        tool_format = self.environment.tool_format
        if tool_format.startswith(VLLM):
            from streamrl.run.environments.vllm_parsers import vllm_reader

            return vllm_reader(tool_format, self.tokenizer, tools)
        if tool_format != "auto":
            return tool_format
        try:
            call_format, written = format_of_template(self.tokenizer, self.template_arguments)
        except ChatError as error:
            raise RecipeError(f"environment.tool_format: {error}") from None
        if not call_format:
            raise RecipeError(
                "environment.tool_format: no format of streamrl reads a call as the model's chat template writes it "
                f"({written[:200] or 'it writes none'}): write {', '.join(TOOL_FORMATS)} or vllm:PARSER, or take a "
                "model that calls tools"
            )
        return call_format

    def of_row(self, columns: JsonMapping) -> ChatModel:
        """Return the model with the variables of the chat template that the row of an episode has. Caches are
        shared."""
        model = copy(self)
        model.template_arguments = columns.get(ARGUMENTS_COLUMN) or {}
        return model

    def _toolbox(self, tools: tuple[Any, ...]) -> ToolBox:
        return ToolBox(tools, ToolLimits(self.environment.tool_seconds, self.environment.tool_characters))

    def tokens(self, tool_set: Hashable, schemas: Sequence[Any]) -> ChatTokens:
        """Return the ``ChatTokens`` of the tools in ``schemas``, which are cached. ``tool_set``: key of the tools in
        the cache."""
        key = (tool_set, msgspec.json.encode(self.template_arguments, order="sorted"))
        chat_tokens = self._tokens.get(key)
        if chat_tokens is None:
            chat_tokens = ChatTokens(self, schemas)
            self._tokens[key] = chat_tokens
            if len(self._tokens) > _CACHED_TOOL_SETS:
                oldest = next(iter(self._tokens))
                del self._tokens[oldest]
        return chat_tokens


class ChatTokens:
    """Chats of ``model`` with ``tools`` (JSON schemas) as tokens."""

    def __init__(self, model: ChatModel, tools: Sequence[Any]) -> None:
        self._tokenizer = model.tokenizer
        self._schemas = tools
        self._arguments = model.template_arguments
        broken_tools, self._broken_in_tools = self._break_special_tokens(tools)
        self._tools = broken_tools or None
        self._call_format = model.call_reader(tools) if tools else "hermes"
        self._rewrites = model.environment.history == "template"
        self._seams = ChatSeams(self._tokenizer, self._tools, self._arguments)
        self._opens_reasoning = template_facts(self._tokenizer, self._tools, self._arguments).opens_reasoning

    def prompt_tokens(self, messages: Sequence[ChatMessage]) -> AppendedTokens:
        """Return the tokens of a chat up to the begin of the assistant's turn, by the model's own template. Raises
        ``ChatError``."""
        safe_messages, broken = self._break_special_tokens(_with_tool_names(messages))
        token_ids = self._tokenizer.encode_chat(safe_messages, self._tools, self._arguments)
        return AppendedTokens(token_ids, "", broken + self._broken_in_tools)

    def seam_tokens(
        self, messages: Sequence[ChatMessage], turn: int, calls: Sequence[CalledTool], last: int, before: str
    ) -> AppendedTokens:
        """Return the tokens between a sampled turn and the next one. With ``environment.history = "template"`` the
        template may rewrite earlier turns; then the tokens are those of the whole chat, with the seam ``REWRITTEN``.
        Raises ``CannotContinueError``, ``ChatError``.

        ``messages``: messages of the chat, the sampled turn among them;
        ``turn``: place of the sampled turn in ``messages``;
        ``calls``: calls of the sampled turn;
        ``last``: last token of the sampled turn;
        ``before``: ``text`` of the token sequence up to the end of the sampled turn."""
        named_messages = _with_tool_names(messages)
        if self._rewrites:
            safe_messages, broken = self._break_special_tokens(named_messages)
            rendered = self._tokenizer.render_chat(safe_messages, self._tools, self._arguments)
            if not _without_spaces(rendered).startswith(before):
                token_ids = self._tokenizer.encode_fragment(rendered)
                return AppendedTokens(token_ids, SeamKind.REWRITTEN, broken + self._broken_in_tools)
        new_messages, broken = self._break_special_tokens(named_messages[turn + 1 :])
        seam = self._seams.seam(messages[:turn], calls, new_messages, last)
        return AppendedTokens(seam.token_ids, seam.kind.value, broken)

    def text(self, token_ids: TokenArray) -> str:
        """Return the text of tokens without spaces, to be compared with the text of the template: spaces differ
        wherever arguments are written, and templates strip messages. Empty where nothing is compared."""
        if not self._rewrites:
            return ""
        return _without_spaces(self._tokenizer.decode(token_ids, skip_special=False))

    def parse(self, turn: Turn, *, calls: bool, stop: Sequence[str] = ()) -> ParsedTurn:
        """Return the parts of a turn. Its calls count if the model ended the turn itself and ``calls`` is True. A call
        that JSON cannot hold (half of a surrogate pair, an infinite number) does not count. ``stop``: texts that end
        the turn; the first of them, and what is behind it, belongs to no part."""
        ids = turn.token_ids
        call_format = self._call_format if calls else "hermes"
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            ids = ids[:-1]
        text, stopped_by = _before_stop(self._tokenizer.decode(ids, skip_special=False), stop)
        read = partial(parse_turn, text, call_format, self._schemas, in_reasoning=self._opens_reasoning)
        parsed = read(finished=calls and turn.finish_reason is FinishReason.STOP)
        try:
            json.dumps([call.arguments for call in parsed.calls], ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            parsed = read(finished=False)
        return structs.replace(parsed, stop=stopped_by)

    def _break_special_tokens(self, value: Any) -> tuple[Any, int]:
        """Break the special tokens in all texts of ``value`` apart, so that no text of a user or a tool can pose as the
        structure of the chat. Return the value and the number of special tokens."""
        counts = []

        def safe(part: Any) -> Any:
            if isinstance(part, Mapping):
                return {safe(key): safe(element) for key, element in part.items()}
            if isinstance(part, list | tuple):
                return list(map(safe, part))
            if isinstance(part, str) and part:
                part, broken = without_special_tokens(self._tokenizer, part)
                counts.append(broken)
            return part

        safe_value = safe(value)
        return safe_value, sum(counts)


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return ``text`` up to the first of the texts ``stop``, and that text; all of ``text`` where it has none."""
    place, end = min([(text.index(end), end) for end in stop if end in text], default=(len(text), ""))
    return text[:place], end


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _with_tool_names(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return ``messages`` with the name of the tool in every result of a tool: some templates write it."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in messages
    ]


def sampled_message(turn: int, text: str, reasoning: str, calls: Sequence[ToolCall]) -> JsonObject:
    """Return the message of the sampled turn with the number ``turn``, as chat templates take it."""
    message: JsonObject = {"role": "assistant", "content": text}
    if calls:
        arguments = [call.arguments for call in calls]
        message["tool_calls"] = calling_message(called_tools(turn, calls), arguments)["tool_calls"]
    if reasoning:  # templates of different families read it by different names
        message["reasoning_content"] = reasoning
        message["thinking"] = reasoning
    return message


def called_tools(turn: int, calls: Sequence[ToolCall]) -> list[CalledTool]:
    """Give the calls of a turn their ids, of nine characters, as templates of Mistral require them."""
    return [CalledTool(call.name, f"c{turn:04d}{place:04d}") for place, call in enumerate(calls)]
