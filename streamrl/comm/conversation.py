"""Requests of the parent to the controller, whose answers come on its ``steps`` stream. The controller may die and be
replaced in between; what it had not answered is not asked again."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import anyio
import msgspec
from msgspec import structs

from streamrl.base.errors import StreamBroken, StreamRLError
from streamrl.comm.zmq_stream import zmq_sender


class _Numbered(Protocol):
    @property
    def request_id(self) -> int: ...


Request = TypeVar("Request", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=_Numbered)


class Conversation(Generic[Request, Reply]):
    """``requests``: their type, each with a ``request_id``, which its reply repeats; ``name``: of the stream."""

    def __init__(self, requests: Any, name: str) -> None:
        self._requests = requests
        self._name = name
        self._sender, self._receiver = anyio.create_memory_object_stream[tuple[int, Request]](math.inf)
        self._waiting: dict[int, tuple[anyio.Event, list[Reply]]] = {}
        self._asked = 0
        self._ended = False
        self._running = False
        self._conversation = anyio.CancelScope()

    async def ask(self, request: Request) -> Reply:
        """The answer. Raises ``StreamRLError`` where the run, or the controller, ends before it comes."""
        if self._ended:
            raise StreamRLError("the run has ended: it answers nothing any more, and nothing can be changed")
        self._asked += 1
        number = self._asked
        done = anyio.Event()
        replies = list[Reply]()
        self._waiting[number] = (done, replies)
        self._sender.send_nowait((number, structs.replace(request, request_id=number)))
        try:
            await done.wait()
        finally:
            self._waiting.pop(number, None)
        if not replies:
            raise StreamRLError("the controller ended before it answered: look at what is in force, and ask again")
        return replies[0]

    async def run(self, endpoint: str) -> None:
        """Send what is asked for to the controller, which connects to ``endpoint``, or to its successor. Until
        ``close``, or cancelled."""
        self._running = True
        with self._receiver, suppress(anyio.EndOfStream):  # the run has ended
            while True:
                with anyio.CancelScope() as self._conversation, suppress(StreamBroken):
                    await self._converse(endpoint)

    async def _converse(self, endpoint: str) -> None:
        first = await self._next()
        async with zmq_sender(self._requests, endpoint, bind=True, name=self._name) as stream:
            await stream.send(first)
            while True:
                await stream.send(await self._next())

    async def _next(self) -> Request:
        """The next request whose asker still waits: any other was reported as not answered."""
        while True:
            number, request = await self._receiver.receive()
            if number in self._waiting:
                return request

    def controller_replaced(self) -> None:
        """The controller died and another one takes its place: the outcome of its unanswered requests is unknown."""
        self._forget()
        self._conversation.cancel()

    def answered(self, reply: Any) -> None:
        """Take an answer of the controller, of the type of replies."""
        done, replies = self._waiting.pop(reply.request_id, (None, []))
        if done is not None:
            replies.append(reply)
            done.set()

    def close(self) -> None:
        """The run has ended: nobody waits any longer."""
        self._ended = True
        self._forget()
        self._sender.close()
        if not self._running:
            self._receiver.close()

    def _forget(self) -> None:
        for done, _ in self._waiting.values():
            done.set()
        self._waiting.clear()
