"""Encoded parts of one rank in an object store: a folder for each, named by the digest of its manifest, which is
written last. So a part is whole or not there for every reader, and who writes the same part again changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from streamrl.base.errors import EpochLost
from streamrl.comm.object_store import ObjectStore
from streamrl.weights.requests import MANIFEST

CONNECTIONS = 8
"""Objects that are written, or read, at once."""
_STARTS = "start"
"""Folder with an object for each process of this rank that has started to write here."""


class Part(Protocol):
    """The fields of a ``ServedPart`` that are stored."""

    @property
    def manifest_digest(self) -> str: ...

    @property
    def manifest(self) -> bytes: ...

    @property
    def chunks(self) -> Sequence[memoryview]: ...


def key_of(digest: str, piece: int) -> str:
    """Key of a piece of the part whose manifest has this digest."""
    return f"{digest}/{'manifest' if piece == MANIFEST else f'{piece:06d}'}"


class StoredParts:
    """In place of a ``PublisherServer``: its ``serve`` returns when everything is in the store, and tries again for as
    long as a store may be away. Its methods raise ``StoreError``; ``EpochLost`` where a later process of this rank has
    started. What is stored when it is closed stays, for engines and for that process, which goes on with it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._store: ObjectStore | None = None
        self._keys: dict[str, set[str]] = {}

    def start(self) -> None:
        """Find what an earlier process of this rank left, and take its place."""
        self._store = ObjectStore(self.endpoint)
        for key in self._store.list_keys():
            self._keys.setdefault(key.partition("/")[0], set()).add(key)
        self._number = int(max(self._keys.pop(_STARTS, ()), default="/0").rpartition("/")[2]) + 1
        if not self._store.create(f"{_STARTS}/{self._number:06d}", secrets.token_bytes(16)):
            raise EpochLost(f"{self.endpoint}: another process has begun to write there at the same time")

    def check(self) -> None:
        """Do nothing: what failed was raised."""

    def serve(self, parts: Iterable[Part]) -> None:
        """Replace what is stored: first new parts are written, then others are removed."""
        assert self._store is not None, "it was started"
        if self._store.get(f"{_STARTS}/{self._number + 1:06d}") is not None:
            raise EpochLost(f"{self.endpoint}: a later start of this rank writes there, and this one nothing any more")
        wanted = {part.manifest_digest: part for part in parts}
        for digest, part in wanted.items():
            if key_of(digest, MANIFEST) not in self._keys.setdefault(digest, set()):
                self._keys[digest].update(self._write(self._store, part))
        for digest in self._keys.keys() - wanted.keys():
            self._store.remove(sorted(self._keys[digest], reverse=True))  # the manifest first
            del self._keys[digest]

    def close(self) -> None:
        """Keep what is stored."""

    def _write(self, store: ObjectStore, part: Part) -> Iterator[str]:
        pieces = [(key_of(part.manifest_digest, piece), chunk) for piece, chunk in enumerate(part.chunks)]
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="weight storing") as pool:
            for written in [pool.submit(partial(store.create, key, chunk)) for key, chunk in pieces]:
                written.result()
        manifest = key_of(part.manifest_digest, MANIFEST)
        store.create(manifest, part.manifest)
        yield from (key for key, _ in [*pieces, (manifest, b"")])
