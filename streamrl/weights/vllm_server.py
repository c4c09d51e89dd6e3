"""A ``vllm serve`` as the target of weight pushes: the calls that ``engine_push`` makes to an ``AsyncLLM``, over HTTP.

An outside training loop makes a ``VllmServer`` and gives it to ``push``; runs of streamrl itself do not. The server
must run in vLLM's developer mode, which has the weight routes, and with streamrl's backend; see ``server_variables``
and ``SERVER_OPTIONS`` of ``streamrl.weights``. These routes can stop the server or change its weights: keep the port on
a private network. The server's workers pull the weights themselves from the publisher."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from anyio import to_thread

from streamrl.base.errors import EngineError
from streamrl.base.types import JsonMapping, JsonObject, TextMapping, TextsByName


class VllmServer:
    """Weight and pause calls to one server. Every method raises ``EngineError`` with the server's reply."""

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        """``address``: ``http://host:port``. ``timeout_s``: longest time of one call, in seconds."""
        self._address = address.rstrip("/")
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an engine is on our own network

    async def collective_rpc(self, method: str, args: Sequence[str] = ()) -> list[Any]:
        """Call a method on every worker."""
        reply = await self._post("collective_rpc", body={"method": method, "args": list(args)})
        return list(reply.get("results", []))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End vLLM's update session."""
        await self._post("finish_weight_update", body={"weight_version": weight_version})

    async def pause_generation(self, *, mode: str = "keep", clear_cache: bool = True) -> None:
        """Pause between two decode steps."""
        await self._post("pause", query={"mode": mode, "clear_cache": str(clear_cache).lower()})

    async def resume_generation(self) -> None:
        """Resume sampling."""
        await self._post("resume")

    async def compute_weight_checksums(self) -> list[TextsByName]:
        """Return vLLM's own SHA-256 of every runtime parameter."""
        reply = await self._post("weight_checker", body={"action": "checksum"})
        return [reply["checksums"]]

    async def _post(
        self, route: str, *, body: JsonMapping | None = None, query: TextMapping | None = None
    ) -> JsonObject:
        url = f"{self._address}/{route}"
        if query:
            url += f"?{urllib.parse.urlencode(query)}"
        return await to_thread.run_sync(self._post_blocking, url, json.dumps(body or {}).encode())

    def _post_blocking(self, url: str, body: bytes) -> JsonObject:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                content = response.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            if error.code == 404:
                detail += "; is it started with VLLM_SERVER_DEV_MODE=1?"
            raise EngineError(f"{url} answered {error.code}: {detail}") from error
        except OSError as error:
            raise EngineError(f"{url} cannot be reached: {error}. Is the server up?") from error
        return dict(json.loads(content or "{}"))
