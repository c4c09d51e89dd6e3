"""The server of the page. ``streamrl dashboard`` calls ``serve`` in its own process, which reads the files of runs,
listens on 127.0.0.1 only and answers GET."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import uvicorn
from anyio import to_thread
from msgspec import ValidationError, convert, json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonObject
from streamrl.comm.http_connections import Connections
from streamrl.observe.dashboard.live_events import LiveEvents, place_of, read_place
from streamrl.observe.dashboard.report_page import INDEX, TYPES, page_files
from streamrl.observe.dashboard.run_view import ANSWERS, RunView, RunViews, recipe_differences
from streamrl.observe.dashboard.sample_rows import SampleFilter
from streamrl.observe.run_files.run_reader import RunStatus

ADDRESS = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class DashboardServer(RunViews):
    """Answers the requests of the page about the runs in ``places``."""

    def __init__(self, places: Sequence[Path]) -> None:
        super().__init__(places)
        self._page = page_files()

    def app(self) -> Starlette:
        """Return the application with its routes."""
        answers: dict[str, Callable[[Request, RunView], Any]] = {
            "metrics": lambda request, view: view.metrics.answer(_number(request, "after", -1)),
            "samples": _samples,
            **{name: partial(_without_request, answer) for name, answer in ANSWERS.items()},
        }
        runs = [
            Route(f"/api/runs/{{number:int}}/{name}", partial(self._answer, answer)) for name, answer in answers.items()
        ]
        return Starlette(
            routes=[
                Route("/", lambda request: self._file(INDEX)),
                Route("/assets/{name}", lambda request: self._file(request.path_params["name"])),
                Route("/api/runs", self._runs),
                Route("/api/compare", self._compare),
                Route("/api/runs/{number:int}/timeline", self._timeline),
                Route("/api/runs/{number:int}/live", self._live),
                *runs,
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[ADDRESS, "localhost"], www_redirect=False)],
            exception_handlers={HTTPException: _refused, StreamRLError: _refused},
        )

    def _file(self, name: str) -> Response:
        if (content := self._page.get(name)) is None:
            raise HTTPException(404, "the page has no such file")
        return Response(content, media_type=TYPES[Path(name).suffix], headers=HEADERS)

    async def _runs(self, request: Request) -> Response:
        def summaries() -> list[JsonObject]:
            views = self.views()
            for view in views:
                view.refresh(timeline=False)
            return [view.summary() for view in views]

        return _json(await to_thread.run_sync(summaries))

    async def _compare(self, request: Request) -> Response:
        try:
            numbers = [int(number) for number in request.query_params.get("runs", "").split(",")]
        except ValueError:
            raise HTTPException(400, "runs must be numbers with commas, such as 0,1") from None
        views = [await self._view(number) for number in numbers]
        return _json({"recipe_differences": recipe_differences(views)})

    async def _view(self, number: int) -> RunView:
        views = list(self._views.values()) or await to_thread.run_sync(self.views)
        if not 0 <= number < len(views):
            raise HTTPException(404, f"there is no run {number}: /api/runs lists {len(views)}")
        return views[number]

    async def _refreshed_view(self, request: Request) -> RunView:
        view = await self._view(request.path_params["number"])
        await to_thread.run_sync(view.refresh)
        return view

    async def _answer(self, answer: Callable[[Request, RunView], Any], request: Request) -> Response:
        view = await self._refreshed_view(request)
        return _json(await to_thread.run_sync(answer, request, view))

    async def _timeline(self, request: Request) -> Response:
        view = await self._refreshed_view(request)
        length, parts = await to_thread.run_sync(view.timeline.block)
        headers = HEADERS | {"Content-Length": str(length)}
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)

    async def _live(self, request: Request) -> Response:
        view = await self._refreshed_view(request)
        text = request.headers.get("last-event-id") or request.query_params.get("after", "")
        place = read_place(text) if text else None
        return LiveEvents(view, place or place_of(view), HEADERS)


def _json(answer: Any) -> Response:
    return Response(json.encode(answer), media_type="application/json", headers=HEADERS)


def _without_request(answer: Callable[[RunView], Any], request: Request, view: RunView) -> Any:
    return answer(view)


def _number(request: Request, name: str, default: int) -> int:
    try:
        return int(request.query_params.get(name, default))
    except ValueError:
        raise HTTPException(400, f"{name} must be a whole number") from None


def _samples(request: Request, view: RunView) -> JsonObject:
    parameters = {name: text for name, text in request.query_params.items() if text}
    try:
        sample_filter = convert(parameters, SampleFilter, strict=False)
    except ValidationError as error:
        raise HTTPException(400, f"step, least, most: {error}") from None
    return view.samples(sample_filter, _number(request, "offset", 0), _number(request, "limit", 50))


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = error.detail if isinstance(error, HTTPException) else str(error)
    return Response(f"{text}\n", status, HEADERS, "text/plain")


def serve(places: Sequence[Path], port: int, ready: Callable[[str], object]) -> None:
    """Serve until SIGINT or SIGTERM. ``port``: 0 for any free port. ``ready``: called with the address of the page.
    Raises ``StreamRLError`` where there is no run, or the port is in use."""
    dashboard = DashboardServer(places)
    views = dashboard.views()
    # The page shows this run first: it is read now, so that the page need not wait for it.
    first_view = next((view for view in views if view.files.state(None) is RunStatus.RUNNING), views[-1])
    Thread(target=first_view.refresh, daemon=True).start()
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
        except OSError as error:
            raise StreamRLError(
                f"port {port} of {ADDRESS} cannot be listened on ({error.strerror}): give another one with --port, or "
                "--port 0 for any that is free"
            ) from error
        listening.listen()
        config = uvicorn.Config(
            dashboard.app(),
            http=Connections().open,  # type: ignore[arg-type]
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        ready(f"http://{ADDRESS}:{listening.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listening])
