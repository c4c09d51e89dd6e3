"""Encoded parts of one trainer rank in an object store. ``publish.publisher`` writes them in the rank's process;
``pull.store_pull`` reads them in vLLM's worker processes.

Each part has a folder with the digest of its manifest as name. The manifest is written last, so that readers see a part
complete or not at all. Writing the same part again changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from streamrl.base.errors import EpochLost
from streamrl.comm.object_store import ObjectStore
from streamrl.weights.requests import MANIFEST

CONNECTIONS = 8
"""Number of objects that are written, or read, concurrently."""
_STARTS = "start"
"""Folder with one object for each process that has started as the writer of this rank."""


class Part(Protocol):
    """The fields of ``publish.server.ServedPart`` that are stored."""

    @property
    def manifest_digest(self) -> str: ...

    @property
    def manifest(self) -> bytes: ...

    @property
    def chunks(self) -> Sequence[memoryview]: ...


def key_of(digest: str, piece: int) -> str:
    """Return the key of a piece of the part whose manifest has this digest."""
    name = "manifest" if piece == MANIFEST else f"{piece:06d}"
    return f"{digest}/{name}"


class StoredParts:
    """Stores parts, with the methods of ``PublisherServer``. ``serve`` returns when all parts are in the store; while
    the store cannot be reached it tries again, up to the time limit of ``ObjectStore``. The methods raise
    ``StoreError``, and ``EpochLost`` where a later process of this rank has started. Objects stay in the store after
    ``close``, for engines and for a later process of this rank."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._store: ObjectStore | None = None
        self._keys: dict[str, set[str]] = {}

    def start(self) -> None:
        """List the objects of earlier processes of this rank, and replace the last of these as the writer."""
        self._store = ObjectStore(self.endpoint)
        for key in self._store.list_keys():
            self._keys.setdefault(key.partition("/")[0], set()).add(key)
        last_start = max(self._keys.pop(_STARTS, ()), default="/0")
        self._number = int(last_start.rpartition("/")[2]) + 1
        if not self._store.create(f"{_STARTS}/{self._number:06d}", secrets.token_bytes(16)):
            raise EpochLost(f"{self.endpoint}: another process has begun to write there at the same time")

    def check(self) -> None:
        """Do nothing: failures were raised by ``serve``."""

    def serve(self, parts: Iterable[Part]) -> None:
        """Replace the stored parts: write new parts, then remove the others."""
        assert self._store is not None, "it was started"
        if self._store.get(f"{_STARTS}/{self._number + 1:06d}") is not None:
            raise EpochLost(f"{self.endpoint}: a later start of this rank writes there, and this one nothing any more")
        parts_by_digest = {part.manifest_digest: part for part in parts}
        for digest, part in parts_by_digest.items():
            if key_of(digest, MANIFEST) not in self._keys.setdefault(digest, set()):
                self._keys[digest].update(self._write(self._store, part))
        for digest in self._keys.keys() - parts_by_digest.keys():
            self._store.remove(sorted(self._keys[digest], reverse=True))  # the manifest first
            del self._keys[digest]

    def close(self) -> None:
        """Do nothing: the objects stay."""

    def _write(self, store: ObjectStore, part: Part) -> list[str]:
        """Write all objects of a part, and return their keys."""
        keys = [key_of(part.manifest_digest, piece) for piece in range(len(part.chunks))]
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="weight storing") as pool:
            pairs = zip(keys, part.chunks, strict=True)
            writes = [pool.submit(partial(store.create, key, chunk)) for key, chunk in pairs]
            for write in writes:
                write.result()
        manifest_key = key_of(part.manifest_digest, MANIFEST)
        store.create(manifest_key, part.manifest)
        return [*keys, manifest_key]
