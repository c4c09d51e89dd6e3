"""Folded deltas: one version as a difference to another than it was announced with, made when a receiver asks.

An engine that missed versions needs one delta over all of them, and a restarted one needs the difference to the
checkpoint that it has loaded. Both are rare, and made in a thread beside the trainer's and the serving one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

from streamrl.base.errors import WeightError
from streamrl.weights.publish.serving import ServedPart
from streamrl.weights.requests import GetFold

MAXIMUM_FOLDS = 16
"""Folded deltas that are kept, or being made, at once. An engine that is refused one asks for an anchor."""


class FoldMaker:
    """Makes each folded delta once. ``make`` is called in a thread of its own; it raises ``WeightError`` for what
    cannot be made, and looks at ``closing`` while it works."""

    def __init__(self, make: Callable[[GetFold], ServedPart]) -> None:
        self.closing = threading.Event()
        self._make = make
        self._lock = threading.Lock()  # asked by the serving thread, emptied by the trainer's
        self._pool: ThreadPoolExecutor | None = None
        self._folds: dict[GetFold, Future[ServedPart]] = {}

    def part_of(self, request: GetFold) -> ServedPart | None:
        """The folded delta; None while it is being made. Raises ``WeightError`` when it cannot be."""
        with self._lock:
            fold = self._folds.get(request)
            if fold is None:
                if self.closing.is_set() or len(self._folds) >= MAXIMUM_FOLDS:
                    raise WeightError(f"{len(self._folds)} folded deltas are kept or being made: ask for an anchor")
                self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="weight folding")
                fold = self._folds[request] = self._pool.submit(self._make, request)
        if not fold.done():
            return None
        try:
            return fold.result()
        except WeightError:
            raise
        except Exception as error:
            raise WeightError(f"the folded delta could not be made: {type(error).__name__}: {error}") from error

    def served(self, digest: str) -> ServedPart | None:
        """The folded delta whose manifest has this digest, if there is one."""
        with self._lock:
            folds = list(self._folds.values())
        for fold in folds:
            if fold.done() and fold.exception() is None and fold.result().manifest_digest == digest:
                return fold.result()
        return None

    def keep(self, digests: Collection[str]) -> None:
        """Forget folded deltas of versions other than those with these (announced) manifest digests."""
        with self._lock:
            self._folds = {
                request: fold
                for request, fold in self._folds.items()
                if request.manifest_digest in digests or not (fold.done() or fold.cancel())
            }

    def close(self) -> None:
        """Give up what is being made, and wait for its end. Idempotent."""
        self.closing.set()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
