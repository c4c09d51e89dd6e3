"""A cache of the judge's answers. ``reward`` makes one for each judged reward, where the reward runs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

_TRIM_EVERY = 256
_BUSY_S = 10.0


class AnswerCache:
    """Answers by the hash of the request, in SQLite: in memory, or in a file that workers share. It keeps the newest
    ``entries`` answers, and up to 256 more. One event loop at a time uses it.

    Calls block until SQLite has answered (well below a millisecond, unless other processes write)."""

    def __init__(self, path: str, entries: int) -> None:
        """``path``: file of the cache; empty: in memory. The file is opened at first use, because a connection must not
        cross a fork."""
        self._path = path
        self._entries = entries
        self._database: sqlite3.Connection | None = None
        self._added = 0
        self._key_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """Lock of ``key`` for the block: of several equal questions one is sent, and the others find its answer. Where
        it got no answer, the next one is sent."""
        lock = self._key_locks.setdefault(key, asyncio.Lock())
        async with lock:
            yield

    def find(self, key: str) -> str | None:
        """The answer; None: the cache does not have it."""
        row = self._connection().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def add(self, key: str, answer: str) -> None:
        """Remember an answer."""
        connection = self._connection()
        connection.execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", (key, answer))
        self._added += 1
        if self._added % _TRIM_EVERY == 0:
            oldest = "SELECT number FROM answers ORDER BY number DESC LIMIT -1 OFFSET ?"
            connection.execute(f"DELETE FROM answers WHERE number IN ({oldest})", (self._entries,))

    def _connection(self) -> sqlite3.Connection:
        if self._database is not None:
            return self._database
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        if self._path:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE, answer TEXT NOT NULL)"
        )
        self._database = connection
        return connection
