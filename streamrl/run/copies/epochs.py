"""Epochs of a run in an object store: each life of the run takes the next one by writing an object that must not be
there yet, so that of two lives at once, on hosts whose locks do not see each other, one ends and the other goes on."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from streamrl.base.atomic_files import flush_directory, write_durable
from streamrl.base.errors import UNDECODABLE, EpochLost, StoreError
from streamrl.comm.object_store import ObjectStore

RUN_FILE = "store-id"
"""File of a run's directory by which its objects are known as its own."""
FOLDER = "epoch"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Content of an epoch's object."""

    run: str
    token: str
    host: str
    process: int
    directory: str

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}, for {self.directory}"


class Epoch:
    """One that this process has taken."""

    def __init__(self, store: ObjectStore, number: int) -> None:
        self._store = store
        self.number = number

    def check(self) -> None:
        """Raise ``EpochLost`` once the next epoch is taken."""
        if (content := self._store.get(_key(self.number + 1))) is not None:
            taken = f"epoch {self.number + 1} of {self._store.url} was taken by {_decoded(content) or 'something else'}"
            raise EpochLost(f"{taken}: this process, of epoch {self.number}, writes nothing there any more")


def take_epoch(place: str, run_directory: Path) -> Epoch:
    """Take the next epoch of the run whose objects are below ``place``. Raises ``StoreError`` where they are of another
    run, or another process has taken that epoch at the same time."""
    store = ObjectStore(place)
    run = _run_id(run_directory)
    number = 1
    if taken := store.list_keys(FOLDER):  # where to begin: what is decided is whether the object can be created
        number = int(taken[-1].rpartition("/")[2]) + 1
        last = _decoded(store.get(taken[-1]) or b"")
        if last is None or last.run != run:
            other = f"is of another run ({last or 'nobody knows which'})"
            raise StoreError(f"{place} {other}: name another place in the recipe, or remove what is there")
    who = {"host": socket.gethostname(), "process": os.getpid(), "directory": str(run_directory)}
    claim = Claim(run=run, token=secrets.token_hex(16), **who)  # type: ignore[arg-type]
    if not store.create(_key(number), msgspec.json.encode(claim)):
        winner = _decoded(store.get(_key(number)) or b"")
        raise StoreError(f"epoch {number} of {place} was taken by {winner} at the same time: this process ends")
    return Epoch(store, number)


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}"


def _decoded(content: bytes) -> Claim | None:
    try:
        return msgspec.json.decode(content, type=Claim)
    except UNDECODABLE:
        return None


def _run_id(run_directory: Path) -> str:
    """A text that no other run has, made once."""
    file = run_directory / RUN_FILE
    token = secrets.token_hex(16)
    if not file.exists():
        write_durable(run_directory / f".{token}", token.encode())
        with suppress(FileExistsError):  # of several that begin at once: one name, whole content
            os.link(run_directory / f".{token}", file)
        (run_directory / f".{token}").unlink()
        flush_directory(run_directory)
    return file.read_text()
