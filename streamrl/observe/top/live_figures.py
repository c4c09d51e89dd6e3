"""The topic ``live`` of the metrics socket: engines, groups as they race, and the wait of now, twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import msgspec

from streamrl.base.messages import EngineLoad
from streamrl.buffers.rollout_buffer import Group
from streamrl.contracts import Observer
from streamrl.control.events import ControlEvent
from streamrl.control.model import RunState
from streamrl.run.wait_reason import RunWaits

Publish = Callable[[str, dict[str, Any]], None]

INTERVAL_S = 0.5
LARGEST_SHARE = 0.01
"""Of the event loop's time: figures of a run with very many requests come less often."""
MOST_GROUPS = 64
MOST_MEMBERS = 64


class EngineRow(msgspec.Struct, frozen=True):
    """One engine now. ``slots``: requests that it runs at once (0: unknown); ``serves``: it is sent requests."""

    name: str
    serves: bool
    slots: int
    running: int
    waiting: int
    kv: float
    tokens_s: float


class GroupRow(msgspec.Struct):
    """One group. ``tokens`` and ``marks``: one a member that is left, by sample number; a mark is ``s`` sampling, ``w``
    waiting for an engine, ``r`` for its reward or environment, ``p`` paused, ``d`` done, ``c`` done and cut short.
    ``state``: racing, paused, ready, batch, deferred (sampled again later), dropped. ``size``: launched members."""

    id: int
    state: str
    size: int
    keep: int
    tokens: list[int]
    marks: str


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of the topic. ``pending``: orders that are not answered (step, push, evaluation, checkpoint);
    ``filled``, ``target``: weight of the open batch; ``deferred``: prompts that wait to be sampled again; ``scoring``:
    trajectories without a reward; ``environment``: those between two turns; ``stopping``: the reason of a drain."""

    step: int
    steps: int
    live_version: int
    waits_for: str
    waits_s: float
    pending: list[str]
    stopping: str
    paused: bool = False
    filled: int
    target: int
    round_kind: str
    group_size: int
    budget: int
    scoring: int
    environment: int = 0
    deferred: int
    engines: list[EngineRow]
    groups_in_all: int
    groups: list[GroupRow]


class LiveFigures(Observer):
    """Gives ``publish`` the fields of ``live``. ``budget``: tokens of the longest completion; ``engines``: the
    pool of engines.

    Engines do not report the tokens of a request that is under way: each gets the tokens of its engine since the last
    look over the requests that ran, which is how an engine samples; they are exact from the end of the request on."""

    def __init__(
        self, publish: Publish, state: Callable[[], RunState], waits: RunWaits, engines: Any, *, budget: int
    ) -> None:
        self._publish = publish
        self._state = state
        self._waits = waits
        self._engines = engines
        self._budget = budget
        self._scope = anyio.CancelScope()
        self._loads: dict[str, EngineLoad] = {}
        self._parts: dict[str, float] = {}
        self._sampled: dict[str, float] = {}
        self._racing: dict[int, tuple[str, GroupRow]] = {}
        self._gone: dict[int, GroupRow] = {}
        self._version = -1
        self._looked_s = time.monotonic()

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Publish until ``end``."""
        with self._scope:
            while True:
                began = time.monotonic()
                self._publish("live", msgspec.structs.asdict(self.figures(began)))
                await anyio.sleep(pause_after(time.monotonic() - began))

    def end(self) -> None:
        self._scope.cancel()

    def figures(self, now_s: float) -> Live:
        """The figures at ``now_s`` of a monotonic clock; rates are since the last call."""
        state = self._state()
        reason, waited_s = self._waits.waits_for()
        shell = self._waits.shell()
        engines, running = self._engine_rows(max(now_s - self._looked_s, 1e-3))
        groups = self._group_rows(state, running)
        self._looked_s = now_s
        batch = state.batch
        pending = state.pending
        orders = [n for n in ("step", "push", "evaluation", "checkpoint") if getattr(pending, n) is not None]
        return Live(
            step=min(state.trainer_version + 1, state.steps), steps=state.steps, live_version=state.live_version,
            waits_for=str(reason), waits_s=round(waited_s, 2), pending=orders, stopping=state.stop_reason or "",
            paused=state.steering.paused, filled=batch.filled, target=batch.target, round_kind=state.round_kind,
            group_size=batch.group_size, budget=self._budget, scoring=shell.scoring, environment=shell.environment,
            deferred=len(state.prompts.queue), engines=engines, groups_in_all=len(groups), groups=groups[:MOST_GROUPS],
        )  # fmt: skip

    def _engine_rows(self, seconds: float) -> tuple[list[EngineRow], dict[str, tuple[float, bool]]]:
        """One row an engine; and by trajectory, of those that engines have, the tokens so far and whether it has a
        slot."""
        rows = []
        running = {}
        parts = {}
        loads = {}
        served = self._engines.served()
        serving = set(self._engines.serving)
        for name, engine in self._engines.attached.items():
            load = loads[name] = engine.load()
            ready = getattr(engine, "readiness", None)  # of an engine in a process of its own
            open_parts = served.get(name, ())
            before = self._loads.get(name, load)
            runs = min(len(open_parts), load.running)
            sampled = max(load.generated_tokens - before.generated_tokens, 0)
            steps = load.decode_steps - before.decode_steps
            shares = (load.decode_tokens - before.decode_tokens) / steps if steps > 0 else runs  # requests in a step
            for place, part in enumerate(open_parts):  # the oldest first
                more = sampled / max(shares, 1) if place < runs else 0
                tokens = min(self._parts.get(part.request_id, part.sampled) + more, self._budget)
                parts[part.request_id] = tokens
                running[part.request_id.rpartition("/")[0]] = tokens, place < runs
            slots = ready.max_num_seqs if ready else 0
            rate = round(sampled / seconds, 1)
            kv = round(load.kv_cache_usage, 4)
            rows.append(EngineRow(name, name in serving, slots, load.running, load.waiting, kv, rate))
        self._loads = loads
        self._parts = parts
        return rows, running

    def _group_rows(self, state: RunState, running: Mapping[str, tuple[float, bool]]) -> list[GroupRow]:
        """Rows of the groups that have not ended, and of those that were dropped since the last step: racing ones
        first, then by number."""
        if state.trainer_version != self._version:
            self._version = state.trainer_version
            self._gone = {}
            self._racing = {}  # what is not there any more may have been trained
        sampled: dict[str, float] = {}
        buffer = state.buffer
        racing = {
            number: (group.prompt.prompt_id, self._row(group, running, sampled))
            for number, group in buffer.untrained.items()
        }
        batched = [self._row(group, running, sampled, "batch") for group in buffer.batched.values()]
        if gone := self._racing.keys() - racing.keys() - buffer.batched.keys():
            queued = {ref.prompt_id for ref in (*state.prompts.queue, *state.prompts.waiting)}
            for number in gone:
                prompt, row = self._racing[number]
                row.state = "deferred" if prompt in queued else "dropped"
                self._gone[number] = row
        self._racing = racing
        self._sampled = sampled
        rows = [*(row for _, row in racing.values()), *batched, *self._gone.values()]
        return sorted(rows, key=lambda row: (row.state != "racing", row.id))

    def _row(
        self, group: Group, running: Mapping[str, tuple[float, bool]], sampled: dict[str, float], state: str = ""
    ) -> GroupRow:
        tokens = []
        marks = []
        for trajectory, member in zip(group.ids, group.members.values(), strict=True):
            if member.scored:
                tokens.append(member.tokens)
                marks.append("c" if member.finish_reason == "length" else "d")
                continue
            whole = str(trajectory)
            there, runs = running.get(whole, (0.0, False))
            sampled[whole] = so_far = max(self._sampled.get(whole, 0.0), there)
            tokens.append(int(so_far))
            marks.append("p" if group.paused else "s" if runs else "w" if whole in running or not so_far else "r")
        return GroupRow(
            id=group.group_id,
            state=state or ("paused" if group.paused else "ready" if group.ready else "racing"),
            size=group.size,
            keep=group.keep,
            tokens=tokens[:MOST_MEMBERS],
            marks="".join(marks[:MOST_MEMBERS]),
        )


def pause_after(seconds: float) -> float:
    """Seconds until the next figures, where those before took so many."""
    return max(INTERVAL_S, seconds / LARGEST_SHARE)
