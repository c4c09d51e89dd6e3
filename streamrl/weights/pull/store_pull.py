"""A source of a fetch in an object store: threads read the pieces that a chain requests. ``fetch.py`` makes one for
each source in a store, in a vLLM worker's process. A failed read is repeated until the fetch ends, or nothing has
arrived for too long."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic

from zmq import POLLIN, Poller

from streamrl.base.errors import StoreError, WeightError
from streamrl.comm.object_store import ObjectStore
from streamrl.weights.pull.received_part import ReceivedChain
from streamrl.weights.requests import GetPiece, NotServed, Piece, Reply, encoder
from streamrl.weights.store.stored_parts import CONNECTIONS, key_of

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_REQUEST_S = 20.0  # time limit of one read; a fetch that ends waits for open reads


class StorePull:
    """The threads that read one source, and the time of its last piece. Has the methods of ``fetch._Pull``."""

    def __init__(self, chain: ReceivedChain, progress_seconds: float) -> None:
        self.chain = chain
        self._progress_seconds = progress_seconds
        try:
            self._store = ObjectStore(chain.source.endpoint, give_up_s=0, request_s=_REQUEST_S)
        except StoreError as error:
            raise WeightError(str(error)) from error
        self._problem = ""
        self._replies: SimpleQueue[list[bytes]] = SimpleQueue()
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = Event()
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="weight fetching")
        self.begin()

    def begin(self) -> None:
        """Measure the time without progress from now on."""
        self._progressed_at = monotonic()

    def register(self, poller: Poller) -> None:
        poller.register(self._ready, POLLIN)

    def ask(self, credit_bytes: int) -> None:
        """Start to read the pieces that the credit allows."""
        for request in self.chain.requests(credit_bytes):
            self._pool.submit(self._get, request)

    def receive(self) -> bool:
        """Take the pieces that have arrived. Returns whether one of them was new."""
        news = False
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return False
        while True:
            try:
                news = self.chain.take(self._replies.get_nowait()) or news
            except Empty:
                break
        if news:
            self.begin()
        return news

    def watch(self) -> None:
        """Raise ``WeightError`` after ``progress_seconds`` without anything new."""
        if monotonic() - self._progressed_at > self._progress_seconds:
            raise WeightError(
                f"nothing arrived from {self._store.url} for {self._progress_seconds:g} s: {self.chain.describe()}. "
                f"{self._problem or 'Is the store reachable from here?'}"
            )

    def close(self) -> None:
        """Drop reads that have not started, and wait for the others, which have a time limit."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        os.close(self._ready)

    def _get(self, request: GetPiece) -> None:
        """Read one piece, and put it into the queue as the two frames of a reply."""
        digest = request.manifest_digest
        pause_s = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                content = self._store.get(key_of(digest, request.piece))
            except StoreError as error:
                self._problem = str(error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            reply: Reply = Piece(digest, request.piece)
            if content is None:
                reply = NotServed(digest, "this manifest is not served (any more): ask for a newer version")
            self._replies.put([encoder.encode(reply), content or b""])
            os.eventfd_write(self._ready, 1)
            return
