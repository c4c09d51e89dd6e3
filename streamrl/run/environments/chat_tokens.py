"""Chats of a model as tokens: what is said becomes token ids by the model's own chat template, and a sampled turn its
text, its reasoning and its calls. What was sampled is never tokenised again."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.types import FinishReason, TokenArray
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam import CalledTool, ChatMessage, ChatSeams, SeamKind
from streamrl.pretrained.turns.template_facts import template_facts, without_special_tokens
from streamrl.pretrained.turns.tool_calls import CallReader, ParsedTurn, ToolCall, format_of_template, parse_turn
from streamrl.recipe.environment import TOOL_FORMATS, VLLM, Environment
from streamrl.run.environments.tools import ToolBox, ToolLimits
from streamrl.run.environments.turns import SampledTurn

_REMEMBERED = 64  # sets of tools: an episode may make its own
Appended = tuple[TokenArray, str, int]
"""Token ids (int32), the ``SeamKind`` (empty for a first prompt), and how many special tokens were broken in texts."""


class ChatModel:
    """The model of a run, as chats of ``environment`` need it: tokenizer, template, and the way in which it writes
    calls."""

    def __init__(self, tokenizer: Tokenizer, environment: Environment | None = None) -> None:
        self.tokenizer = tokenizer
        self.environment = environment or Environment()
        self.toolbox = lru_cache(_REMEMBERED)(self._toolbox)
        self._tokens: dict[Hashable, ChatTokens] = {}

    def call_reader(self, tools: Sequence[Any]) -> str | CallReader:
        """Return what ``parse_turn`` reads calls of ``tools`` (JSON schemas) with. Raises ``RecipeError`` where the way
        in which they are written is not known."""
        if (found := self.environment.tool_format).startswith(VLLM):
            from streamrl.run.environments.vllm_parsers import vllm_reader

            return vllm_reader(found, self.tokenizer, tools)
        if found := found if found != "auto" else format_of_template(self.tokenizer.chat_templates):
            return found
        raise RecipeError(
            "environment.tool_format: the model's chat template does not show how it writes calls, or it has none: "
            f"write {', '.join(TOOL_FORMATS)} or vllm:PARSER, or take a model that calls tools"
        )

    def _toolbox(self, tools: tuple[Any, ...]) -> ToolBox:
        return ToolBox(tools, ToolLimits(self.environment.tool_seconds, self.environment.tool_characters))

    def tokens(self, tool_set: Hashable, schemas: Sequence[Any]) -> ChatTokens:
        """Return the tokens of chats with the tools of ``schemas``, which ``tool_set`` names. They are made once."""
        if (found := self._tokens.get(tool_set)) is None:
            found = self._tokens[tool_set] = ChatTokens(self, schemas)
            if len(self._tokens) > _REMEMBERED:
                del self._tokens[next(iter(self._tokens))]
        return found


class ChatTokens:
    """Chats of ``model`` with ``tools`` (JSON schemas) as tokens."""

    def __init__(self, model: ChatModel, tools: Sequence[Any]) -> None:
        self._tokenizer = model.tokenizer
        self._given = tools
        shown, self._in_tools = self._broken(tools)
        self._tools = shown or None
        self._call_format = model.call_reader(tools) if tools else "hermes"
        self._rewrites = model.environment.history == "template"
        self._seams = ChatSeams(self._tokenizer, self._tools)
        self._opens_reasoning = template_facts(self._tokenizer, self._tools).opens_reasoning

    def prompt_tokens(self, messages: Sequence[ChatMessage]) -> Appended:
        """Tokens of a chat up to where the assistant begins, in the model's own template. Raises ``ChatError``."""
        shown, broken = self._broken(_named(messages))
        return self._tokenizer.encode_chat(shown, self._tools), "", broken + self._in_tools

    def seam_tokens(
        self, messages: Sequence[ChatMessage], turn: int, calls: Sequence[CalledTool], last: int, before: str = ""
    ) -> Appended:
        """Tokens between a sampled turn and the next one. ``messages``: the chat, in which ``turn`` is the place of the
        sampled turn; ``calls``: of that turn; ``last``: its last token; ``before``: ``text`` of the sequence up to its
        end. Where earlier turns are as the template writes them and ``before`` is not the start of that, the tokens
        are ``REWRITTEN``. Raises ``CannotContinueError``, ``ChatError``."""
        if self._rewrites:
            shown, broken = self._broken(_named(messages))
            whole = self._tokenizer.render_chat(shown, self._tools)
            if not "".join(whole.split()).startswith(before):
                return self._tokenizer.encode_fragment(whole), SeamKind.REWRITTEN, broken + self._in_tools
        shown, broken = self._broken(_named(messages)[turn + 1 :])
        seam = self._seams.seam(messages[:turn], calls, shown, last)
        return seam.token_ids, seam.kind.value, broken

    def text(self, token_ids: TokenArray) -> str:
        """Text to compare with that of the template, without spaces: these differ wherever arguments are written, and
        are stripped off what was said. Empty where nothing is compared."""
        return "".join(self._tokenizer.decode(token_ids, skip_special=False).split()) if self._rewrites else ""

    def parse(self, turn: SampledTurn, *, calls: bool) -> ParsedTurn:
        """The parts of a turn. Its calls count where it ended by itself and ``calls`` may be made; a call that JSON
        cannot hold (half of a character, a number without end) does not."""
        ids = turn.token_ids
        call_format = self._call_format if calls else "hermes"
        ids = ids[:-1] if ids and ids[-1] in self._tokenizer.eos_token_ids else ids
        text = self._tokenizer.decode(ids, skip_special=False)
        inside = self._opens_reasoning
        ended = calls and turn.finish_reason is FinishReason.STOP
        parsed = parse_turn(text, call_format, self._given, ended=ended, in_reasoning=inside)
        try:
            json.dumps([call.arguments for call in parsed.calls], ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            return parse_turn(text, call_format, self._given, ended=False, in_reasoning=inside)
        return parsed

    def _broken(self, value: Any) -> tuple[Any, int]:
        """``value`` with all special tokens in its texts broken apart, and how many they were."""
        if isinstance(value, str):
            return without_special_tokens(self._tokenizer, value) if value else (value, 0)
        if isinstance(value, Mapping):
            keys = self._broken(list(value))
            values = self._broken(list(value.values()))
            return dict(zip(keys[0], values[0], strict=True)), keys[1] + values[1]
        if isinstance(value, list | tuple):
            parts = [self._broken(one) for one in value]
            return [part for part, _ in parts], sum(broken for _, broken in parts)
        return value, 0


def _named(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """``messages``, with the name of the tool in every result of one: some templates write it."""
    names = {one["id"]: one["function"]["name"] for message in messages for one in message.get("tool_calls", ())}
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in messages
    ]


def sampled_message(text: str, reasoning: str, calls: Sequence[Any]) -> dict[str, Any]:
    """Make the message of a sampled turn, as chat templates take it. ``calls``: in their form too."""
    thought = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}), **thought}


def called_tools(turn: int, calls: Sequence[ToolCall]) -> list[CalledTool]:
    """Name the calls of a turn, by ids of nine characters, as templates of Mistral want them."""
    return [CalledTool(call.name, f"c{turn:04d}{place:04d}") for place, call in enumerate(calls)]
