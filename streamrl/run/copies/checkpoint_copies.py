"""Copies of the checkpoints that a run keeps, in an object store, made while the run goes on.

``checkpoints/step-N.DIGEST/`` has the files of one, ``digests`` last: with it a copy is whole.
``checkpoints/latest/EPOCH`` names the newest one of an epoch.
What a killed process left unfinished is finished or removed by the next."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from streamrl.base.errors import EpochLost, StoreError, StreamRLError
from streamrl.base.run_events import RunWarning
from streamrl.comm.object_store import ObjectStore
from streamrl.learning.state.durable_files import DIGESTS, read_digests
from streamrl.recipe.sections import Recipe
from streamrl.recipe.store_urls import place_of_run
from streamrl.run.copies.epochs import Epoch, take_epoch

LATEST = "latest"
RETRY_S = 60.0
_HINT = "the run goes on, and checkpoints are in its directory"


class CheckpointCopies:
    """Brings ``store`` in step with the checkpoints below ``directory`` that are ``wanted``. ``run`` is a child of a
    nursery. Whatever fails is said by ``warn`` (a version and a text), and tried again."""

    def __init__(
        self, store: ObjectStore, epoch: Epoch, directory: Path, warn: Callable[[int, str], Awaitable[None]]
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._directory = directory
        self._warn = warn
        self._wanted: tuple[int, ...] = ()
        self._changed = anyio.Event()
        self._settled = anyio.Event()
        self._settled.set()
        self._there: dict[str, list[str]] | None = None
        self._latest = ""
        self._lost = False

    def want(self, versions: Collection[int]) -> None:
        """Have copies of these checkpoints, and no others. Returns at once."""
        if not self._lost:
            self._wanted = tuple(versions)
            self._settled = anyio.Event()
            self._changed.set()

    def sent(self) -> int:
        """Return the bytes sent so far during the first attempt to copy, 0 afterwards: retries are no progress."""
        return 0 if self._settled.is_set() else self._store.sent

    async def settled(self) -> None:
        """Wait until what is wanted was tried."""
        while not (waiting := self._settled).is_set():
            await waiting.wait()

    async def run(self) -> None:
        """Copy until another life of the run writes here, or this is cancelled."""
        patience_s = math.inf
        while True:
            with anyio.move_on_after(patience_s):
                await self._changed.wait()
            self._changed = anyio.Event()
            settled = self._settled
            wanted = self._wanted
            patience_s = math.inf
            newest = max(wanted, default=0)
            try:
                await anyio.to_thread.run_sync(partial(self._bring_in_step, wanted), abandon_on_cancel=True)
            except EpochLost as error:
                self._lost = True
                self._settled.set()
                return await self._warn(newest, str(error))
            except (StreamRLError, OSError) as error:
                patience_s = RETRY_S
                await self._warn(newest, f"checkpoints are not copied ({error}); {_HINT}, tried again in {RETRY_S:g} s")
            settled.set()

    def _bring_in_step(self, versions: Collection[int]) -> None:
        if self._there is None:
            keys = self._store.list_keys()
            self._there = {}
            for key in keys:
                if (name := key.partition("/")[0]) != LATEST:
                    self._there.setdefault(name, []).append(key)
        names = {}
        for version in sorted(versions, reverse=True):  # the newest counts most
            directory = self._directory / f"step-{version:06d}"
            try:
                names[version] = self._copy(directory, self._there)
            except (FileNotFoundError, StreamRLError) as error:
                if isinstance(error, StoreError) or directory.is_dir():
                    raise
        newest = names[max(names)] if names else ""
        self._epoch.check()
        if newest != self._latest:
            self._store.put(f"{LATEST}/{self._epoch.number:06d}", newest.encode())
            self._latest = newest
        for name in self._there.keys() - names.values():
            self._store.remove(sorted(self._there[name], key=lambda key: not key.endswith(f"/{DIGESTS}")))
            del self._there[name]

    def _copy(self, directory: Path, there: dict[str, list[str]]) -> str:
        """Copy a checkpoint, unless its copy is whole. Returns the name of the copy."""
        listed = (directory / DIGESTS).read_bytes()
        name = f"{directory.name}.{hashlib.sha256(listed).hexdigest()[:16]}"
        if f"{name}/{DIGESTS}" in there.get(name, ()):
            return name
        self._epoch.check()
        digests: Mapping[str, str] = read_digests(directory)
        keys = there.setdefault(name, [])
        for file, digest in digests.items():
            keys.append(f"{name}/{file}")
            if self._store.put_file(keys[-1], directory / file) != digest:
                raise StreamRLError(f"{directory / file} is not as it was written: look at the disk")
        self._store.create(f"{name}/{DIGESTS}", listed)
        keys.append(f"{name}/{DIGESTS}")  # only now: with it a copy is taken for whole
        return name


async def open_copies(
    recipe: Recipe, run_directory: Path, emit: Callable[[RunWarning], Awaitable[None]]
) -> CheckpointCopies | None:
    """Take the next epoch of the run in every store that its recipe names; None where it wants no copies. Raises
    ``StoreError``: another process runs it, or another run is there."""
    epochs = {}
    for url in dict.fromkeys(filter(None, (recipe.checkpoint.copy_to, recipe.weights.transport))):
        epochs[url] = await anyio.to_thread.run_sync(take_epoch, place_of_run(url, run_directory), run_directory)
    if not recipe.checkpoint.copy_to:
        return None

    async def warn(step: int, message: str) -> None:
        await emit(RunWarning(step=step, message=message))

    place = f"{place_of_run(recipe.checkpoint.copy_to, run_directory)}/checkpoints"
    store = await anyio.to_thread.run_sync(ObjectStore, place)
    return CheckpointCopies(store, epochs[recipe.checkpoint.copy_to], run_directory / "checkpoints", warn)
