"""The interface through which user code of an environment talks to the model: ``EpisodePolicy`` and its chats.

``worker.py`` makes an ``EpisodePolicy`` for each episode, in the process of the environment worker, and
``environment_forms.py`` passes it to the user's code, or plays a game or runs tools with it. Messages become token ids
by the model's own chat template; sampled tokens are never tokenised again (``pretrained.turns``)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from msgspec import Struct, json, structs

from streamrl.base.errors import RecipeError
from streamrl.base.messages import ReturnedCall
from streamrl.base.types import FinishReason, JsonMapping, TokenArray, Turn, token_array
from streamrl.pretrained.turns.seam_tokens import ChatMessage, SeamKind
from streamrl.pretrained.turns.tool_calls import ParsedTurn, ToolCall
from streamrl.run.environments.chat_tokens import AppendedTokens, ChatModel, ChatTokens, called_tools, sampled_message
from streamrl.run.environments.tools import MachineError, OpenTools, ToolBox, ToolContext, UserThread, text_of
from streamrl.run.environments.turns import CallRecord, OpenEpisode

ChatInput = str | ChatMessage | Sequence[ChatMessage]
"""New messages for the model: a text of the user, one message, or several messages."""


_CONTENT = (str, list, type(None))
"""Types of the content of a message: a text, parts, or nothing beside calls."""


class Reply(Struct, frozen=True):
    """A turn of the model.

    ``text``: text without reasoning and calls;
    ``reasoning``: text of the reasoning;
    ``calls``: calls of tools;
    ``problem``: reason, in words for the model, why its calls cannot be read;
    ``token_ids``: sampled token ids;
    ``turn``: number of the turn in its trajectory, from 0."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    problem: str
    finish_reason: FinishReason
    token_ids: TokenArray
    turn: int

    @property
    def ended(self) -> bool:
        """Return whether the model ended the turn itself, and not the limit of its length."""
        return self.finish_reason is FinishReason.STOP


