"""Epochs of a run in an object store: the right to write there.

Each life of a run takes the next epoch in its controller process, by creating an object that must not exist yet. Of two
lives at once, on machines whose file locks do not exclude each other, one ends and the other goes on."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from msgspec import Struct, json

from streamrl.base.atomic_files import flush_directory, write_durable
from streamrl.base.errors import UNDECODABLE, EpochLost, StoreError
from streamrl.comm.object_store import ObjectStore

RUN_FILE = "store-id"
"""File of a run's directory with a random text, which the run's objects have, too."""
FOLDER = "epoch"


class Claim(Struct, frozen=True, kw_only=True):
    """Content of an epoch's object."""

    run: str
    token: str
    host: str
    process: int
    directory: str

    def __str__(self) -> str:
        return f"process {self.process} of {self.host}, for {self.directory}"


class Epoch:
    """An epoch that this process has taken."""

    def __init__(self, store: ObjectStore, number: int) -> None:
        self._store = store
        self.number = number

    def check(self) -> None:
        """Raise ``EpochLost`` once the next epoch is taken."""
        content = self._store.get(_key(self.number + 1))
        if content is not None:
            owner = _decoded(content) or "something else"
            raise EpochLost(
                f"epoch {self.number + 1} of {self._store.url} was taken by {owner}: this process, of epoch "
                f"{self.number}, writes nothing there any more"
            )


def take_epoch(place: str, run_directory: Path) -> Epoch:
    """Take the next epoch of the run whose objects are below ``place``. Raises ``StoreError`` where the objects belong
    to another run, or another process takes the same epoch at the same time."""
    store = ObjectStore(place)
    run = _run_id(run_directory)
    number = 1
    # The list only suggests a number. Whether the epoch is free is decided by the creation of its object.
    if keys := store.list_keys(FOLDER):
        number = int(keys[-1].rpartition("/")[2]) + 1
        last = _decoded(store.get(keys[-1]) or b"")
        if last is None or last.run != run:
            other = f"is of another run ({last or 'nobody knows which'})"
            raise StoreError(f"{place} {other}: name another place in the recipe, or remove what is there")
    claim = Claim(
        run=run,
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        process=os.getpid(),
        directory=str(run_directory),
    )
    if not store.create(_key(number), json.encode(claim)):
        winner = _decoded(store.get(_key(number)) or b"")
        raise StoreError(f"epoch {number} of {place} was taken by {winner} at the same time: this process ends")
    return Epoch(store, number)


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}"


def _decoded(content: bytes) -> Claim | None:
    try:
        return json.decode(content, type=Claim)
    except UNDECODABLE:
        return None


def _run_id(run_directory: Path) -> str:
    """Return a text that no other run has, and write it to the run's directory where it is not there yet."""
    file = run_directory / RUN_FILE
    token = secrets.token_hex(16)
    if not file.exists():
        draft = run_directory / f".{token}"
        write_durable(draft, token.encode())
        with suppress(FileExistsError):  # of several processes at once one gives its text the name
            os.link(draft, file)
        draft.unlink()
        flush_directory(run_directory)
    return file.read_text()
