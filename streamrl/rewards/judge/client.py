"""Client of an OpenAI-compatible endpoint, with concurrent requests and retries, and a cache of answers.

``reward`` makes both for each judged reward; they run where the reward runs (reward worker or call process)."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass
from weakref import WeakValueDictionary

from streamrl.base.errors import StreamRLError
from streamrl.base.host_addresses import is_loopback
from streamrl.base.types import JsonMapping

if TYPE_CHECKING:
    import httpx

_WORTH_A_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 15.0
_LONGEST_WAIT_FOR_OWN_S = 1.0  # while the run's own judge restarts: frequent requests disturb no other user
_CONNECT_S = 10.0
_LONGEST_DETAIL = 200
_TRIM_EVERY = 256
_BUSY_S = 10.0


class JudgeError(StreamRLError):
    """The judge gave no answer. The message names the endpoint, its response and the remedy."""


class JudgeClient:
    """Client of one endpoint, on one event loop. Connections are opened by the first question, so the client may be
    made before a fork."""

    def __init__(
        self,
        endpoint: str,
        headers: Mapping[str, str],
        *,
        concurrency: int,
        retries: int,
        timeout_s: float | None,
        socket_path: str | None = None,
    ) -> None:
        """``timeout_s``: limit of one request; None: the caller limits the whole question. ``socket_path``: socket of
        the run's own judge, which is restarted when it dies, so a question is repeated until the judge answers; empty:
        the run has no judge; None: ``endpoint`` is the address of another judge."""
        self._endpoint = endpoint.rstrip("/")
        self._headers = dict(headers)
        self._concurrency = concurrency
        self._retries = retries
        self._timeout_s = timeout_s
        self._socket_path = socket_path
        self._proxy = ""
        if socket_path is None:
            self._proxy = proxy_of(self._endpoint)
        self._connections: tuple[httpx.AsyncClient, asyncio.Semaphore] | None = None

    async def ask(self, route: str, body: JsonMapping) -> str:
        """The text that the model wrote. Raises ``JudgeError`` when the last attempt failed as well."""
        if self._socket_path == "":
            raise JudgeError("there is nobody to ask: set endpoint, or run a recipe whose [judge] has a model")
        if self._connections is None:
            self._connections = self._open()
        http, semaphore = self._connections
        async with semaphore:
            return await self._ask(http, route, body)

    async def aclose(self) -> None:
        """Close the connections. The next question opens them again."""
        connections = self._connections
        self._connections = None
        if connections is not None:
            http, _ = connections
            await http.aclose()

    def _open(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        import httpx

        limits = httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency)
        http = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(self._timeout_s, connect=_CONNECT_S),
            transport=httpx.AsyncHTTPTransport(uds=self._socket_path, limits=limits, proxy=self._proxy or None),
        )
        return http, asyncio.Semaphore(self._concurrency)

    @property
    def _through(self) -> str:
        """Words about the proxy for errors, without the password that its address may have; empty: no proxy."""
        if not self._proxy:
            return ""
        return f" through the proxy {self._proxy.rpartition('@')[2]} (no_proxy names hosts that are asked without it)"

    async def _ask(self, http: httpx.AsyncClient, route: str, body: JsonMapping) -> str:
        import httpx

        url = f"{self._endpoint}/{route}"
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await http.post(url, json=dict(body))
            except httpx.TransportError as error:
                if self._socket_path:
                    await asyncio.sleep(min(_wait_s(attempt, ""), _LONGEST_WAIT_FOR_OWN_S))
                    continue
                if attempt > self._retries:
                    reason = f"{type(error).__name__} {error}".strip()
                    raise JudgeError(
                        f"the judge {url} cannot be reached{self._through} after {attempt} attempts ({reason}): "
                        "is it up?"
                    ) from error
                await asyncio.sleep(_wait_s(attempt, ""))
                continue
            if response.status_code == 200:
                return _text(response, url)
            if attempt > self._retries or response.status_code not in _WORTH_A_RETRY:
                detail = " ".join(response.text[:_LONGEST_DETAIL].split())
                raise JudgeError(
                    f"the judge {url}{self._through} answered {response.status_code}: {detail}: {_remedy(response)}"
                )
            await asyncio.sleep(_wait_s(attempt, response.headers.get("Retry-After", "")))


def proxy_of(url: str) -> str:
    """The proxy that http_proxy, https_proxy or all_proxy names for ``url``; empty: no proxy, as for this host itself
    and for hosts that no_proxy names."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    proxy = proxies.get(parts.scheme) or proxies.get("all", "")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _wait_s(attempt: int, retry_after: str) -> float:
    """Seconds to wait after attempt number ``attempt``: ``Retry-After`` of the server, otherwise an exponential backoff
    with jitter."""
    if retry_after.isdigit():
        return min(float(retry_after), _LONGEST_WAIT_S)
    return min(_FIRST_WAIT_S * 2.0 ** min(attempt - 1, 16), _LONGEST_WAIT_S) * random.uniform(0.5, 1.0)


def _text(response: httpx.Response, url: str) -> str:
    try:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"the judge {url} gave no answer of the OpenAI form: {response.text[:100]!r}") from error
    if not isinstance(text, str):
        raise JudgeError(f"the judge {url} wrote no text (a reasoning model may need a larger max_tokens)")
    return text


def _remedy(response: httpx.Response) -> str:
    remedies = {
        400: "mend the request",
        401: "set api_key_variable to the variable that holds the key",
        403: "set api_key_variable to the variable that holds the key",
        404: "correct endpoint, or model",
        429: "lower concurrency",
    }
    return remedies.get(response.status_code, "look into its log")


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