class EpisodePolicy:
    """The model, in one episode.

    ``evaluation``: whether the episode belongs to an evaluation;
    ``seed``: seed of the trajectory;
    ``prompt_seed``: seed of the prompt, the same for all its trajectories;
    ``random``: random generator with ``seed``;
    ``counts``: numbers of calls of tools by their ``ToolEnd``, and of malformed ones;
    ``notes``: other counts by name;
    ``failure``: failure of this host for which the trajectory is not trained, whatever the user's code does; empty:
    none;
    ``turn_rewards``: rewards of turns that have one, by number of the turn;
    ``chat_model``: tokenizer and call format of the model;
    ``turns``: sampler of turns, within the limits of the recipe."""

    def __init__(
        self,
        model: ChatModel,
        turns: OpenEpisode,
        record: CallRecord,
        stack: AsyncExitStack,
        *,
        trajectory: str,
        prompt_id: str,
        seed: int,
        prompt_seed: int,
        evaluation: bool,
        system: str,
    ) -> None:
        self.trajectory = trajectory
        self.prompt_id = prompt_id
        self.evaluation = evaluation
        self.seed = seed
        self.prompt_seed = prompt_seed
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.failure = ""
        self.turn_rewards: dict[int, float] = {}
        self.chat_model = model
        self.turns = turns
        self._record = record
        self._stack = stack
        self._system = system

    def chat(self, *, system: str | None = None, tools: Sequence[Any] | ToolBox = ()) -> Chat:
        """Begin a conversation. ``system``: text of the system message (None: the text in the recipe); ``tools``: typed
        functions or classes that the model may call. Raises ``RecipeError`` for tools that cannot be described to a
        model."""
        box = None
        if isinstance(tools, ToolBox):
            box = tools
        elif tools:
            box = self.chat_model.toolbox(tuple(tools))
        return Chat(self, self._system if system is None else system, box)

    def reward(self, turn: Reply | Turn, reward: float) -> None:
        """Add ``reward`` to the reward of ``turn``, and so to the reward of the trajectory."""
        number = turn.turn if isinstance(turn, Reply) else turn.number
        self.turn_rewards[number] = self.turn_rewards.get(number, 0.0) + float(reward)

    def at_end(self, function: Callable[[], Any]) -> None:
        """Call ``function`` when the episode has ended, however it ended."""
        thread = UserThread()
        self._stack.callback(thread.close)
        self._stack.push_async_callback(thread.call, function)

    async def sample(self, appended: TokenArray | Sequence[int] = (), *, max_tokens: int = 0) -> Turn:
        """Sample a turn after ``appended`` token ids, for an environment that makes the tokens itself."""
        return await self.turns.sample(token_array(appended), max_tokens=max_tokens)

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text of token ids, without special tokens."""
        return self.chat_model.tokenizer.decode(token_ids)


class Chat:
    """One conversation: the messages to the model, and its turns."""

    def __init__(self, model: EpisodePolicy, system: str, box: ToolBox | None) -> None:
        self._model = model
        self._box = box
        self._tokens: ChatTokens | None = None  # stays None for a base model, which has no chat template
        if model.chat_model.tokenizer.chat_templates:
            self._tokens = model.chat_model.tokens(box, () if box is None else box.schemas)
        self.messages: list[ChatMessage] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._last: Reply | None = None
        self._text = ""
        """Text of the newest token sequence, to be compared with the text that the template renders."""
        self._open_tools: OpenTools | None = None

    async def say(self, content: ChatInput) -> Reply:
        """Append ``content`` to the conversation, and return the model's next turn. Raises ``EpisodeLimit``, and
        ``ChatError`` where the model's chat template refuses the messages."""
        return await self._next(_messages(content))

    async def run_tools(self, reply: Reply) -> Reply:
        """Run the calls of ``reply``, the newest turn, append their results, and return the next turn. Where the calls
        could not be read, the model gets the reason. Raises ``EpisodeLimit``."""
        if not reply.calls:
            self._model.counts["malformed"] += 1
            return await self._next([{"role": "user", "content": f"error: {reply.problem}"}])
        results = []
        for place, tool in enumerate(called_tools(reply.turn, reply.calls)):
            text = await self._run(reply.turn, place, reply.calls[place])
            results.append({"role": "tool", "tool_call_id": tool.call_id, "name": tool.name, "content": text})
        return await self._next(results)

    async def open_tools(self, columns: JsonMapping | None = None) -> OpenTools:
        """Open the tools of this conversation, once: tool classes are instantiated, and reset with ``columns``."""
        if self._open_tools is None:
            if self._box is None:
                raise RecipeError("a chat without tools cannot run calls: give them to model.chat(tools=...)")
            tools = self._box.open_for_episode(columns, self._model.prompt_seed)
            self._open_tools = await self._model._stack.enter_async_context(tools)
        return self._open_tools

    async def _run(self, turn: int, place: int, call: ToolCall) -> str:
        """Return the result of ``call``. A call that returned before the episode began again has the recorded result;
        a call of a stateful tool is made all the same, because it brings the new object into the old state."""
        model = self._model
        tools = await self.open_tools()
        call_json = json.encode(call).decode()
        returned = model._record.find(turn, place, call_json)
        if returned is None or tools.keeps_state(call.name):
            context = ToolContext(model.trajectory, turn, model.seed)
            try:
                result = await tools.run(call, context)
            except MachineError as error:
                model.failure = str(error)
                raise
            returned = ReturnedCall(turn=turn, place=place, call=call_json, **structs.asdict(result))
            model._record.add(returned)
        model.counts[returned.end] += 1
        return returned.text

    async def _next(self, new_messages: Sequence[ChatMessage]) -> Reply:
        """Append ``new_messages``, and return the model's next turn. The conversation is unchanged where that fails."""
        last = self._last
        messages = [*self.messages, *new_messages]
        if last is None:
            if self.messages and any(message.get("role") == "system" for message in new_messages):
                raise ValueError("the chat has a system message, and another one is said: leave one out")
            appended = self._first_tokens(messages)
            after = -1
        else:
            appended, after = self._next_tokens(last, messages)
        turn = await self._model.turns.sample(appended, after=after)
        self.messages = messages
        if self._tokens is not None:
            new_text = self._tokens.text(appended + turn.token_ids)
            self._text = new_text if after < 0 else self._text + new_text
        self._last = reply = self._read(turn)
        self.messages.append(sampled_message(reply.turn, reply.text, reply.reasoning, reply.calls))
        return reply

    def _first_tokens(self, messages: Sequence[ChatMessage]) -> TokenArray:
        if self._tokens is None:
            return self._model.chat_model.tokenizer.encode(_texts(messages))
        return self._count(self._tokens.prompt_tokens(messages))

    def _next_tokens(self, last: Reply, messages: Sequence[ChatMessage]) -> tuple[TokenArray, int]:
        """Return the tokens to append, and the number of the turn that they follow (-1: they begin a sequence)."""
        if self._tokens is None:
            new_messages = messages[len(self.messages) :]
            return self._model.chat_model.tokenizer.encode_fragment(_texts(new_messages)), last.turn
        calls = called_tools(last.turn, last.calls)
        last_token = last.token_ids[-1] if last.token_ids else -1
        turn_place = len(self.messages) - 1
        appended = self._tokens.seam_tokens(messages, turn_place, calls, last_token, self._text)
        after = -1 if appended.seam == SeamKind.REWRITTEN else last.turn
        return self._count(appended), after

    def _count(self, appended: AppendedTokens) -> TokenArray:
        """Note an unusual seam and broken special tokens, and return the token ids."""
        if appended.seam == SeamKind.REWRITTEN:
            self._model.notes["rewritten_turns"] += 1
        elif appended.seam not in ("", SeamKind.EXACT):
            self._model.notes[f"seam_{appended.seam}"] += 1
        if appended.broken:
            self._model.notes["special_tokens"] += appended.broken
        return appended.token_ids

    def _read(self, turn: Turn) -> Reply:
        if self._tokens is None:
            parsed = ParsedTurn(self._model.decode(turn.token_ids))
        else:
            parsed = self._tokens.parse(turn, calls=self._box is not None)
        if self._box is None:  # without tools, a text that looks like a call is a text
            parsed = structs.replace(parsed, problem="")
        return Reply(
            parsed.text, parsed.reasoning, parsed.calls, parsed.problem, turn.finish_reason, turn.token_ids, turn.number
        )


def _messages(content: Any) -> list[ChatMessage]:
    """Return the messages that ``content`` is, or else a message of the user with its text."""
    if content is None:
        raise TypeError("None is said to the model: say, or return from reset and step, a text or messages")
    messages = content if isinstance(content, list | tuple) else [content]
    for message in messages:
        if not (isinstance(message, Mapping) and "role" in message and isinstance(message.get("content", 0), _CONTENT)):
            return [{"role": "user", "content": text_of(content)}]
    return list(messages)


def _texts(messages: Sequence[ChatMessage]) -> str:
    """Return the texts of messages, for a model without a chat template."""
    return "".join(str(message["content"]) for message in messages)
