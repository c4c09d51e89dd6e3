"""Authentication of connections to CURVE sockets: a thread that answers the requests of libzmq (ZAP, RFC 27).

``guarded_sockets`` makes one gate for each ZeroMQ context with a guarded socket, in any process. libzmq sends one
request for each new connection, to a fixed inproc address; so a context has one gate, which decides for the sockets of
this context only. The domain in a request names the role whose keys the socket admits. Once the gate has ended, nobody
is let in (``ZAP_ENFORCE_DOMAIN``); ``ended_fd`` then ends every process that relies on the gate."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from logging import getLogger
from pathlib import Path
from threading import Thread

from zmq import POLLIN, Poller
from zmq.utils import z85

from streamrl.base.errors import StreamRLError
from streamrl.comm.socket_options import ByteSocket
from streamrl.comm.transport_keys import KeyRole, public_keys

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"

log = getLogger(__name__)


class KeyGate:
    """The gate of one context. It binds and owns ``requests``, a REP socket of this context."""

    def __init__(self, requests: ByteSocket) -> None:
        self._requests = requests
        self._domains: dict[bytes, tuple[Path, KeyRole]] = {}
        self._failure: BaseException | None = None
        self._stop_fd = os.eventfd(0)
        self.ended_fd = os.eventfd(0)
        self._refused = 0
        self._unknown_keys: frozenset[bytes] = frozenset()
        requests.bind(ZAP_ENDPOINT)
        self._thread = Thread(target=self._serve, name="key gate", daemon=True)
        self._thread.start()

    def admit(self, directory: Path, role: KeyRole) -> bytes:
        """Admit the ``role`` keys of ``directory``. Returns the domain for sockets that let them in."""
        digest = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=8).hexdigest()
        domain = f"{role.value}.{digest}".encode()
        self._domains = self._domains | {domain: (directory, role)}
        return domain

    def expect_unknown_key(self, key: bytes) -> None:
        """Keep the refusal of ``key``, which this process is about to try itself, out of the log."""
        self._unknown_keys = self._unknown_keys | {key}

    def check(self) -> None:
        """Raise ``StreamRLError`` when the thread has ended, so that no request is answered."""
        if not self._thread.is_alive():
            raise StreamRLError(
                f"nobody decides any more who may connect (the key gate ended: {self._failure!r}); the run ends, since "
                "no process could join it"
            )

    def close(self) -> None:
        """End the thread. Idempotent. Close the sockets that rely on the gate first."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)
        os.close(self.ended_fd)
        self._stop_fd = self.ended_fd = -1

    def _serve(self) -> None:
        try:
            poller = Poller()
            poller.register(self._requests, POLLIN)
            poller.register(self._stop_fd, POLLIN)
            while self._stop_fd not in dict(poller.poll()):
                self._requests.send_multipart(self._answer(self._requests.recv_multipart()))
        except BaseException as failure:  # noqa: BLE001 - check() raises it in the threads that rely on the gate
            self._failure = failure
        finally:
            self._requests.close(linger=0)
            os.eventfd_write(self.ended_fd, 1)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        _version, number, domain, address, _identity, mechanism, *credentials = request
        key = b""
        if mechanism == b"CURVE" and len(credentials) == 1:
            key = z85.encode(credentials[0])
        allowed = bool(key) and self._is_known(domain, key)
        if not allowed and key not in self._unknown_keys:
            self._report_refused(domain, address)
        code, text = (b"200", b"") if allowed else (b"400", b"not a known key")
        return [ZAP_VERSION, number, code, text, b"", b""]

    def _is_known(self, domain: bytes, key: bytes) -> bool:
        """Return whether ``domain`` admits ``key``. Reads the key file each time, since keys may be added and removed
        during a run."""
        if domain not in self._domains:
            return False
        try:
            return key in public_keys(*self._domains[domain])
        except StreamRLError as error:
            log.error("a connection is refused, because nobody can be known: %s", error)
            return False

    def _report_refused(self, domain: bytes, address: bytes) -> None:
        self._refused += 1
        # Only refusals 1, 2, 4, ... are logged, so that a peer that retries for ever does not fill the disk.
        if self._refused & (self._refused - 1) == 0:
            log.warning(
                "a connection from %r was refused at a socket for %r: its key is not known there (%d so far)",
                address[:64],
                domain.partition(b".")[0],
                self._refused,
            )
