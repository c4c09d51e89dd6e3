"""The model as code of an environment talks to it: ``EpisodePolicy``, and its chats. Texts become token ids by
the model's own chat template; what was sampled is never tokenised again (``pretrained.turns``)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.messages import ReturnedCall
from streamrl.base.types import FinishReason, TokenArray, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.seam import CalledTool, ChatSeams, SeamKind
from streamrl.pretrained.turns.template_facts import TemplateFacts, template_facts, without_special_tokens
from streamrl.pretrained.turns.tool_calls import ToolCall, format_of_template, parse_turn
from streamrl.run.environments.tools import OpenTools, ToolBox, ToolContext, ToolLimits, call_user
from streamrl.run.environments.turns import CallRecord, LimitedTurns, SampledTurn

ChatMessage = Mapping[str, Any]
_REMEMBERED = 64  # sets of tools: an episode may make its own
Said = str | ChatMessage | Sequence[ChatMessage]
"""What may be said to the model: a text of the user, a message, or several."""


class Reply(msgspec.Struct, frozen=True):
    """A turn of the model. ``text``: without reasoning and calls; ``problem``: why its calls cannot be read, for the
    model; ``token_ids``: as sampled."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    problem: str
    finish_reason: FinishReason
    token_ids: TokenArray
    turn: int

    @property
    def ended(self) -> bool:
        """Return whether the model ended the turn, and not the limit of its length."""
        return self.finish_reason is FinishReason.STOP


