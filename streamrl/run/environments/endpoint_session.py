"""The chats of one trajectory whose environment is an ``agent``.

``environment_forms.py`` makes an ``EndpointSession`` for each episode, and ``endpoint_server.py`` calls it for each
HTTP request of the agent, in the process of the environment worker. The session matches a request to the sampled turn
that the request continues, samples the next turn from the token ids of that turn, and answers a repeated request once.
Sampled tokens are never tokenised again."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Turn
from streamrl.contracts import TurnSampler
from streamrl.pretrained.turns.seam_tokens import CalledTool, CannotContinueError, SeamKind
from streamrl.pretrained.turns.tool_calls import ParsedTurn
from streamrl.run.environments.chat_tokens import AppendedTokens, ChatModel, ChatTokens, sampled_message
from streamrl.run.environments.turns import EpisodeLimit

TRAJECTORY_ENDED = "the trajectory of this key has ended"
_CHARACTERS_IN_LOOP = 1 << 17
"""Characters of a chat that the event loop tokenises itself; a longer chat is tokenised in a thread."""

log = logging.getLogger(__name__)


class ApiError(StreamRLError):
    """A request that is refused with an HTTP ``status``; the message goes to the client in the form of its API."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageDigest(NamedTuple):
    """A message, to be compared with others. ``content``: digest of everything but the reasoning; ``reasoning``: text
    of the reasoning, which is apart because a client may leave it out of the chat that it sends."""

    content: bytes
    reasoning: str


