"""One source of a fetch that lies in an object store: threads get the pieces that its chain asks for. A piece that
cannot be had for a moment is asked for again until the fetch ends, or nothing has come for too long."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import zmq

from streamrl.base.errors import StoreError, WeightError
from streamrl.comm.object_store import ObjectStore
from streamrl.weights.pull.received_part import ReceivedChain
from streamrl.weights.requests import GetPiece, NotServed, Piece, encoder
from streamrl.weights.store.stored_parts import CONNECTIONS, key_of

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_REQUEST_S = 20.0  # a fetch that is given up waits for what is under way


class StorePull:
    """As the socket of a source (``pull.fetch``)."""

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
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="weight fetching")
        self.begin()

    def begin(self) -> None:
        """Count from now: before, nothing was asked for."""
        self._progressed_at = time.monotonic()

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._ready, zmq.POLLIN)

    def ask(self, credit_bytes: int) -> None:
        for request in self.chain.requests(credit_bytes):
            self._pool.submit(self._get, request)

    def receive(self) -> bool:
        """Take what is there. Returns whether it brought something new."""
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
        """Give up when nothing came for long."""
        if time.monotonic() - self._progressed_at > self._progress_seconds:
            raise WeightError(
                f"nothing arrived from {self._store.url} for {self._progress_seconds:g} s: {self.chain.describe()}. "
                f"{self._problem or 'Is the store reachable from here?'}"
            )

    def close(self) -> None:
        """Drop what is asked for; requests that are under way end by their own limit."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        os.close(self._ready)

    def _get(self, request: GetPiece) -> None:
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
            answer = Piece(digest, request.piece)
            absent = NotServed(digest, "this manifest is not served (any more): ask for a newer version")
            self._replies.put([encoder.encode(absent if content is None else answer), content or b""])
            os.eventfd_write(self._ready, 1)
            return
