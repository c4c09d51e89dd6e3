"""The model as code of an environment talks to it: ``EpisodePolicy``, and its chats. Texts become token ids by
the model's own chat template; what was sampled is never tokenised again (``pretrained.turns``)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.messages import ReturnedCall
from streamrl.base.types import FinishReason, TokenArray, token_array
from streamrl.pretrained.turns.seam import ChatMessage, SeamKind, calling_message
from streamrl.pretrained.turns.tool_calls import ToolCall
from streamrl.run.environments.chat_tokens import Appended, ChatModel, called_tools, sampled_message
from streamrl.run.environments.tools import OpenTools, ToolBox, ToolContext, call_user
from streamrl.run.environments.turns import CallRecord, LimitedTurns, SampledTurn

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


class EpisodePolicy:
    """The model, in one episode. ``seed``: of the trajectory; ``prompt_seed``: the same for all trajectories of a
    prompt; ``random``: seeded by ``seed``. ``counts``: calls of tools by their end; ``notes``: other counts;
    ``turn_rewards``: by number of the turn, of those that have one."""

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
        self.trajectory = trajectory
        self.prompt_id = prompt_id
        self.evaluation = evaluation
        self.seed = seed
        self.prompt_seed = prompt_seed
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.turn_rewards: dict[int, float] = {}
        self.chat_model = model
        self.turns = turns
        self._record = record
        self._stack = stack
        self._system = system

    def chat(self, *, system: str | None = None, tools: Sequence[Any] | ToolBox = ()) -> Chat:
        """Begin a conversation. ``system``: its system message (None: that of the recipe); ``tools``: typed functions
        or classes that the model may call. Raises ``RecipeError`` for tools that cannot be described to a model."""
        box = tools if isinstance(tools, ToolBox) else self.chat_model.toolbox(tuple(tools)) if tools else None
        return Chat(self, self._system if system is None else system, box)

    def reward(self, turn: Reply | SampledTurn, reward: float) -> None:
        """Add ``reward`` to that of ``turn``, and so to that of the trajectory."""
        number = turn.turn if isinstance(turn, Reply) else turn.number
        self.turn_rewards[number] = self.turn_rewards.get(number, 0.0) + float(reward)

    def at_end(self, function: Callable[[], Any]) -> None:
        """Call ``function`` when the episode has ended, however it ended."""
        self._stack.push_async_callback(call_user, function)

    async def sample(self, appended: TokenArray | Sequence[int] = (), *, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn after ``appended`` token ids, for an environment that writes the tokens itself."""
        return await self.turns.sample(token_array(appended), most_tokens=most_tokens)

    def decode(self, token_ids: TokenArray) -> str:
        """Return the text of token ids, without special tokens."""
        return self.chat_model.tokenizer.decode(token_ids)


class Chat:
    """One conversation: what is said to the model, and its turns."""

    def __init__(self, model: EpisodePolicy, system: str, box: ToolBox | None) -> None:
        self._model = model
        self._box = box
        of = model.chat_model
        # None: a model of texts, without a chat template.
        self._tokens = of.tokens(box, box.schemas if box else ()) if of.tokenizer.chat_templates else None
        self.messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []
        self._last: Reply | None = None
        self._text = ""  # of the newest sequence, to be compared with what the template writes
        self._open_tools: OpenTools | None = None

    async def say(self, said: Said) -> Reply:
        """Say something to the model, and return its next turn. Raises ``EpisodeLimit``, ``ChatError`` where the
        model's chat template refuses it."""
        return await self._next(_messages(said))

    async def run_tools(self, reply: Reply) -> Reply:
        """Run the calls of ``reply``, the newest turn, say their results, and return the next turn. Where its calls
        could not be read, the model gets the reason. Raises ``EpisodeLimit``."""
        if not reply.calls:
            self._model.counts["malformed"] += 1
            return await self._next([{"role": "user", "content": f"error: {reply.problem}"}])
        results = []
        for place, called in enumerate(called_tools(reply.turn, reply.calls)):
            text = await self._run(reply.turn, place, reply.calls[place])
            results.append({"role": "tool", "tool_call_id": called.call_id, "name": called.name, "content": text})
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

    async def _next(self, messages: Sequence[ChatMessage]) -> Reply:
        last = self._last
        said = [*self.messages, *messages]
        if last is None:
            if self.messages and any(message.get("role") == "system" for message in messages):
                raise ValueError("the chat has a system message, and another one is said: leave one out")
            appended = self._begin(said)
            after = -1
        else:
            appended, after = self._continue(last, said)
        turn = await self._model.turns.sample(appended, after=after)
        self.messages = said
        if self._tokens is not None:
            self._text = (self._text if after >= 0 else "") + self._tokens.text(appended + turn.token_ids)
        self._last = reply = self._read(turn)
        called = calling_message(called_tools(reply.turn, reply.calls), [call.arguments for call in reply.calls])
        self.messages.append(sampled_message(reply.text, reply.reasoning, called["tool_calls"]))
        return reply

    def _begin(self, said: Sequence[ChatMessage]) -> TokenArray:
        if self._tokens is None:
            return self._model.chat_model.tokenizer.encode(_texts(said))
        return self._counted(self._tokens.prompt_tokens(said))

    def _continue(self, last: Reply, said: Sequence[ChatMessage]) -> tuple[TokenArray, int]:
        """Tokens, and the turn that they go on from (-1: none)."""
        if self._tokens is None:
            return self._model.chat_model.tokenizer.encode_fragment(_texts(said[len(self.messages) :])), last.turn
        calls = called_tools(last.turn, last.calls)
        end = last.token_ids[-1] if last.token_ids else -1
        appended = self._tokens.seam_tokens(said, len(self.messages) - 1, calls, end, self._text)
        return self._counted(appended), -1 if appended[1] == SeamKind.REWRITTEN else last.turn

    def _counted(self, appended: Appended) -> TokenArray:
        token_ids, seam, broken = appended
        if seam not in ("", SeamKind.EXACT):
            self._model.notes["rewritten_turns" if seam == SeamKind.REWRITTEN else f"seam_{seam}"] += 1
        if broken:
            self._model.notes["special_tokens"] += broken
        return token_ids

    def _read(self, turn: SampledTurn) -> Reply:
        ids = turn.token_ids
        finish = turn.finish_reason
        number = turn.number
        if self._tokens is None:
            return Reply(self._model.decode(ids), "", (), "", finish, ids, number)
        parsed = self._tokens.parse(turn, calls=self._box is not None)
        problem = parsed.problem if self._box is not None else ""
        return Reply(parsed.text, parsed.reasoning, parsed.calls, problem, finish, ids, number)


def _messages(said: Said) -> Sequence[ChatMessage]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [said] if isinstance(said, Mapping) else list(said)


def _texts(messages: Sequence[ChatMessage]) -> str:
    """The texts of messages for a model without a chat template."""
    return "".join(str(message["content"]) for message in messages)
