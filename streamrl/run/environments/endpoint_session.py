"""One trajectory behind the endpoint: a request of any API is matched to the sampled turn that it goes on from, and is
answered once, however often a client repeats it. What was sampled is never tokenised again."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.pretrained.turns.seam import CalledTool, CannotContinueError, SeamKind, calling_message
from streamrl.run.environments.chat_tokens import Appended, ChatModel, ChatTokens, called_tools, sampled_message
from streamrl.run.environments.turns import EpisodeLimit, SampledTurn, TurnSampler

ENDED = "the trajectory of this key has ended"
_LARGE = 1 << 17

log = logging.getLogger(__name__)


class ApiError(StreamRLError):
    """A request that is refused with an HTTP ``status``; the message goes to the client in the form of its API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Digest = tuple[bytes, str]
"""A message without its reasoning, and the reasoning, which a client may leave out of what it sends back."""


class ChatRequest(msgspec.Struct, frozen=True):
    """A request in one form for all APIs. ``messages``, ``tools``: as chat templates take them, with their digests;
    ``most_tokens``: of the answer (0: the run's limit); ``calls``: tools may be called; ``usage``: wanted in a stream;
    ``ignored``: names of parameters that are the run's; ``digest``: the same for equal requests."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    chat: Sequence[Digest]
    tool_set: bytes
    digest: bytes
    model: str
    most_tokens: int
    stream: bool
    calls: bool
    usage: bool
    logprobs: bool
    ignored: Sequence[str]


class ChatAnswer(msgspec.Struct, frozen=True):
    """The answer to a request. ``calls``: as chat templates take them; ``identity``: random, the same in every
    repetition; ``created``: seconds since 1970."""

    turn: SampledTurn
    text: str
    reasoning: str
    calls: Sequence[dict[str, Any]]
    prompt_tokens: int
    identity: str
    created: int


class _Node:
    """A request and its answer. ``end``: messages of the chat with the answer; ``children``: nodes that go on from it;
    ``tokens``, ``text``: of the sequence with the answer; ``message``: the answer, as chat templates take it."""

    def __init__(self, parent: _Node | None, request: ChatRequest) -> None:
        self.parent = parent
        self.chat = request.chat
        self.tool_set = request.tool_set
        self.digest = request.digest
        self.end = len(request.chat) + 1
        self.children = 0
        self.tokens = 0
        self.text = ""
        self.done = anyio.Event()
        self.failure = ApiError(410, ENDED)
        self.answer: ChatAnswer | None = None
        self.said: Digest = b"", ""
        self.message: dict[str, Any] = {}

    def is_begin_of(self, chat: Sequence[Digest]) -> bool:
        """Whether ``chat`` goes on from this answer, if it does from that of ``parent``."""
        begin = self.parent.end if self.parent else 0
        at = self.end - 1
        if self.answer is None or len(chat) <= at or chat[at][0] != self.said[0]:
            return False
        same = all(one[0] == other[0] for one, other in zip(chat[begin:at], self.chat[begin:], strict=True))
        return same and chat[at][1] in ("", self.said[1])


class EndpointSession:
    """The chats of one trajectory, whose requests have ``key``. ``turns_at_once``: calls of ``sampler`` at once.
    ``figures``: counts by name, for the end of the episode."""

    def __init__(self, key: str, sampler: TurnSampler, model: ChatModel, *, turns_at_once: int = 1) -> None:
        self.key = key
        self.figures = Counter[str]()
        self.open_requests = 0
        self.model = model
        self._sampler = sampler
        self._free = anyio.Semaphore(turns_at_once)
        self._nodes: list[_Node] = []
        self._requests: dict[bytes, _Node] = {}
        self._sampling: set[anyio.CancelScope] = set()
        self._closed = False

    def close(self) -> None:
        """End the trajectory: what is being sampled is cancelled, and all requests are answered with 410."""
        self._closed = True
        for scope in self._sampling:
            scope.cancel()

    async def answer(self, request: ChatRequest, *, retry: bool = False, again: bool = False) -> ChatAnswer:
        """Answer ``request``. One that is being answered, or was and not gone on from, has the same answer again.
        ``retry``: the client says that it repeats the request, which has the same answer whatever followed it;
        ``again``: another answer is wanted. Raises ``ApiError``."""
        if self._closed:
            raise ApiError(410, ENDED)
        self.figures.update(f"ignored/{name}" for name in request.ignored)
        node = self._requests.get(request.digest)
        if node is None or not (retry or not (again or node.children)):
            # There is no await from here to where the node is known: that is the lock of the trajectory.
            node = _Node(self._place(request), request)
            self._nodes.append(node)
            self._requests[request.digest] = node
            await self._fill(node, request)
        else:
            self.figures["retries"] += 1
            await node.done.wait()
        if node.answer is None:
            raise node.failure
        return node.answer

    async def count(self, request: ChatRequest) -> int:
        """Count the prompt tokens of ``request``; nothing is sampled. Raises ``ApiError``."""
        try:
            return (await self._prompt(_Node(self._place(request), request), request))[2]
        except (StreamRLError, RecursionError) as error:
            raise ApiError(400, str(error)) from None

    def _place(self, request: ChatRequest) -> _Node | None:
        """The deepest answer that a chat goes on from, of several the latest; None: it begins a new sequence."""
        found: set[_Node | None] = {None}
        deepest: _Node | None = None
        for node in self._nodes:
            if node.parent in found and node.tool_set == request.tool_set and node.is_begin_of(request.chat):
                found.add(node)
                deepest = node if deepest is None or node.end >= deepest.end else deepest
        return deepest

    async def _fill(self, node: _Node, request: ChatRequest) -> None:
        """Sample the answer of ``node``. A node without one is forgotten: the request, repeated, is sampled."""
        parent = node.parent
        scope = anyio.CancelScope()
        if parent is not None:
            parent.children += 1
        self._sampling.add(scope)
        try:
            with scope:
                await self._sample(node, request)
        except (StreamRLError, EpisodeLimit, RecursionError) as error:
            node.failure = error if isinstance(error, ApiError) else ApiError(400, str(error))
        except Exception as error:
            log.exception("a request of an agent could not be answered")
            node.failure = ApiError(500, f"the turn could not be sampled ({type(error).__name__}: {error})")
        finally:
            self._sampling.discard(scope)
            if node.answer is None:
                self._nodes.remove(node)
                if parent is not None:
                    parent.children -= 1
                if self._requests.get(node.digest) is node:
                    del self._requests[node.digest]
            node.done.set()

    async def _sample(self, node: _Node, request: ChatRequest) -> None:
        tokens, (appended, seam, broken), prompt_tokens = await self._prompt(node, request)
        parent = node.parent if seam not in ("", SeamKind.REWRITTEN) else None
        after = parent.answer.turn.number if parent is not None and parent.answer is not None else -1
        async with self._free:
            turn = await self._sampler.sample(appended, after=after, most_tokens=request.most_tokens)
        node.tokens = prompt_tokens + len(turn.token_ids)
        node.text = (parent.text if parent is not None else "") + tokens.text(appended + turn.token_ids)
        parsed = tokens.parse(turn, calls=request.calls)
        self.figures.update(["turns", f"seam_{seam}" if parent is not None else "sequences"])
        self.figures["rewritten_turns"] += seam == SeamKind.REWRITTEN
        self.figures["special_tokens"] += broken
        self.figures["malformed_calls"] += request.calls and bool(request.tools) and bool(parsed.problem)
        called = called_tools(turn.number, parsed.calls)
        calls = calling_message(called, [call.arguments for call in parsed.calls])["tool_calls"]
        text = parsed.text
        thought = parsed.reasoning
        made = (secrets.token_hex(12), int(time.time()))
        node.message = sampled_message(text, thought, calls)
        node.said = message_digest(node.message)
        node.answer = ChatAnswer(turn, text, thought, calls, prompt_tokens, *made)

    async def _prompt(self, node: _Node, request: ChatRequest) -> tuple[ChatTokens, Appended, int]:
        """Return how the chat is tokenised, what is appended to it, and the tokens of the prompt."""
        work = partial(self._appended, node, request)
        large = sum(len(message["content"]) for message in request.messages) > _LARGE
        tokens, appended = await anyio.to_thread.run_sync(work) if large else work()
        parent = node.parent if appended[1] not in ("", SeamKind.REWRITTEN) else None
        return tokens, appended, (parent.tokens if parent is not None else 0) + len(appended[0])

    def _appended(self, node: _Node, request: ChatRequest) -> tuple[ChatTokens, Appended]:
        tokens = self.model.tokens(request.tool_set, request.tools)
        parent = node.parent
        messages = [*request.messages]
        if parent is not None and (answer := parent.answer) is not None:
            calls = [CalledTool(call["function"]["name"], call["id"]) for call in answer.calls]
            last = answer.turn.token_ids[-1] if answer.turn.token_ids else -1
            at: _Node | None = parent
            while at is not None:  # with the reasoning, which a client may leave out
                messages[at.end - 1] = at.message
                at = at.parent
            try:
                return tokens, tokens.seam_tokens(messages, parent.end - 1, calls, last, parent.text)
            except CannotContinueError:  # a sequence of its own, which the template writes as a whole
                self.figures["not_continued"] += 1
        return tokens, tokens.prompt_tokens(request.messages)


def digest_of(*values: Any) -> bytes:
    """A digest of JSON values, the same whatever the order of keys and however a whole number is written."""
    numbers_alike = json.loads(json.dumps(values), parse_int=float)
    return blake2b(json.dumps(numbers_alike, sort_keys=True).encode(), digest_size=16).digest()


def message_digest(message: Mapping[str, Any]) -> Digest:
    """The digest of a message as chat templates take it."""
    text = message["content"].strip() if message["role"] == "assistant" else message["content"]
    calls = [(one["id"], one["function"]) for one in message.get("tool_calls", ())]
    said = digest_of(message["role"], text, calls, message.get("tool_call_id", ""))
    return said, message.get("reasoning_content", "").strip()
