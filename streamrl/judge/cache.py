"""What judges answered, by the hash of what they were asked: SQLite, in memory or in a file that workers share."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

_TRIM_EVERY = 256
_BUSY_S = 10.0


class AnswerCache:
    """At most ``entries`` (and up to 256 more) answers; the oldest go first. One event loop at a time uses it.

    Calls block for as long as SQLite takes (well below a millisecond, unless other processes write).
    """

    def __init__(self, path: str, entries: int) -> None:
        """``path`` empty: in memory. Nothing is opened yet: a connection must not cross a fork."""
        self._path = path
        self._entries = entries
        self._opened: tuple[int, sqlite3.Connection] | None = None
        self._kept = 0
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """One at a time for each key: who comes second finds the answer of the first, or asks when that one gave up."""
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            yield

    def find(self, key: str) -> str | None:
        """The answer, or None."""
        row = self._connection().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, answer: str) -> None:
        """Remember an answer."""
        connection = self._connection()
        connection.execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", (key, answer))
        self._kept += 1
        if self._kept % _TRIM_EVERY == 0:
            oldest = "SELECT number FROM answers ORDER BY number DESC LIMIT -1 OFFSET ?"
            connection.execute(f"DELETE FROM answers WHERE number IN ({oldest})", (self._entries,))

    def _connection(self) -> sqlite3.Connection:
        if self._opened is not None and self._opened[0] == os.getpid():
            return self._opened[1]
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        if self._path:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE, answer TEXT NOT NULL)"
        )
        self._opened = (os.getpid(), connection)
        return connection

    def close(self) -> None:
        """Close the file. Idempotent; the next use opens it again."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()
        self._opened = None
