"""Authentication of connections: libzmq asks for every connection to a CURVE socket, and this thread answers (ZAP, RFC
27).

The question goes to a fixed inproc address, so there is one gate in a context, and it counts for the sockets of that
context only. Each socket asks in its own domain, which says who is let in. A gate that is gone lets nobody in
(``ZAP_ENFORCE_DOMAIN``); its end ends every process that relies on it, by ``ended_fd``."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from streamrl.base.errors import StreamRLError
from streamrl.comm.transport_keys import KeyRole, public_keys

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"

log = logging.getLogger(__name__)


class KeyGate:
    """The gate of one context, bound to ``requests`` (a REP socket of it, not bound yet), which it owns."""

    def __init__(self, requests: zmq.Socket[bytes]) -> None:
        self._requests = requests
        self._domains: dict[bytes, tuple[Path, KeyRole]] = {}
        self._failure: BaseException | None = None
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.ended_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._refused = 0
        self._unknown_keys: frozenset[bytes] = frozenset()
        requests.bind(ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="key gate", daemon=True)
        self._thread.start()

    def admit(self, directory: Path, role: KeyRole) -> bytes:
        """The domain of sockets that let in the ``role`` keys of ``directory``."""
        place = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=8).hexdigest()
        domain = f"{role.value}.{place}".encode()
        self._domains = self._domains | {domain: (directory, role)}
        return domain

    def expect_unknown_key(self, key: bytes) -> None:
        """``key`` is about to be tried, and refused, by this process itself: no news for the log."""
        self._unknown_keys = self._unknown_keys | {key}

    def check(self) -> None:
        """Raise ``StreamRLError`` when it answers no more."""
        if not self._thread.is_alive():
            raise StreamRLError(
                f"nobody decides any more who may connect (the key gate ended: {self._failure!r}); the run ends, since "
                "no process could join it"
            )

    def close(self) -> None:
        """End the thread. Idempotent; the sockets that rely on it are closed before."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        os.close(self.ended_fd)
        self._stop_fd = self.ended_fd = -1

    def _serve(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._requests, zmq.POLLIN)
            poller.register(self._stop_fd, zmq.POLLIN)
            while self._stop_fd not in dict(poller.poll()):
                self._requests.send_multipart(self._answer(self._requests.recv_multipart()))
        except BaseException as failure:  # noqa: BLE001 - kept, and raised by check() in the threads that rely on it
            self._failure = failure
        finally:
            self._requests.close(linger=0)
            os.eventfd_write(self.ended_fd, 1)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        _version, number, domain, address, _identity, mechanism, *credentials = request
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        allowed = bool(key) and self._is_known(domain, key)
        if not allowed and key not in self._unknown_keys:
            self._report_refused(domain, address)
        code, text = (b"200", b"") if allowed else (b"400", b"not a known key")
        return [ZAP_VERSION, number, code, text, b"", b""]

    def _is_known(self, domain: bytes, key: bytes) -> bool:
        """The file is read each time: keys are added and taken away while a run goes on."""
        if domain not in self._domains:
            return False
        try:
            return key in public_keys(*self._domains[domain])
        except StreamRLError as error:
            log.error("a connection is refused, because nobody can be known: %s", error)
            return False

    def _report_refused(self, domain: bytes, address: bytes) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # 1, 2, 4, ...: a peer that tries again and again fills no disk
            log.warning(
                "a connection from %r was refused at a socket for %r: its key is not known there (%d so far)",
                address[:64],
                domain.partition(b".")[0],
                self._refused,
            )
