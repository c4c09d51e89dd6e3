"""Copies of the checkpoints that a run keeps, in an object store, made while the run goes on.

``launch/run_controller.py`` opens them in the controller process; ``CheckpointKeeper`` names the checkpoints to copy.

``checkpoints/step-N.DIGEST/`` has the files of a checkpoint. ``digests`` is written last and makes the copy complete.
``checkpoints/latest/EPOCH`` names the newest copy of an epoch.
A copy that a killed process left incomplete is completed or removed by the next process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from streamrl.base.errors import EpochLost, StoreError, StreamRLError
from streamrl.base.run_events import RunWarning
from streamrl.base.types import TextMapping
from streamrl.comm.object_store import ObjectStore
from streamrl.learning.state.durable_files import DIGESTS, read_digests
from streamrl.recipe.remote_names import place_of_run
from streamrl.recipe.sections import Recipe
from streamrl.run.copies.epochs import Epoch, take_epoch

LATEST = "latest"
RETRY_S = 60.0
_HINT = "the run goes on, and checkpoints are in its directory"


class CheckpointCopies:
    """Copies checkpoints below ``directory`` to ``store``, and removes copies that are no longer needed. ``run`` is a
    child of the caller's task group. ``warn``: function that is called with a version and a text after each failure;
    the copy is then tried again."""

    def __init__(
        self, store: ObjectStore, epoch: Epoch, directory: Path, warn: Callable[[int, str], Awaitable[None]]
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._directory = directory
        self._warn = warn
        self._versions: tuple[int, ...] = ()
        """Versions that are to be in the store."""
        self._changed = anyio.Event()
        self._settled = anyio.Event()
        self._settled.set()
        self._stored_keys: dict[str, list[str]] | None = None
        """Keys in the store by name of the copy; None: not listed yet."""
        self._latest = ""
        self._epoch_lost = False

    def want(self, versions: Collection[int]) -> None:
        """Set the checkpoints that are to have copies, and return at once. Other copies are removed."""
        if not self._epoch_lost:
            self._versions = tuple(versions)
            if self._settled.is_set():
                self._settled = anyio.Event()
            self._changed.set()

    def sent_bytes(self) -> int:
        """Return the bytes sent so far during the first attempt to copy, 0 afterwards: retries are no progress."""
        return 0 if self._settled.is_set() else self._store.sent_bytes

    async def settled(self) -> None:
        """Wait until the newest ``want`` has been carried out or has failed once."""
        while not self._settled.is_set():
            await self._settled.wait()  # another call of ``want`` puts another event in its place

    async def run(self) -> None:
        """Copy until another life of the run writes to the store, or the caller cancels."""
        patience_s = math.inf
        while True:
            with anyio.move_on_after(patience_s):
                await self._changed.wait()
            self._changed = anyio.Event()
            versions = self._versions
            patience_s = math.inf
            newest = max(versions, default=0)
            try:
                await to_thread.run_sync(partial(self._synchronise, versions), abandon_on_cancel=True)
            except EpochLost as error:
                self._epoch_lost = True
                self._settled.set()
                return await self._warn(newest, str(error))
            except (StreamRLError, OSError) as error:
                patience_s = RETRY_S
                await self._warn(newest, f"checkpoints are not copied ({error}); {_HINT}, tried again in {RETRY_S:g} s")
            if not self._changed.is_set():
                self._settled.set()

    def _synchronise(self, versions: Collection[int]) -> None:
        """Copy the checkpoints of ``versions``, and remove all other copies. Blocking."""
        if self._stored_keys is None:
            self._stored_keys = self._list_copies()
        stored_keys = self._stored_keys
        names = {}
        for version in sorted(versions, reverse=True):  # the newest one is the most valuable
            directory = self._directory / f"step-{version:06d}"
            try:
                names[version] = self._copy(directory, stored_keys)
            except (FileNotFoundError, StreamRLError) as error:
                # A checkpoint that has been removed meanwhile needs no copy.
                if isinstance(error, StoreError) or directory.is_dir():
                    raise
        newest = names.get(max(names, default=-1), "")
        self._epoch.check()
        if newest != self._latest:
            self._store.put(f"{LATEST}/{self._epoch.number:06d}", newest.encode())
            self._latest = newest
        for name in stored_keys.keys() - names.values():
            # ``digests`` goes first: a copy that is half removed must not look complete.
            self._store.remove(sorted(stored_keys[name], key=lambda key: not key.endswith(f"/{DIGESTS}")))
            del stored_keys[name]

    def _list_copies(self) -> dict[str, list[str]]:
        """Return the keys in the store by name of the copy."""
        keys: dict[str, list[str]] = {}
        for key in self._store.list_keys():
            name = key.partition("/")[0]
            if name != LATEST:
                keys.setdefault(name, []).append(key)
        return keys

    def _copy(self, directory: Path, stored_keys: dict[str, list[str]]) -> str:
        """Copy a checkpoint, unless its copy is complete, and add its keys to ``stored_keys``. Return the name of the
        copy."""
        digest_file = (directory / DIGESTS).read_bytes()
        name = f"{directory.name}.{hashlib.sha256(digest_file).hexdigest()[:16]}"
        if f"{name}/{DIGESTS}" in stored_keys.get(name, ()):
            return name
        self._epoch.check()
        digests: TextMapping = read_digests(directory)
        keys = stored_keys.setdefault(name, [])
        for file, digest in digests.items():
            key = f"{name}/{file}"
            keys.append(key)  # before it is written, so that it is removed with the others
            if self._store.put_file(key, directory / file) != digest:
                raise StreamRLError(f"{directory / file} is not as it was written: look at the disk")
        self._store.create(f"{name}/{DIGESTS}", digest_file)
        keys.append(f"{name}/{DIGESTS}")  # after it is written, because a copy with this key counts as complete
        return name


async def open_copies(
    recipe: Recipe, run_directory: Path, emit: Callable[[RunWarning], Awaitable[None]]
) -> CheckpointCopies | None:
    """Take the next epoch of the run in every store that its recipe names, and return the copies; None where the recipe
    wants none. Raises ``StoreError`` where another process runs the same run, or the store has another run."""
    epochs = {}
    for url in dict.fromkeys(filter(None, (recipe.checkpoint.copy_to, recipe.weights.transport))):
        epochs[url] = await to_thread.run_sync(take_epoch, place_of_run(url, run_directory), run_directory)
    if not recipe.checkpoint.copy_to:
        return None

    async def warn(step: int, message: str) -> None:
        await emit(RunWarning(step=step, message=message))

    place = f"{place_of_run(recipe.checkpoint.copy_to, run_directory)}/checkpoints"
    store = await to_thread.run_sync(ObjectStore, place)
    return CheckpointCopies(store, epochs[recipe.checkpoint.copy_to], run_directory / "checkpoints", warn)
