"""Server-sent events about a run that goes on. ``server.py`` answers ``/api/runs/N/live`` with ``LiveEvents``, in the
process of ``streamrl dashboard``. The id of an event says how much its client has, so the server keeps nothing about a
client that reconnects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import anyio
from anyio import to_thread
from msgspec import MsgspecError, Struct, json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamrl.base.types import JsonObject, TextsByName
from streamrl.observe.dashboard.run_view import RunView
from streamrl.observe.dashboard.timeline_columns import event_row, step_row

LOOK_S = 0.5
"""Seconds between two reads of the files."""
COMMENT_S = 15.0
"""Seconds without an event after which a comment is sent, which keeps the connection open."""
SLOW_S = 20.0
"""Seconds after which a client that receives nothing is disconnected."""
MOST_ROWS = 20_000
"""Trajectories in one event."""


class StreamPlace(Struct, array_like=True):
    """The rows that a client has: number of trajectories, prompts, events and loads of engines, and the last step and
    evaluation. ``server``: id of the process whose numbers they are."""

    server: int
    rows: int = 0
    prompts: int = 0
    events: int = 0
    step: int = -1
    evaluation: int = -1
    loads: int = 0


def place_of(view: RunView) -> StreamPlace:
    """Return the place behind everything that the view has read."""
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
    """Decode the id of an event. None where it is invalid or of another server process."""
    try:
        place = json.decode(text, type=StreamPlace)
    except MsgspecError:
        return None
    return place if place.server == os.getpid() else None


def news(view: RunView, place: StreamPlace) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the data of each event after ``place``, and move ``place`` behind it."""
    timeline = view.timeline
    yield from _new_steps(view, place)
    evaluations = view.metrics.evaluations.after(place.evaluation)
    for index, step in enumerate(evaluations["step"]):
        place.evaluation = step
        values = {name: column[index] for name, column in evaluations["values"].items()}
        yield "evaluation", {"step": step, "time_s": evaluations["time_s"][index], "values": values}
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
    first_load = place.loads
    place.loads = len(timeline.load["time_s"])
    if first_load < place.loads:
        yield "engines", {name: column[first_load : place.loads].tolist() for name, column in timeline.load.items()}


def _new_steps(view: RunView, place: StreamPlace) -> Iterator[tuple[str, Any]]:
    """Yield the events of the steps after ``place``."""
    metrics = view.metrics
    if max(metrics.steps.step[-1:], default=-1) <= place.step:
        return  # the answer and the dictionary below would cost time for a run with many steps
    answer = metrics.answer(place.step)
    traced = {step.policy_version: step for step in view.timeline.steps}
    for index, step in enumerate(answer["step"]):
        place.step = step
        row: JsonObject = {"step": step}
        if step in traced:
            row = step_row(traced[step])
        row["trained_tokens_total"] = answer["trained_tokens"][index]
        row["values"] = {name: column[index] for name, column in answer["values"].items()}
        row["metrics_time_s"] = answer["time_s"][index]
        yield "step", row


class LiveEvents(Response):
    """The stream of events of ``view`` after ``place``. ``place``: None for a client that has all rows up to now."""

    media_type = "text/event-stream"

    def __init__(self, view: RunView, place: StreamPlace | None, headers: TextsByName) -> None:
        super().__init__(headers=headers | {"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._view = view
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects, or receives nothing for ``SLOW_S``."""
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
        sent_at = anyio.current_time()
        while True:
            if not text and anyio.current_time() - sent_at > COMMENT_S:
                text = ": still here\n\n"
            if text:
                with anyio.move_on_after(SLOW_S) as limit:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                if limit.cancelled_caught:
                    return
                sent_at = anyio.current_time()
            await to_thread.run_sync(view.refresh)
            text = await to_thread.run_sync(self._text)
            summary = await to_thread.run_sync(view.summary)
            if summary["state"] != state:
                state = summary["state"]
                text = text + _event("state", summary)
            if not text:
                await anyio.sleep(LOOK_S)

    def _text(self) -> str:
        """Return the new events as text. The last of them has the id."""
        if self._place is None:
            self._place = place_of(self._view)
        events = [_event(kind, data) for kind, data in news(self._view, self._place)]
        if events:
            place = json.encode(self._place).decode()
            events[-1] = f"id: {place}\n{events[-1]}"
        return "".join(events)


def _event(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.encode(data).decode()}\n\n"
