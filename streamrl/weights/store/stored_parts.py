"""Encoded parts of one rank in an object store: a folder for each, named by the digest of its manifest, which is
written last. So a part is whole or not there for every reader, and who writes the same part again changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from streamrl.base.errors import StoreError
from streamrl.comm.object_store import ObjectStore
from streamrl.weights.requests import MANIFEST

CONNECTIONS = 8
"""Objects that are written, or read, at once."""
_LIVES = "life"


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
    long as a store may be away. Its methods raise ``StoreError``. What is stored when it is closed stays, for engines
    and for the next life of the trainer, which goes on with it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._store: ObjectStore | None = None
        self._keys: dict[str, set[str]] = {}

    def start(self) -> None:
        """Find what an earlier life left behind."""
        self._store = ObjectStore(self.endpoint)
        for key in self._store.list_keys():
            self._keys.setdefault(key.partition("/")[0], set()).add(key)
        self._life = len(self._keys.pop(_LIVES, ())) + 1
        if not self._store.create(f"{_LIVES}/{self._life:06d}", secrets.token_bytes(16)):
            raise StoreError(f"{self.endpoint}: another process has begun to write there at the same time")

    def check(self) -> None:
        """Do nothing: what failed was raised."""

    def serve(self, parts: Iterable[Part]) -> None:
        """Replace what is stored: first new parts are written, then others are removed."""
        assert self._store is not None, "it was started"
        if self._store.get(f"{_LIVES}/{self._life + 1:06d}") is not None:
            raise StoreError(f"{self.endpoint}: a later start of this rank writes there, and this one nothing any more")
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
