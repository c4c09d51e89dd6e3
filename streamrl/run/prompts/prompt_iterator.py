"""Prompts from a user's iterator, on a thread with an event loop of its own in the process that draws them (the
controller, or a command that samples). ``UserRows`` also reads the first row in the process of ``first_row``. The
thread is a daemon: an iterator that waits for ever, such as an empty queue, must not keep the process from ending."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from anyio import to_thread

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.user_code import describe_error, load_user_object
from streamrl.run.prompts.prompt_rows import BadRow, read_prompt, to_form
from streamrl.run.prompts.prompt_spec import RowForm

_CLOSE_GRACE_S = 2.0

log = logging.getLogger(__name__)


class UserRows:
    """Rows of ``module:name``: an iterable, an async iterable, or a (coroutine) function that returns one of them.

    All methods run in the same event loop. A failure of user code raises ``StreamRLError`` (``RecipeError`` where it
    cannot be imported or returns no iterable). An object whose ``live`` is True, such as a queue, has only new rows
    after a restart, so that no row of it is skipped.
    ``count``: number of rows so far."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._rows: AsyncIterator[Any] | Iterator[Any] | None = None
        self._live = False
        self.count = 0

    async def next_row(self) -> tuple[bool, Any]:
        """Return (True, the next row), or (False, None) at the end. A synchronous iterator blocks the event loop."""
        rows = self._rows or await self._open()
        try:
            row = await anext(rows) if isinstance(rows, AsyncIterator) else next(rows)
        except (StopIteration, StopAsyncIteration):
            return False, None
        except BaseException as error:  # also SystemExit of a user's iterator
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            raise StreamRLError(
                f"prompts {self._spec} failed after {self.count} rows: {describe_error(error)}: correct it"
            ) from error
        self.count += 1
        return True, row

    async def skip(self, count: int) -> None:
        """Skip the first ``count`` rows, which were drawn before the run was resumed, so that no row is trained twice.
        Rows of a live object are not skipped, because all its rows are new. Raises the errors of ``next_row``."""
        if count and self._rows is None:
            await self._open()
        if count and self._live:
            log.info("prompts %s: live, so none of the %d rows that were drawn before is skipped", self._spec, count)
            return
        while self.count < count:
            has_row, _ = await self.next_row()
            if not has_row:
                log.warning("prompts %s: ended after %d rows; %d were drawn before", self._spec, self.count, count)
                return
        if count:
            log.info("prompts %s: skipped %d rows that were drawn before", self._spec, count)

    async def aclose(self) -> None:
        """Close a generator, so that its ``finally`` runs."""
        if self._rows is None:
            return
        close: Callable[[], Any] | None = getattr(self._rows, "aclose", getattr(self._rows, "close", None))
        if close is not None:
            result = close()
            if inspect.isawaitable(result):
                await result

    async def _open(self) -> AsyncIterator[Any] | Iterator[Any]:
        source = load_user_object(self._spec)
        try:
            self._live = getattr(source, "live", False) is True
            if callable(source) and not isinstance(source, (AsyncIterator, Iterator)):
                source = source()
            if inspect.isawaitable(source):
                source = await source
            if hasattr(source, "__aiter__"):
                self._rows = aiter(source)
            elif hasattr(source, "__iter__") and not isinstance(source, (str, bytes, dict)):
                self._rows = iter(source)
        except BaseException as error:  # also SystemExit of a user's function
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            raise RecipeError(f"prompts {self._spec} cannot be opened: {describe_error(error)}: correct it") from error
        if self._rows is None:
            kind = type(source).__name__
            raise RecipeError(
                f"prompts {self._spec} gave a {kind}: name an (async) iterator or a function returning one"
            )
        return self._rows


class IteratorPrompts:
    """``OpenPrompts`` of a user's iterator. ``start``: number of prompts that were drawn before the run was resumed;
    ``form``: form of its rows."""

    size = None
    """An iterator has no epochs."""

    def __init__(self, spec: str, tokenizer: Tokenizer | None, *, start: int, form: RowForm) -> None:
        self._spec = spec
        self._form = form
        self._start = start
        self._tokenizer = tokenizer
        self._rows = UserRows(spec)
        self._loop = asyncio.new_event_loop()
        self._filling = asyncio.Lock()
        self._drawn: deque[Prompt] = deque()
        self._exhausted = False
        self._closed = False
        self._thread = threading.Thread(target=self._run_loop, name=f"prompts {spec}", daemon=True)
        self._thread.start()

    async def draw(self, count: int) -> list[Prompt]:
        """Draw up to ``count`` prompts from the iterator."""
        if self._closed:
            raise StreamRLError(f"prompts {self._spec} were drawn after they were closed")
        filling = asyncio.run_coroutine_threadsafe(self._fill(count), self._loop)
        # Shielded, because cancellation in the middle of a user's generator would close it, and lose rows of this call.
        await asyncio.shield(asyncio.wrap_future(filling))
        return [self._drawn.popleft() for _ in range(min(count, len(self._drawn)))]

    async def aclose(self) -> None:
        """Close the iterator. After 2 s it is left to its daemon thread."""
        if self._closed:
            return
        self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close_rows(), self._loop)
        closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        await to_thread.run_sync(self._thread.join, _CLOSE_GRACE_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _fill(self, count: int) -> None:
        """Read rows until ``count`` prompts are drawn, or the iterator ends."""
        async with self._filling:  # a draw that was cancelled may still be reading
            start = self._start
            self._start = 0
            await self._rows.skip(start)
            while len(self._drawn) < count and not self._exhausted:
                has_row, row = await self._rows.next_row()
                if not has_row:
                    self._exhausted = True
                    return
                try:
                    prompt = read_prompt(to_form(row, self._form), self._rows.count, self._tokenizer)
                except BadRow as error:
                    raise StreamRLError(f"prompts {self._spec}, row {self._rows.count} {error}") from error
                self._drawn.append(prompt)

    async def _close_rows(self) -> None:
        async with self._filling:
            await self._rows.aclose()


def _is_cancelled() -> bool:
    """Whether the current task is cancelled. Otherwise user code raised ``CancelledError`` itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
