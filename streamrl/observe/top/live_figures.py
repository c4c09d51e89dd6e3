"""The topic ``live`` of the metrics socket, twice a second: engines, groups while they are sampled, and the current
wait. ``launch/observers.py`` makes ``LiveFigures``, which runs in the process of the controller; ``streamrl top``
decodes ``Live``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from msgspec import Struct
from msgspec.structs import asdict

from streamrl.base.messages import EngineLoad
from streamrl.buffers.rollout_buffer import Group
from streamrl.contracts import Observer
from streamrl.control.events import ControlEvent
from streamrl.control.run_state import RunState
from streamrl.run.wait_reason import RunWaits

Publish = Callable[[str, dict[str, Any]], None]

INTERVAL_S = 0.5
LARGEST_SHARE = 0.01
"""Share of the time of the event loop that the figures may take. With very many requests they are published less
often."""
MOST_GROUPS = 64
"""Groups in one message."""
MOST_MEMBERS = 64
"""Members of a group in one message."""


class EngineRow(Struct, frozen=True):
    """Figures of an engine. ``serves``: whether requests are sent to it. ``slots``: requests that it runs at once (0:
    not known). ``kv``: used share of the KV cache."""

    name: str
    serves: bool
    slots: int
    running: int
    waiting: int
    kv: float
    tokens_s: float


class GroupRow(Struct):
    """Figures of a group.

    ``state``: racing, paused, ready, batch, deferred (sampled again later), dropped. ``size``: number of launched
    members. ``keep``: number of members that the batch takes. ``tokens``: sampled tokens of each remaining member.
    ``marks``: letter for each remaining member: ``s`` sampling, ``w`` waiting for an engine, ``r`` waiting for its
    reward or environment, ``p`` paused, ``d`` done, ``c`` done and cut short."""

    id: int
    state: str
    size: int
    keep: int
    tokens: list[int]
    marks: str


class Live(Struct, frozen=True, kw_only=True):
    """The fields of the topic.

    ``pending``: orders without an answer so far (step, push, evaluation, checkpoint). ``stopping``: reason of a drain.
    ``filled``, ``target``: weight of the open batch, and weight of a full batch. ``budget``: most tokens of a
    completion. ``scoring``: trajectories without a reward. ``environment``: trajectories in their environments, between
    two turns. ``deferred``: prompts that wait to be sampled again. ``groups_in_all``: number of groups, of which
    ``groups`` has the first ones."""

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
    """An observer that gives ``publish`` the fields of ``live``. ``engines``: pool of engines. ``budget``: most tokens
    of a completion.

    Engines do not report the tokens of a request that is running. They are estimated: the tokens that an engine sampled
    since the last message are shared evenly by its running requests. From the end of the request on they are exact."""

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
        self._part_tokens: dict[str, float] = {}  # by request
        self._sampled: dict[str, float] = {}  # tokens by trajectory
        self._racing: dict[int, tuple[str, GroupRow]] = {}  # id of the prompt and row, by group
        self._gone: dict[int, GroupRow] = {}  # groups that were dropped or deferred since the last step
        self._version = -1
        self._measured_s = time.monotonic()

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Publish until ``end``."""
        with self._scope:
            while True:
                began = time.monotonic()
                self._publish("live", asdict(self.figures(began)))
                await anyio.sleep(pause_after(time.monotonic() - began))

    def end(self) -> None:
        self._scope.cancel()

    def figures(self, now_s: float) -> Live:
        """Return the figures. ``now_s``: monotonic time. Rates are measured since the last call."""
        state = self._state()
        reason, waited_s = self._waits.waits_for()
        shell = self._waits.shell()
        engines, running = self._engine_rows(max(now_s - self._measured_s, 1e-3))
        groups = self._group_rows(state, running)
        self._measured_s = now_s
        batch = state.batch
        pending = state.pending
        names = ("step", "push", "evaluation", "checkpoint")
        orders = [name for name in names if getattr(pending, name) is not None]
        return Live(
            step=min(state.trainer_version + 1, state.steps), steps=state.steps, live_version=state.live_version,
            waits_for=str(reason), waits_s=round(waited_s, 2), pending=orders, stopping=state.stop_reason or "",
            paused=state.steering.paused, filled=batch.filled, target=batch.target, round_kind=state.round_kind,
            group_size=batch.group_size, budget=self._budget, scoring=shell.scoring, environment=shell.environment,
            deferred=len(state.prompts.queue), engines=engines, groups_in_all=len(groups), groups=groups[:MOST_GROUPS],
        )  # fmt: skip

    def _engine_rows(self, seconds: float) -> tuple[list[EngineRow], dict[str, tuple[float, bool]]]:
        """Return a row for each engine; and for each trajectory in an engine, by its id, the tokens so far and whether
        it has a slot."""
        rows = []
        running = {}
        part_tokens = {}
        loads = {}
        requests = self._engines.open_requests()
        serving = set(self._engines.serving)
        for name, engine in self._engines.attached.items():
            load = loads[name] = engine.load()
            ready = getattr(engine, "readiness", None)  # simulated engines have none
            open_parts = requests.get(name, ())
            before = self._loads.get(name, load)
            runs = min(len(open_parts), load.running)
            sampled = max(load.generated_tokens - before.generated_tokens, 0)
            steps = load.decode_steps - before.decode_steps
            requests_in_step = (load.decode_tokens - before.decode_tokens) / steps if steps > 0 else runs
            for place, part in enumerate(open_parts):  # the oldest first
                has_slot = place < runs
                new_tokens = sampled / max(requests_in_step, 1) if has_slot else 0
                tokens = min(self._part_tokens.get(part.request_id, part.sampled) + new_tokens, self._budget)
                part_tokens[part.request_id] = tokens
                trajectory, _, _ = part.request_id.rpartition("/")
                running[trajectory] = tokens, has_slot
            slots = ready.max_num_seqs if ready else 0
            rate = round(sampled / seconds, 1)
            kv = round(load.kv_cache_usage, 4)
            rows.append(EngineRow(name, name in serving, slots, load.running, load.waiting, kv, rate))
        self._loads = loads
        self._part_tokens = part_tokens
        return rows, running

    def _group_rows(self, state: RunState, running: Mapping[str, tuple[float, bool]]) -> list[GroupRow]:
        """Return rows of the groups that have not ended, and of the groups that were dropped since the last step:
        racing groups first, then by number."""
        if state.trainer_version != self._version:
            self._version = state.trainer_version
            self._gone = {}
            self._racing = {}  # a group that is missing now may have been trained
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
            request = str(trajectory)
            running_tokens, has_slot = running.get(request, (0.0, False))
            tokens_so_far = max(self._sampled.get(request, 0.0), running_tokens)
            sampled[request] = tokens_so_far
            tokens.append(int(tokens_so_far))
            if group.paused:
                mark = "p"
            elif has_slot:
                mark = "s"
            elif request in running or not tokens_so_far:
                mark = "w"
            else:
                mark = "r"
            marks.append(mark)
        return GroupRow(
            id=group.group_id,
            state=state or _state_of(group),
            size=group.size,
            keep=group.keep,
            tokens=tokens[:MOST_MEMBERS],
            marks="".join(marks[:MOST_MEMBERS]),
        )


def _state_of(group: Group) -> str:
    if group.paused:
        return "paused"
    return "ready" if group.ready else "racing"


def pause_after(seconds: float) -> float:
    """Return the seconds until the next message. ``seconds``: time that the last message took."""
    return max(INTERVAL_S, seconds / LARGEST_SHARE)
