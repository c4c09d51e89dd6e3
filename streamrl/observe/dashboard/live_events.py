"""Server-sent events about a run: each client goes on from its own place, so nothing is kept for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamrl.observe.dashboard.run_view import RunView
from streamrl.observe.dashboard.timeline_columns import event_row, step_row

LOOK_S = 0.5
COMMENT_S = 15.0
SLOW_S = 20.0
"""Seconds between two looks, between comments, and after which a client that takes nothing is left."""
MOST_ROWS = 20_000
"""Trajectories of one event."""


class StreamPlace(msgspec.Struct, array_like=True):
    """Counts that a client has: of trajectories, prompts, events and loads of engines; its last step and evaluation.
    ``server``: whose numbers these are."""

    server: int
    rows: int = 0
    prompts: int = 0
    events: int = 0
    step: int = -1
    evaluation: int = -1
    loads: int = 0


def place_of(view: RunView) -> StreamPlace:
    """The end of what is known now."""
    timeline = view.timeline
    metrics = view.metrics
    return StreamPlace(
        server=os.getpid(),
        rows=timeline.count,
        prompts=len(timeline.names()["prompts"]),
        events=len(timeline.events),
        step=max(metrics.steps.step, default=-1),
        evaluation=max(metrics.evaluations.step, default=-1),
        loads=len(timeline.load["time_s"]),
    )


def read_place(text: str) -> StreamPlace | None:
    """The place in an id of an event; None where it is none of this server."""
    try:
        place = msgspec.json.decode(text, type=StreamPlace)
    except msgspec.MsgspecError:
        return None
    return place if place.server == os.getpid() else None


def news(view: RunView, place: StreamPlace) -> Iterator[tuple[str, Any]]:
    """Events after ``place``, which moves with them."""
    timeline = view.timeline
    metrics = view.metrics
    is_new = max(metrics.steps.step[-1:], default=-1) > place.step  # else nothing is computed of a long run
    found: dict[str, Any] = metrics.answer(place.step) if is_new else {"step": ()}
    traced = {step.policy_version: step for step in timeline.steps} if is_new else {}
    for at, step in enumerate(found["step"]):
        place.step = step
        values = {name: column[at] for name, column in found["values"].items()}
        row = {"trained_tokens_total": found["trained_tokens"][at], "values": values}
        known = step_row(traced[step]) if step in traced else {"step": step}
        yield "step", known | row | {"metrics_time_s": found["time_s"][at]}
    evaluated = metrics.evaluations.after(place.evaluation)
    for at, step in enumerate(evaluated["step"]):
        place.evaluation = step
        values = {name: column[at] for name, column in evaluated["values"].items()}
        yield "evaluation", {"step": step, "time_s": evaluated["time_s"][at], "values": values}
    while place.rows < (count := timeline.count):
        first = place.rows
        place.rows = min(count, place.rows + MOST_ROWS)
        names = timeline.names(place.prompts)
        first_prompt = place.prompts
        place.prompts = place.prompts + len(names["prompts"])
        rows = timeline.rows(first, place.rows)
        yield "trajectories", {"first": first, "rows": rows, "first_prompt": first_prompt, **names}
    for event in timeline.events[place.events :]:
        place.events += 1
        yield "event", event_row(event)
    loads = place.loads
    place.loads = len(timeline.load["time_s"])
    if loads < place.loads:
        yield "engines", {name: values[loads : place.loads].tolist() for name, values in timeline.load.items()}


class LiveEvents(Response):
    """The stream of ``view`` after ``place`` (None: from now on, where its client has fetched the rest)."""

    media_type = "text/event-stream"

    def __init__(self, view: RunView, place: StreamPlace | None, headers: dict[str, str]) -> None:
        super().__init__(headers=headers | {"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._view = view
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client leaves, or takes nothing any more."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, receive, group.cancel_scope)
            await self._stream(send)
            group.cancel_scope.cancel()

    async def _watch(self, receive: Receive, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        view = self._view
        text = "retry: 1000\n\n"
        state = ""
        sent = anyio.current_time()
        while True:
            if not text and anyio.current_time() - sent > COMMENT_S:
                text = ": still here\n\n"
            if text:
                with anyio.move_on_after(SLOW_S) as limit:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                if limit.cancelled_caught:
                    return
                sent = anyio.current_time()
            await anyio.to_thread.run_sync(view.refresh)
            text = await anyio.to_thread.run_sync(self._text)
            summary = await anyio.to_thread.run_sync(view.summary)
            if summary["state"] != state:
                state = summary["state"]
                text = text + _event("state", summary, "")
            if not text:
                await anyio.sleep(LOOK_S)

    def _text(self) -> str:
        if self._place is None:
            self._place = place_of(self._view)
        events = list(news(self._view, self._place))
        place = msgspec.json.encode(self._place).decode()
        return "".join(
            _event(kind, data, place if at == len(events) - 1 else "") for at, (kind, data) in enumerate(events)
        )


def _event(kind: str, data: Any, place: str) -> str:
    head = f"id: {place}\n" if place else ""
    return f"{head}event: {kind}\ndata: {msgspec.json.encode(data).decode()}\n\n"
