"""Carries out which prepared set of engines serves a round, as ``engine_sets`` decides: the acting part.

The decision falls when the first group of a round is launched: only then is its kind known, and nothing else is under
way but an evaluation. Engines that leave get no more requests; what they serve is cut and goes on, from its tokens,
where the set that joins serves. Requests wait until it does. Who leaves is left out of pushes and rests (its process
ends, or it sleeps) *before* who joins is started: both at once may not fit the machine. Who joins is brought to the
live version before it serves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import anyio
import msgspec

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.elastic.engine_release import DRAIN_SECONDS, EngineHosts, EnginePushes
from streamrl.elastic.engine_sets import (
    EngineSet,
    FadingLine,
    RoundMeasured,
    SetHistory,
    SetPlan,
    SetSettings,
    faster_steps,
    plan_engine_set,
    with_round,
)
from streamrl.engines.step_cost import StepCost
from streamrl.plan.topology import prepared_sets
from streamrl.recipe.sections import Recipe
from streamrl.sync.publisher import PushedEngine

SWITCH = "engine set"
"""Who drains, as the pool knows it: an engine whose set does not serve is readmitted from here only."""

SAMPLE_S = 0.2
"""Engines report so often; asking more often teaches nothing."""

_KEPT = 0.998
_RIDGE = 1e-6
_UNKNOWN_STEP = StepCost(base_s=1e-3, per_running_s=0.0)


class SwitchedPool(Protocol):
    """The part of ``streamrl.engines.engine_pool.EnginePool`` that a switch needs."""

    def withdraw(self, names: Sequence[str], *, by: str) -> None: ...

    async def drain(self, name: str, *, by: str) -> None: ...

    def readmit(self, name: str, *, by: str) -> None: ...

    def load(self) -> EngineLoad: ...


class PreparedHosts(EngineHosts, Protocol):
    """``EngineHosts`` that know how many tokens the KV cache of an engine holds that they started (0: unknown)."""

    def kv_tokens(self, name: str) -> int: ...


class PreparedEngines(msgspec.Struct, frozen=True, kw_only=True):
    """A set and the names of its engines."""

    engine_set: EngineSet
    engines: tuple[str, ...]


def prepared_engines(recipe: Recipe, kv_tokens: Mapping[str, int]) -> tuple[PreparedEngines, ...]:
    """The sets of ``recipe``, the one that begins first; ``kv_tokens``: of one engine, by set."""
    return tuple(
        PreparedEngines(
            engine_set=EngineSet(
                name=one.name,
                engines=one.count,
                tensor_parallel_size=one.tensor_parallel_size,
                kv_tokens=kv_tokens[one.name],
                max_num_seqs=one.max_num_seqs,
                round_kinds=one.rounds,
            ),
            engines=one.engines,
        )
        for one in prepared_sets(recipe)
    )


def engine_switch(
    recipe: Recipe,
    pool: SwitchedPool,
    kv_tokens: Mapping[str, int],
    publisher: EnginePushes,
    hosts: PreparedHosts,
    start_s: float,
) -> EngineSwitch | None:
    """What changes between the sets of ``recipe``; None where there is only one."""
    if not recipe.engines.sets:
        return None
    return EngineSwitch(
        pool,
        prepared_engines(recipe, kv_tokens),
        publisher=publisher,
        hosts=hosts,
        steps=recipe.run.steps,
        start_s=start_s,
        start_timeout_s=recipe.engines.start_timeout_s,
    )


class EngineSwitch:
    """Told of what is ``launched`` and ``ended`` and of each ``round_closed``; ``carry_out`` what ``launched`` answers.

    ``sets``: the one that serves first comes first. ``start_s``: how long engines took to start, which is what the
    first switch is taken to cost.
    """

    def __init__(
        self,
        pool: SwitchedPool,
        sets: Sequence[PreparedEngines],
        *,
        publisher: EnginePushes,
        hosts: PreparedHosts,
        steps: int,
        start_s: float,
        start_timeout_s: float = 300.0,
        settings: SetSettings = SetSettings(),  # noqa: B008 - frozen
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._pool = pool
        self._sets = {one.engine_set.name: one for one in sets}
        self._publisher = publisher
        self._hosts = hosts
        self._steps = steps
        self._start_timeout_s = start_timeout_s
        self._settings = settings
        self._clock = clock
        self.current = sets[0].engine_set.name
        self.switches = 0
        self._switch_s, self._switched_s = start_s, 0.0
        self._history = SetHistory()
        self._step_line = FadingLine()
        self._given_up = False
        self._starting = anyio.CancelScope()
        self._load = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self._loaded_at = -math.inf
        self._open: set[TrajectoryId] = set()
        self._round_kind = ""
        self._began = 0.0
        self._preemptions_began = self._requests = self._prompt_tokens = 0
        self._tokens, self._longest, self._kv_usage = 0, 0, 0.0

    @property
    def serving(self) -> int:
        """How many engines the set in use has."""
        return self._sets[self.current].engine_set.engines

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the step that ends now; then the seconds count anew."""
        seconds, self._switched_s = self._switched_s, 0.0
        return {
            "engines/set": float(list(self._sets).index(self.current)),
            "engines/serving": float(self.serving),
            "engines/switches_total": float(self.switches),
            "time/engine_switch_s": seconds,
        }

    # ---- a round -----------------------------------------------------------------------------------

    def launched(
        self, round_kind: str, ids: Sequence[TrajectoryId], prompt_tokens: int, policy_version: int
    ) -> SetPlan | None:
        """A group is about to be ordered. Where it is the first of a round, and another set shall serve that: the plan,
        to be carried out; the engines in use get no request from now on."""
        plan = None
        if not self._round_kind:
            self._begin(round_kind)
            plan = self._plan(round_kind, self._steps - policy_version)
        self._requests += len(ids)
        self._prompt_tokens += prompt_tokens * len(ids)
        self._open.update(ids)
        return plan

    def ended(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """A trajectory came back: with a completion of so many tokens, or without one."""
        if trajectory not in self._open:
            return
        self._open.remove(trajectory)
        self._tokens += tokens or 0
        self._longest = max(self._longest, tokens or 0)
        self._look()

    def round_closed(self) -> None:
        """The batch of the round is complete."""
        if not self._round_kind:
            return
        self._look(now=True)
        measured = RoundMeasured(
            round_kind=self._round_kind,
            engine_set=self.current,
            seconds=max(self._clock() - self._began, 0.0),
            preemptions=self._load.preemptions - self._preemptions_began,
            kv_usage=self._kv_usage,
            requests=self._requests,
            tokens=float(self._tokens),
            longest=float(self._longest),
            prompt=self._prompt_tokens / max(self._requests, 1),
        )
        self._history = with_round(self._history, measured, self._shapes, self._cost(), self._settings)
        self._round_kind = ""
        self._open.clear()

    def _begin(self, round_kind: str) -> None:
        self._look(now=True)
        self._round_kind, self._began = round_kind, self._clock()
        self._preemptions_began = self._load.preemptions
        self._requests = self._prompt_tokens = self._tokens = self._longest = 0
        self._kv_usage = 0.0

    def _plan(self, round_kind: str, rounds_left: int) -> SetPlan | None:
        if self._given_up:
            return None
        plan = plan_engine_set(
            self._shapes,
            self._history,
            current=self.current,
            round_kind=round_kind,
            cost=self._cost(),
            switch_s=self._switch_s,
            rounds_left=rounds_left,
            settings=self._settings,
        )
        if plan.engine_set == self.current:
            return None
        self._pool.withdraw(self._sets[self.current].engines, by=SWITCH)
        return plan

    @property
    def _shapes(self) -> list[EngineSet]:
        return [one.engine_set for one in self._sets.values()]

    def _look(self, *, now: bool = False) -> None:
        """What the engines say that they did since the last look."""
        if not now and self._clock() - self._loaded_at < SAMPLE_S:
            return
        self._loaded_at, before = self._clock(), self._load
        load = self._load = self._pool.load()
        self._kv_usage = max(self._kv_usage, load.kv_cache_usage)
        steps = load.decode_steps - before.decode_steps
        if steps > 0:
            workers = self._sets[self.current].engine_set.tensor_parallel_size
            faster = faster_steps(workers, self._settings.scaling)
            running = (load.decode_tokens - before.decode_tokens) / steps
            self._step_line.add(running, faster * (load.decode_s - before.decode_s) / steps, _KEPT)

    def _cost(self) -> StepCost:
        if not self._step_line.count:
            return _UNKNOWN_STEP
        base_s, per_running_s = self._step_line.fit(_RIDGE)
        return StepCost(base_s=max(base_s, 1e-6), per_running_s=per_running_s)

    # ---- a switch ----------------------------------------------------------------------------------

    async def carry_out(self, plan: SetPlan, policy_version: int) -> None:
        """Have the planned set serve, at the live ``policy_version``; returns when it does, or the run ends.

        Raises ``EngineError`` when an engine does not stop, is not ready in time, or refuses the weights.
        """
        began = self._clock()
        leaving, joining = self._sets[self.current].engines, self._sets[plan.engine_set].engines
        # Who was told to rest is seen to rest, also when the run ends meanwhile.
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for name in leaving:
                    group.start_soon(self._rest, name)
        started = await self._start(joining)
        if len(started) < len(joining):
            return
        async with anyio.create_task_group() as group:
            for engine in started.values():
                group.start_soon(self._publisher.admit, engine, policy_version)
        self.current = plan.engine_set
        self._learn_room(joining[0])
        self.switches += 1
        self._began = self._clock()
        self._switch_s = self._switched_s = self._began - began
        self._look(now=True)
        self._preemptions_began = self._load.preemptions
        for name in joining:
            self._pool.readmit(name, by=SWITCH)

    def _learn_room(self, name: str) -> None:
        """What the set in use holds: until it was started that was an estimate."""
        kv_tokens, one = self._hosts.kv_tokens(name), self._sets[self.current]
        if kv_tokens:
            known = msgspec.structs.replace(one.engine_set, kv_tokens=kv_tokens)
            self._sets[self.current] = msgspec.structs.replace(one, engine_set=known)

    def give_up(self) -> None:
        """The run ends: no set is changed any more, and nothing is waited for."""
        self._given_up = True
        self._starting.cancel()

    async def _rest(self, name: str) -> None:
        try:
            with anyio.fail_after(DRAIN_SECONDS):
                await self._pool.drain(name, by=SWITCH)
        except TimeoutError as error:
            raise EngineError(f"{name}: requests were not dropped within {DRAIN_SECONDS:g} s of an abort") from error
        await self._publisher.leave(self._hosts.detach(name))
        await self._hosts.stop(name)

    async def _start(self, names: Sequence[str]) -> dict[str, PushedEngine]:
        """Those that are ready; fewer than ``names`` when the run ends meanwhile."""
        started: dict[str, PushedEngine] = {}
        if self._given_up:
            return started

        async def start(name: str) -> None:
            started[name] = await self._hosts.start(name)

        try:
            with anyio.fail_after(self._start_timeout_s), anyio.CancelScope() as self._starting:
                async with anyio.create_task_group() as group:
                    for name in names:
                        group.start_soon(start, name)
        except TimeoutError as error:
            late = ", ".join(name for name in names if name not in started)
            raise EngineError(
                f"{late}: not ready within {self._start_timeout_s:g} s of being started "
                f"(engines.advanced.start_timeout_s)"
            ) from error
        for name in names:
            if name not in started:
                await self._hosts.give_up(name)
        return started
