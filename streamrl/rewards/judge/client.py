"""Requests to an OpenAI-compatible endpoint, several at once, tried again where that may help; a cache of answers."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass
from weakref import WeakValueDictionary

from streamrl.base.errors import StreamRLError
from streamrl.base.hosts import is_loopback

if TYPE_CHECKING:
    import httpx

_WORTH_A_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 15.0
_LONGEST_WAIT_FOR_OWN_S = 1.0  # it is being started again; nobody else is troubled by asking often
_CONNECT_S = 10.0
_LONGEST_DETAIL = 200
_TRIM_EVERY = 256
_BUSY_S = 10.0


class JudgeError(StreamRLError):
    """The judge gave no answer; the message names the endpoint, what it said and the remedy."""


class JudgeClient:
    """Asks one endpoint, on one event loop. Nothing is opened before the first question, so that it may be made before
    a fork."""

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
        """``timeout_s`` None: the caller knows how long it waits. ``socket_path``: of the run's own judge, which is
        started again when it dies: it is asked until it is there. Empty: there is none."""
        self._endpoint = endpoint.rstrip("/")
        self._headers = dict(headers)
        self._concurrency = concurrency
        self._retries = retries
        self._timeout_s = timeout_s
        self._socket_path = socket_path
        self._proxy = "" if socket_path is not None else proxy_of(self._endpoint)
        self._opened: tuple[httpx.AsyncClient, asyncio.Semaphore] | None = None

    async def ask(self, route: str, body: Mapping[str, Any]) -> str:
        """The text that the model wrote. Raises ``JudgeError`` when the last attempt failed as well."""
        if self._socket_path == "":
            raise JudgeError("there is nobody to ask: set endpoint, or run a recipe whose [judge] has a model")
        self._opened = self._opened or self._open()
        http, places = self._opened
        async with places:
            return await self._ask(http, route, body)

    async def aclose(self) -> None:
        """Close the connections. The next question opens them again."""
        opened = self._opened
        self._opened = None
        if opened is not None:
            await opened[0].aclose()

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
        """The proxy in words, without the password that its address may have."""
        if not self._proxy:
            return ""
        return f" through the proxy {self._proxy.rpartition('@')[2]} (no_proxy names hosts that are asked without it)"

    async def _ask(self, http: httpx.AsyncClient, route: str, body: Mapping[str, Any]) -> str:
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
                    what = f"{type(error).__name__} {error}".strip()
                    tried = f"after {attempt} attempts"
                    raise JudgeError(
                        f"the judge {url} cannot be reached{self._through} {tried} ({what}): is it up?"
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
    """The proxy that http_proxy, https_proxy or all_proxy names for ``url``; empty: none, as for this host itself and
    for hosts that no_proxy names."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return ""
    found = proxies.get(parts.scheme) or proxies.get("all", "")
    return found if not found or "://" in found else f"http://{found}"


def _wait_s(attempt: int, retry_after: str) -> float:
    """Seconds before the attempt after ``attempt``: what the server asked for, else doubling, with jitter."""
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
    """Answers by the hash of the request, in SQLite: in memory, or in a file that workers share. The newest ``entries``
    (and up to 256 more) are there. One event loop at a time uses it.

    Calls block for as long as SQLite takes (well below a millisecond, unless other processes write)."""

    def __init__(self, path: str, entries: int) -> None:
        """``path`` empty: in memory. Nothing is opened yet: a connection must not cross a fork."""
        self._path = path
        self._entries = entries
        self._opened: sqlite3.Connection | None = None
        self._added = 0
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

    def add(self, key: str, answer: str) -> None:
        """Remember an answer."""
        connection = self._connection()
        connection.execute("INSERT OR REPLACE INTO answers (key, answer) VALUES (?, ?)", (key, answer))
        self._added += 1
        if self._added % _TRIM_EVERY == 0:
            oldest = "SELECT number FROM answers ORDER BY number DESC LIMIT -1 OFFSET ?"
            connection.execute(f"DELETE FROM answers WHERE number IN ({oldest})", (self._entries,))

    def _connection(self) -> sqlite3.Connection:
        if self._opened is not None:
            return self._opened
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        if self._path:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, key TEXT UNIQUE, answer TEXT NOT NULL)"
        )
        self._opened = connection
        return connection
