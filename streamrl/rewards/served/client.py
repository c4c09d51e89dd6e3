"""Client of an OpenAI-compatible endpoint, with concurrent requests and retries.

``rewards.judge`` makes one for each judged reward, where the reward runs (reward worker or call process), and
``rewards.teacher`` one for each teacher, in the controller."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import anyio

from streamrl.base.errors import StreamRLError
from streamrl.base.host_addresses import is_loopback
from streamrl.base.types import JsonMapping, TextMapping

if TYPE_CHECKING:
    import httpx

_WORTH_A_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 15.0
_LONGEST_WAIT_FOR_OWN_S = 1.0  # while a model of the run restarts: frequent requests disturb no other user
_CONNECT_S = 10.0
_LONGEST_DETAIL = 200


class ModelError(StreamRLError):
    """The model gave no answer. The message names the endpoint, its response and the remedy."""


class ModelClient:
    """Client of one endpoint, on one event loop. Connections are opened by the first question, so the client may be
    made before a fork."""

    def __init__(
        self,
        endpoint: str,
        headers: TextMapping,
        *,
        concurrency: int,
        retries: int | None,
        timeout_s: float | None,
        socket_path: str | None = None,
        kind: str = "judge",
    ) -> None:
        """``retries``: number of retries; None: a question is repeated until ``timeout_s`` from its first request.
        ``timeout_s``: limit of one request; None: the caller limits the whole question. ``kind``: word for the model in
        errors. ``socket_path``: socket of a model that the run serves and restarts when it dies, so a question is
        repeated until the model answers; empty: the run serves none; None: ``endpoint`` is the address of another
        model."""
        self._endpoint = endpoint.rstrip("/")
        self._headers = dict(headers)
        self._concurrency = concurrency
        self._retries = math.inf if retries is None else retries
        self._kind = kind
        self._timeout_s = timeout_s
        self._socket_path = socket_path
        self._proxy = ""
        if socket_path is None:
            self._proxy = proxy_of(self._endpoint)
        self._connections: tuple[httpx.AsyncClient, asyncio.Semaphore] | None = None
        self.last_failure = ""
        """Last answer that was worth a retry, for a caller whose time is over; empty: none."""

    async def ask(self, route: str, body: JsonMapping) -> str:
        """The text that the model wrote. Raises ``ModelError`` when the last attempt failed as well."""
        return _text(await self._post(route, body), f"{self._endpoint}/{route}")

    async def post(self, route: str, body: JsonMapping) -> bytes:
        """Content of the answer. Raises ``ModelError`` when the last attempt failed as well, ``TimeoutError`` after the
        time of a question that is repeated without end."""
        return (await self._post(route, body)).content

    async def _post(self, route: str, body: JsonMapping) -> httpx.Response:
        if self._socket_path == "":
            raise ModelError("there is nobody to ask: set endpoint, or run a recipe whose [judge] has a model")
        if self._connections is None:
            self._connections = self._open()
        http, semaphore = self._connections
        async with semaphore:
            with anyio.fail_after(self._timeout_s if self._retries == math.inf else None):
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

    async def _ask(self, http: httpx.AsyncClient, route: str, body: JsonMapping) -> httpx.Response:
        import httpx

        url = f"{self._endpoint}/{route}"
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await http.post(url, json=dict(body))
            except httpx.RequestError as error:
                if self._socket_path:
                    await asyncio.sleep(min(_wait_s(attempt, ""), _LONGEST_WAIT_FOR_OWN_S))
                    continue
                self.last_failure = reason = f"{type(error).__name__} {error}".strip()
                if attempt > self._retries:
                    raise ModelError(
                        f"the {self._kind} {url} cannot be reached{self._through} after {attempt} attempts ({reason}): "
                        "is it up?"
                    ) from error
                await asyncio.sleep(_wait_s(attempt, ""))
                continue
            if response.status_code == 200:
                self.last_failure = ""
                return response
            detail = " ".join(response.text[:_LONGEST_DETAIL].split())
            self.last_failure = f"it answered {response.status_code}: {detail}"
            if attempt > self._retries or response.status_code not in _WORTH_A_RETRY:
                model = f"the {self._kind} {url}{self._through}"
                raise ModelError(f"{model} answered {response.status_code}: {detail}: {_remedy(response)}")
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
        raise ModelError(f"the judge {url} gave no answer of the OpenAI form: {response.text[:100]!r}") from error
    if not isinstance(text, str):
        raise ModelError(f"the judge {url} wrote no text (a reasoning model may need a larger max_tokens)")
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