class ChatRequest(msgspec.Struct, frozen=True):
    """A request, in one form for all APIs.

    ``messages``: messages as chat templates take them;
    ``tools``: JSON schemas of the tools, as chat templates take them;
    ``chat``: digests of ``messages``;
    ``tool_set``: digest of ``tools``;
    ``digest``: digest of everything that decides the answer: equal requests have the same one;
    ``model``: name of the model, which the answer repeats;
    ``max_tokens``: limit of the answer's tokens (0: the limit of the run);
    ``stream``: whether the client wants server-sent events;
    ``calls``: whether the answer may call tools;
    ``usage``: whether the client wants the usage at the end of a stream;
    ``logprobs``: whether the client wants logprobs;
    ``ignored``: names of parameters that the run decides and not the client."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    chat: Sequence[MessageDigest]
    tool_set: bytes
    digest: bytes
    model: str
    max_tokens: int
    stream: bool
    calls: bool
    usage: bool
    logprobs: bool
    ignored: Sequence[str]


class ChatAnswer(msgspec.Struct, frozen=True):
    """The answer to a request.

    ``turn``: sampled turn;
    ``text``: text without reasoning and calls;
    ``reasoning``: text of the reasoning;
    ``calls``: calls of tools, as chat templates take them;
    ``prompt_tokens``: number of tokens before the turn;
    ``identity``: random name, the same in every repetition of the answer;
    ``created``: seconds since 1970."""

    turn: Turn
    text: str
    reasoning: str
    calls: Sequence[dict[str, Any]]
    prompt_tokens: int
    identity: str
    created: int


class _Node:
    """A request and its answer. The nodes of a trajectory are a forest: each tree is a conversation with its forks.

    ``parent``: node whose answer the request continues; None: the request begins a conversation;
    ``chat``, ``tool_set``, ``digest``: digests of the request, as ``ChatRequest`` has them;
    ``end``: number of messages in the chat, the answer included;
    ``children``: number of nodes that continue this answer;
    ``tokens``: length of the token sequence that ends with the answer;
    ``text``: text of that sequence, as ``ChatTokens.text`` gives it;
    ``finished``: event, set once there is an answer or a failure;
    ``failure``: error for the client where there is no answer;
    ``answer``: answer, None until the turn is sampled;
    ``answer_message``: message of the answer, as chat templates take it;
    ``answer_digest``: digest of ``answer_message``."""

    def __init__(self, parent: _Node | None, request: ChatRequest) -> None:
        self.parent = parent
        self.chat = request.chat
        self.tool_set = request.tool_set
        self.digest = request.digest
        self.end = len(request.chat) + 1
        self.children = 0
        self.tokens = 0
        self.text = ""
        self.finished = anyio.Event()
        self.failure = ApiError(410, TRAJECTORY_ENDED)
        self.answer: ChatAnswer | None = None
        self.answer_message: dict[str, Any] = {}
        self.answer_digest = MessageDigest(b"", "")

    def is_continued_by(self, chat: Sequence[MessageDigest]) -> bool:
        """Return whether ``chat`` continues this answer, given that it continues the answer of ``parent``."""
        answer_place = self.end - 1
        if self.answer is None or len(chat) <= answer_place:
            return False
        answer = chat[answer_place]
        if answer.content != self.answer_digest.content:
            return False
        # Messages up to the answer of the parent are known to be equal, which keeps long chats cheap to match.
        begin = self.parent.end if self.parent else 0
        for message, own_message in zip(chat[begin:answer_place], self.chat[begin:], strict=True):
            if message.content != own_message.content:
                return False
        # Forks may differ in their reasoning alone, so reasoning that the client did send must match.
        return answer.reasoning in ("", self.answer_digest.reasoning)


class _Prompt(NamedTuple):
    """The chat of a request as tokens.

    ``chat_tokens``: tokeniser of chats with the tools of the request;
    ``parent``: node whose token sequence the prompt continues (None: the prompt begins a new sequence);
    ``appended``: tokens after the sequence of ``parent``."""

    chat_tokens: ChatTokens
    parent: _Node | None
    appended: AppendedTokens

    @property
    def length(self) -> int:
        """Number of tokens before the turn."""
        before = self.parent.tokens if self.parent is not None else 0
        return before + len(self.appended.token_ids)


class EndpointSession:
    """The chats of one trajectory, whose requests have ``key``. ``turns_at_once``: largest number of concurrent calls
    of ``sampler``. ``figures``: counts by name, which the episode records when it ends."""

    def __init__(self, key: str, sampler: TurnSampler, model: ChatModel, *, turns_at_once: int = 1) -> None:
        self.key = key
        self.figures = Counter[str]()
        self.open_requests = 0
        self.model = model
        self._sampler = sampler
        self._free_turns = anyio.Semaphore(turns_at_once)
        self._nodes: list[_Node] = []
        self._requests: dict[bytes, _Node] = {}
        self._sampling: set[anyio.CancelScope] = set()
        self._closed = False

    def close(self) -> None:
        """End the trajectory: turns that are being sampled are cancelled, and all requests are answered with 410."""
        self._closed = True
        for scope in self._sampling:
            scope.cancel()

    async def answer(self, request: ChatRequest, *, retry: bool = False, resample: bool = False) -> ChatAnswer:
        """Answer ``request``. An equal request, open or answered, shares its answer until a later request continues
        it. ``retry``: the client repeats a lost request, and gets the old answer even if it has been continued;
        ``resample``: the client wants another answer. Raises ``ApiError``."""
        if self._closed:
            raise ApiError(410, TRAJECTORY_ENDED)
        self.figures.update(f"ignored/{name}" for name in request.ignored)
        node = self._requests.get(request.digest)
        if node is not None and (retry or not (resample or node.children)):
            self.figures["retries"] += 1
            await node.finished.wait()
        else:
            # Nothing is awaited from the look-up above until the node is in ``_requests``. Therefore two equal
            # requests cannot both be sampled.
            node = _Node(self._parent_of(request), request)
            self._nodes.append(node)
            self._requests[request.digest] = node
            await self._fill(node, request)
        if node.answer is None:
            raise node.failure
        return node.answer

    async def count(self, request: ChatRequest) -> int:
        """Count the prompt tokens of ``request``; nothing is sampled. Raises ``ApiError``."""
        try:
            prompt = await self._prompt(self._parent_of(request), request)
        except (StreamRLError, RecursionError) as error:
            raise ApiError(400, str(error)) from None
        return prompt.length

    def _parent_of(self, request: ChatRequest) -> _Node | None:
        """Return the node whose answer ``request`` continues: the deepest one, and the latest of several as deep. None:
        the request begins a conversation."""
        matches: set[_Node | None] = {None}
        deepest: _Node | None = None
        for node in self._nodes:  # parents stand before their children, so one pass is enough
            if node.parent in matches and node.tool_set == request.tool_set and node.is_continued_by(request.chat):
                matches.add(node)
                if deepest is None or node.end >= deepest.end:
                    deepest = node
        return deepest

    async def _fill(self, node: _Node, request: ChatRequest) -> None:
        """Sample the answer of ``node``. A node that gets no answer is removed, so that a repetition of the request is
        sampled."""
        parent = node.parent
        scope = anyio.CancelScope()
        if parent is not None:
            parent.children += 1
        self._sampling.add(scope)
        try:
            with scope:
                await self._sample(node, request)
        except ApiError as error:
            node.failure = error
        except (StreamRLError, EpisodeLimit, RecursionError) as error:
            node.failure = ApiError(400, str(error))
        except Exception as error:
            log.exception("a request of an agent could not be answered")
            node.failure = ApiError(500, f"the turn could not be sampled ({type(error).__name__}: {error})")
        finally:
            self._sampling.discard(scope)
            if node.answer is None:
                self._remove(node)
            node.finished.set()

    def _remove(self, node: _Node) -> None:
        self._nodes.remove(node)
        if node.parent is not None:
            node.parent.children -= 1
        # A resampled request may have put another node at this digest.
        if self._requests.get(node.digest) is node:
            del self._requests[node.digest]

    async def _sample(self, node: _Node, request: ChatRequest) -> None:
        """Sample the turn that answers ``node``, and count it in ``figures``."""
        prompt = await self._prompt(node.parent, request)
        parent = prompt.parent
        after = -1
        if parent is not None and parent.answer is not None:
            after = parent.answer.turn.number
        appended = prompt.appended.token_ids
        async with self._free_turns:
            turn = await self._sampler.sample(appended, after=after, max_tokens=request.max_tokens)
        node.tokens = prompt.length + len(turn.token_ids)
        node.text = prompt.chat_tokens.text(appended + turn.token_ids)
        if parent is not None:
            node.text = parent.text + node.text
        parsed = prompt.chat_tokens.parse(turn, calls=request.calls)
        self._count_turn(prompt, request, parsed)
        node.answer_message = sampled_message(turn.number, parsed.text, parsed.reasoning, parsed.calls)
        node.answer_digest = message_digest(node.answer_message)
        node.answer = ChatAnswer(
            turn=turn,
            text=parsed.text,
            reasoning=parsed.reasoning,
            calls=node.answer_message.get("tool_calls", ()),
            prompt_tokens=prompt.length,
            identity=secrets.token_hex(12),
            created=int(time.time()),
        )

    def _count_turn(self, prompt: _Prompt, request: ChatRequest, parsed: ParsedTurn) -> None:
        _, seam, broken_tokens = prompt.appended
        self.figures["turns"] += 1
        self.figures["sequences" if prompt.parent is None else f"seam_{seam}"] += 1
        # Sums of 0 are recorded, too.
        self.figures["rewritten_turns"] += int(seam == SeamKind.REWRITTEN)
        self.figures["special_tokens"] += broken_tokens
        malformed = request.calls and bool(request.tools) and bool(parsed.problem)
        self.figures["malformed_calls"] += int(malformed)

    async def _prompt(self, parent: _Node | None, request: ChatRequest) -> _Prompt:
        """Tokenise the chat of ``request``, a long one in a thread: the event loop serves other trajectories, too."""
        characters = sum(len(message["content"]) for message in request.messages)
        if characters > _CHARACTERS_IN_LOOP:
            return await anyio.to_thread.run_sync(partial(self._tokenise, parent, request))
        return self._tokenise(parent, request)

    def _tokenise(self, parent: _Node | None, request: ChatRequest) -> _Prompt:
        chat_tokens = self.model.tokens(request.tool_set, request.tools)
        if parent is not None:
            try:
                appended = _tokens_after(parent, request, chat_tokens)
            except CannotContinueError:
                self.figures["not_continued"] += 1
            else:
                # A rewritten prompt has the tokens of the whole chat, and continues no sequence.
                continued = parent if appended.seam != SeamKind.REWRITTEN else None
                return _Prompt(chat_tokens, continued, appended)
        return _Prompt(chat_tokens, None, chat_tokens.prompt_tokens(request.messages))


def _tokens_after(parent: _Node, request: ChatRequest, chat_tokens: ChatTokens) -> AppendedTokens:
    """Return the tokens of ``request`` after the answer of ``parent``. Raises ``CannotContinueError``."""
    answer = parent.answer
    assert answer is not None, "only a request that was answered is a parent"
    # The messages of sampled turns replace those of the client, which may have left out their reasoning.
    messages = [*request.messages]
    ancestor: _Node | None = parent
    while ancestor is not None:
        messages[ancestor.end - 1] = ancestor.answer_message
        ancestor = ancestor.parent
    calls = [CalledTool(call["function"]["name"], call["id"]) for call in answer.calls]
    last_token = answer.turn.token_ids[-1] if answer.turn.token_ids else -1
    return chat_tokens.seam_tokens(messages, parent.end - 1, calls, last_token, parent.text)


def digest_of(*values: Any) -> bytes:
    """Return a digest of JSON values. Neither the order of keys nor the spelling of a number (2 or 2.0) changes it:
    clients decode what they were sent and encode it again, and JavaScript has one kind of number."""
    numbers_alike = json.loads(json.dumps(values), parse_int=float)
    return blake2b(json.dumps(numbers_alike, sort_keys=True).encode(), digest_size=16).digest()


def message_digest(message: Mapping[str, Any]) -> MessageDigest:
    """Return the digest of a message as chat templates take it."""
    text = message["content"]
    if message["role"] == "assistant":
        text = text.strip()
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    content = digest_of(message["role"], text, calls, message.get("tool_call_id", ""))
    return MessageDigest(content, message.get("reasoning_content", "").strip())