class ChatModel:
    """The model of a run, as chats of its environment need it: tokenizer, template, and the way in which it writes
    calls (``tool_format``; ``auto``: as its template shows them)."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto", limits: ToolLimits | None = None) -> None:
        self.tokenizer, self._tool_format, self._limits = tokenizer, tool_format, limits
        self.toolbox = lru_cache(_REMEMBERED)(self._toolbox)
        self.facts = lru_cache(_REMEMBERED)(self._facts)
        self.seams = lru_cache(_REMEMBERED)(lambda box: ChatSeams(tokenizer, box.schemas if box else None))

    @cached_property
    def tool_format(self) -> str:
        """The way in which calls are written. Raises ``RecipeError`` where it is not known."""
        if self._tool_format != "auto":
            return self._tool_format
        if found := format_of_template(self.tokenizer.chat_templates):
            return found
        raise RecipeError(
            "environment.tool_format: the model's chat template does not show how it writes calls: write hermes, "
            "qwen_xml, llama_json or mistral"
        )

    def _toolbox(self, tools: tuple[Any, ...]) -> ToolBox:
        return ToolBox(tools, self._limits)

    def _facts(self, box: ToolBox | None) -> TemplateFacts:
        return template_facts(self.tokenizer, box.schemas if box else None)


class EpisodePolicy:
    """The model, in one episode. ``seed``: of the trajectory; ``prompt_seed``: the same for all trajectories of a
    prompt; ``random``: seeded by ``seed``. ``counts``: calls of tools by their end; ``notes``: other counts."""

    def __init__(
        self,
        model: ChatModel,
        turns: LimitedTurns,
        record: CallRecord,
        stack: AsyncExitStack,
        *,
        trajectory: str,
        prompt_id: str,
        seed: int,
        prompt_seed: int = 0,
        evaluation: bool = False,
        system: str = "",
    ) -> None:
        self.trajectory, self.prompt_id, self.evaluation = trajectory, prompt_id, evaluation
        self.seed, self.prompt_seed, self.random = seed, prompt_seed, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.chat_model, self.turns = model, turns
        self._record, self._stack, self._system = record, stack, system

    def chat(self, *, system: str | None = None, tools: Sequence[Any] | ToolBox = ()) -> Chat:
        """Begin a conversation. ``system``: its system message (None: that of the recipe); ``tools``: typed functions
        or classes that the model may call. Raises ``RecipeError`` for tools that cannot be described to a model."""
        box = tools if isinstance(tools, ToolBox) else self.chat_model.toolbox(tuple(tools)) if tools else None
        return Chat(self, self._system if system is None else system, box)

    def at_end(self, function: Callable[[], Any]) -> None:
        """Call ``function`` when the episode has ended, however it ended."""
        self._stack.push_async_callback(call_user, function)

    async def sample(self, appended: TokenArray | Sequence[int] = (), *, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn behind ``appended`` token ids, for an environment that writes the tokens itself."""
        return await self.turns.sample(token_array(appended), most_tokens=most_tokens)

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text of token ids, without special tokens."""
        return self.chat_model.tokenizer.decode(token_ids)


class Chat:
    """One conversation: what is said to the model, and its turns."""

    def __init__(self, model: EpisodePolicy, system: str, box: ToolBox | None) -> None:
        self._model, self._of, self._box = model, model.chat_model, box
        self.messages: list[ChatMessage] = []
        if system:
            self.messages.append(self._safe({"role": "system", "content": system}))
        self._opening: list[ChatMessage] = []
        self._last: Reply | None = None
        self._open_tools: OpenTools | None = None

    async def say(self, said: Said) -> Reply:
        """Say something to the model, and return its next turn. Raises ``EpisodeLimit``, ``ChatError`` where the
        model's chat template refuses it."""
        messages = [self._safe(message) for message in _messages(said)]
        return await self._next(messages)

    async def run_tools(self, reply: Reply) -> Reply:
        """Run the calls of ``reply``, the newest turn, say their results, and return the next turn. Where its calls
        could not be read, the model gets the reason. Raises ``EpisodeLimit``."""
        if not reply.calls:
            self._model.counts["malformed"] += 1
            return await self._next([self._safe({"role": "user", "content": f"error: {reply.problem}"})])
        results = []
        for place, call in enumerate(reply.calls):
            text = await self._run(reply.turn, place, call)
            called = _called(reply.turn, place, call)
            result = {"role": "tool", "tool_call_id": called.call_id, "name": call.name, "content": text}
            results.append(self._safe(result))
        return await self._next(results)

    async def open_tools(self, columns: Mapping[str, Any] | None = None) -> OpenTools:
        """Open the tools of this conversation, once: classes are made, and reset with ``columns``."""
        if self._open_tools is None:
            if self._box is None:
                raise RecipeError("a chat without tools cannot run calls: give them to model.chat(tools=...)")
            opened = self._box.opened(columns or {}, self._model.prompt_seed)
            self._open_tools = await self._model._stack.enter_async_context(opened)
        return self._open_tools

    async def _run(self, turn: int, place: int, call: ToolCall) -> str:
        model = self._model
        tools = await self.open_tools()
        written = msgspec.json.encode(call).decode()
        known = model._record.find(turn, place, written)
        if known is None or tools.keeps_state(call.name):
            context = ToolContext(model.trajectory, turn, model.seed)
            done = await tools.run(call, context)
            known = ReturnedCall(
                turn=turn, place=place, call=written, text=done.text, end=done.end, seconds=done.seconds
            )
            model._record.add(known)
        model.counts[known.end] += 1
        return known.text

    def _safe(self, message: ChatMessage) -> ChatMessage:
        """``message`` with special tokens that its text spells broken."""
        content = message.get("content")
        if isinstance(content, list):  # of parts
            parts = [{**part, "text": self._unspecial(part["text"])} if "text" in part else part for part in content]
            return {**message, "content": parts}
        return {**message, "content": self._unspecial(content)} if isinstance(content, str) else message

    def _unspecial(self, text: str) -> str:
        text, broken = without_special_tokens(self._of.tokenizer, text)
        if broken:
            self._model.notes["special_tokens"] += broken
        return text

    async def _next(self, messages: Sequence[ChatMessage]) -> Reply:
        last, said = self._last, [*self.messages, *messages]
        if last is None:
            if self.messages and any(message.get("role") == "system" for message in messages):
                raise ValueError("the chat has a system message, and another one is said: leave one out")
            appended, after = self._begin(said), -1
        else:
            appended, after = self._continue(last, messages), last.turn
        turn = await self._model.turns.sample(appended, after=after)
        self._opening = self._opening or said
        self.messages = said
        self._last = reply = self._read(turn)
        self.messages.append({"role": "assistant", "content": reply.text})
        return reply

    def _begin(self, said: Sequence[ChatMessage]) -> TokenArray:
        tokenizer = self._of.tokenizer
        if tokenizer.chat_templates:
            return tokenizer.encode_chat(said, self._box.schemas if self._box else None)
        return tokenizer.encode("".join(str(message["content"]) for message in said))

    def _continue(self, last: Reply, messages: Sequence[ChatMessage]) -> TokenArray:
        tokenizer = self._of.tokenizer
        if not tokenizer.chat_templates:  # a model of texts
            return tokenizer.encode_fragment("".join(str(message["content"]) for message in messages))
        calls = [_called(last.turn, place, call) for place, call in enumerate(last.calls)]
        seam = self._of.seams(self._box).seam(
            self._opening, calls, messages, last.token_ids[-1] if last.token_ids else None
        )
        if seam.kind is not SeamKind.EXACT:
            self._model.notes[f"seam_{seam.kind}"] += 1
        return seam.token_ids

    def _read(self, turn: SampledTurn) -> Reply:
        tokenizer, ids = self._of.tokenizer, turn.token_ids
        finish, number = turn.finish_reason, turn.number
        if not tokenizer.chat_templates:
            return Reply(tokenizer.decode(ids), "", (), "", finish, ids, number)
        ended = finish is FinishReason.STOP
        inner = ids[:-1] if ids and ids[-1] in tokenizer.eos_token_ids else ids
        opens = self._of.facts(self._box).opens_reasoning
        schemas = self._box.schemas if self._box else ()
        call_format = self._of.tool_format if self._box else "hermes"
        parsed = parse_turn(tokenizer.decode(inner, False), call_format, schemas, ended=ended, in_reasoning=opens)
        calls, problem = (parsed.calls, parsed.problem) if self._box else ((), "")
        return Reply(parsed.text, parsed.reasoning, calls, problem, finish, ids, number)


def _messages(said: Said) -> Sequence[ChatMessage]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [said] if isinstance(said, Mapping) else list(said)


def _called(turn: int, place: int, call: ToolCall) -> CalledTool:
    return CalledTool(call.name, f"c{turn:04d}{place:04d}")  # nine characters, as templates of Mistral want them
