"""A ``vllm serve`` as the target of weight pushes: what ``engine_push`` asks of an ``AsyncLLM``, over HTTP.

The server must run in vLLM's developer mode (that is where its weight routes are) and with streamrl's backend; see
``server_environment`` and ``SERVER_OPTIONS`` of ``streamrl.weights``. Those routes can stop the server or change its
weights: keep the port on a private network. Weight bytes do not pass here; the server's workers pull them from the
publisher."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import anyio.to_thread

from streamrl.base.errors import EngineError


class VllmServer:
    """Weight and pause calls to one server. Every method raises ``EngineError`` with the server's answer."""

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        """``address``: ``http://host:port``. ``timeout_s``: how long one call may take."""
        self._address = address.rstrip("/")
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an engine is on our own network

    async def collective_rpc(self, method: str, args: Sequence[str] = ()) -> list[Any]:
        """Call a method on every worker."""
        answer = await self._post("collective_rpc", body={"method": method, "args": list(args)})
        return list(answer.get("results", []))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close vLLM's update session."""
        await self._post("finish_weight_update", body={"weight_version": weight_version})

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = True) -> None:
        """Stop between two steps."""
        await self._post("pause", query={"mode": mode, "clear_cache": str(clear_cache).lower()})

    async def resume_generation(self) -> None:
        """Resume sampling."""
        await self._post("resume")

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        """vLLM's own SHA-256 of every runtime parameter."""
        answer = await self._post("weight_checker", body={"action": "checksum"})
        return [answer["checksums"]]

    async def _post(
        self, route: str, *, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        url = f"{self._address}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        return await anyio.to_thread.run_sync(self._post_blocking, url, json.dumps(body or {}).encode())

    def _post_blocking(self, url: str, body: bytes) -> dict[str, Any]:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            remedy = "; is it started with VLLM_SERVER_DEV_MODE=1?" if error.code == 404 else ""
            raise EngineError(f"{url} answered {error.code}: {detail}{remedy}") from error
        except OSError as error:
            raise EngineError(f"{url} cannot be reached: {error}. Is the server up?") from error
        return dict(json.loads(answer)) if answer else {}
