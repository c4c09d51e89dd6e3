"""Requests of the supervisor to the controller, whose replies come on the controller's ``steps`` stream.

``SteeringRequests`` and ``RewardAttachments`` are the two conversations; both live in the supervisor, and its
``Pipeline`` hands them the replies. The controller may die and be replaced meanwhile: requests that it had not answered
are not sent again."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from anyio import CancelScope, EndOfStream, Event, create_memory_object_stream
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.errors import StreamBroken, StreamRLError
from streamrl.comm.zmq_stream import zmq_sender


class _Numbered(Protocol):
    @property
    def request_id(self) -> int: ...


Request = TypeVar("Request", bound=Struct)
Reply = TypeVar("Reply", bound=_Numbered)


class Conversation(Generic[Request, Reply]):
    """A queue of requests to the controller, and the callers that wait for the replies.

    ``requests``: type of the requests, each with a ``request_id``, which its reply repeats; ``name``: name of the
    stream that carries them."""

    def __init__(self, requests: Any, name: str) -> None:
        self._requests = requests
        self._name = name
        self._sender, self._receiver = create_memory_object_stream[tuple[int, Request]](inf)
        self._waiting: dict[int, tuple[Event, list[Reply]]] = {}
        self._last_id = 0
        self._closed = False
        self._running = False
        self._conversation = CancelScope()

    async def ask(self, request: Request) -> Reply:
        """Send ``request`` and return its reply. Raises ``StreamRLError`` where the run or the controller ends
        first."""
        if self._closed:
            raise StreamRLError("the run has ended: it answers nothing any more, and nothing can be changed")
        self._last_id += 1
        number = self._last_id
        settled = Event()
        replies = list[Reply]()
        self._waiting[number] = (settled, replies)
        self._sender.send_nowait((number, replace(request, request_id=number)))
        try:
            await settled.wait()
        finally:
            self._waiting.pop(number, None)
        if not replies:
            raise StreamRLError("the controller ended before it answered: look at what is in force, and ask again")
        return replies[0]

    async def run(self, endpoint: str) -> None:
        """Send requests to the controller, or its successor, which connects to ``endpoint``. Runs until ``close`` or
        cancellation."""
        self._running = True
        with self._receiver, suppress(EndOfStream):  # ``close`` ends the queue
            while True:
                with CancelScope() as self._conversation, suppress(StreamBroken):
                    await self._converse(endpoint)

    async def _converse(self, endpoint: str) -> None:
        # Bound before the first request, which then does not wait for the next attempt of the controller to connect.
        async with zmq_sender(self._requests, endpoint, bind=True, name=self._name) as stream:
            while True:
                await stream.send(await self._next())

    async def _next(self) -> Request:
        """Next request whose caller still waits. ``ask`` has reported all others as not answered."""
        while True:
            number, request = await self._receiver.receive()
            if number in self._waiting:
                return request

    def controller_replaced(self) -> None:
        """Fail all unanswered requests, whose outcome is unknown, and wait for the next controller to connect."""
        self._fail_waiting()
        self._conversation.cancel()

    def deliver_reply(self, reply: Any) -> None:
        """Hand ``reply`` (a ``Reply``) of the controller to the caller of its request."""
        settled, replies = self._waiting.pop(reply.request_id, (None, []))
        if settled is not None:
            replies.append(reply)
            settled.set()

    def close(self) -> None:
        """Fail all unanswered requests and end ``run``, since the run has ended."""
        self._closed = True
        self._fail_waiting()
        self._sender.close()
        if not self._running:
            self._receiver.close()

    def _fail_waiting(self) -> None:
        """Wake every caller without a reply."""
        for settled, _ in self._waiting.values():
            settled.set()
        self._waiting.clear()
