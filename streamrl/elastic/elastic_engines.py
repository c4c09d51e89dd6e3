"""Engines that are freed late in a round, or exchanged for a set of another shape, as the controller sees them: what
``freeing`` and ``sets`` decide is done here. Without either, all of this does nothing.

A freed engine is drained: the others sample on what it serves, from its tokens. It is idle, still gets every weight
push, and serves again in the next round.

A set is chosen when the first group of a round is launched: only then is its kind known, and nothing else is under way
but an evaluation. Engines that leave get no more requests; what they serve is cut and sampled on where the set that
joins serves. Requests wait until it does. Engines that leave stop (their processes end, or they sleep) *before* the
others are started: both at once may not fit the machine. Those are brought to the live version before they serve.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio
import msgspec
from anyio.abc import TaskGroup

from streamrl.base.errors import EngineError, StreamRLError
from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision
from streamrl.elastic.freeing import Freeing, OpenRequest, ReleasePlan, ServingEngine
from streamrl.elastic.hosts import EngineHosts
from streamrl.elastic.sets import EngineSet, SetChooser, SetPlan
from streamrl.engines.engine import Engine
from streamrl.engines.pool import EnginePool
from streamrl.engines.routing import ServedRequest
from streamrl.plan.topology import prepared_sets
from streamrl.recipe.sections import Recipe
from streamrl.sync.weight_sync import WeightSync

FREED = "freed"
OTHER_SET = "engine set"
"""Reasons to drain, as the pool knows them: an engine that was drained for another one is not readmitted from here."""

DRAIN_SECONDS = 60.0
"""An engine that has not dropped its requests by then does not work any more."""
ALONE_LOOK_S = 1.0
"""Between looks at whether the engines that were not freed still live."""
SAMPLE_S = 0.2
"""Engines report so often; asking more often teaches nothing."""


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine, in tokens: its KV cache, in blocks of ``block_tokens``, and the longest completion (``cap``)."""

    kv_tokens: int
    max_num_seqs: int
    cap: int
    block_tokens: int = 16


def engine_sizes(recipe: Recipe, kv_tokens: int, block_tokens: int) -> EngineSizes:
    """Of one engine of ``recipe``, whose cache holds ``kv_tokens``. Raises ``StreamRLError`` when that is not known."""
    if not kv_tokens:
        raise StreamRLError(
            f'engines.release = "{recipe.engines.release}" must know how many tokens a KV cache holds, and these '
            'engines do not say it: set release = "never"'
        )
    return EngineSizes(
        kv_tokens=kv_tokens,
        max_num_seqs=recipe.engines.max_num_seqs,
        cap=recipe.sampling.max_tokens,
        block_tokens=block_tokens,
    )


def set_chooser(recipe: Recipe, kv_tokens: Mapping[str, int], switch_s: float) -> SetChooser | None:
    """Return what chooses between the sets of ``recipe``, the one that begins first; None where there is only one.
    ``kv_tokens``: of one engine, by set; ``switch_s``: what a switch is taken to cost until one was made."""
    if not recipe.engines.sets:
        return None
    sets = [
        EngineSet(
            name=one.name,
            engines=one.count,
            tensor_parallel_size=one.tensor_parallel_size,
            kv_tokens=kv_tokens[one.name],
            max_num_seqs=one.max_num_seqs,
            round_kinds=one.rounds,
            hosts=one.engines,
        )
        for one in prepared_sets(recipe)
    ]
    return SetChooser(sets, steps=recipe.run.steps, switch_s=switch_s)


class ElasticEngines:
    """``run`` beside the rounds; notified of what is ``launched``, ``ended`` and of each ``batch_closed``;
    ``begin_round`` before the next one.

    ``decided`` is given each decision, the step that it concerns, and whether people shall see it; ``serve`` how many
    engines serve, when that changes; ``share_cores`` how many are idle. ``freeing`` needs ``sizes``; ``chooser`` needs
    ``hosts``. ``start_timeout_s``: for an engine to be ready.
    ``recovered``: figures of engines that were lost, for the record of a step.
    """

    def __init__(
        self,
        pool: EnginePool,
        sync: WeightSync,
        *,
        decided: Callable[[Decision, int, bool], Awaitable[None]],
        serve: Callable[[int], None],
        freeing: Freeing | None = None,
        sizes: EngineSizes | None = None,
        share_cores: Callable[[int], Awaitable[None]] | None = None,
        chooser: SetChooser | None = None,
        hosts: EngineHosts | None = None,
        start_timeout_s: float = 300.0,
        recovered: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._pool = pool
        self._sync = sync
        self._decided = decided
        self._serve = serve
        self._freeing = freeing
        self._sizes = sizes
        self._share_cores = share_cores
        self._chooser = chooser
        self._hosts = hosts
        self._start_timeout_s = start_timeout_s
        self._recovered = recovered
        self._clock = clock
        self._step = 0
        self._given_up = False
        self._looking, self._starting = anyio.CancelScope(), anyio.CancelScope()
        self._changed = anyio.Event()
        self._one_at_a_time = anyio.Lock()
        self._paces: dict[str, float] = {}
        self._shown = 0
        self._looked_at = -math.inf
        self._switches, self._switched_s = 0, 0.0
        self.freed: tuple[str, ...] = ()
        """Engines that are idle until the next round."""

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the step that ends now; then the seconds count anew."""
        if self._chooser is None:
            return self._recovered()
        seconds, self._switched_s = self._switched_s, 0.0
        return self._recovered() | {
            "engines/set": float(list(self._chooser.sets).index(self._chooser.current)),
            "engines/serving": float(self._chooser.sets[self._chooser.current].engines),
            "engines/switches_total": float(self._switches),
            "time/engine_switch_s": seconds,
        }

    # ---- what the controller does ------------------------------------------------------------------

    async def launched(
        self, round_kind: str, ids: Sequence[TrajectoryId], prompt_tokens: int, policy_version: int, beside: TaskGroup
    ) -> None:
        """Note a group of a round of ``round_kind`` that is about to be sampled by ``policy_version``."""
        self._step = policy_version + 1
        if self._freeing is not None:
            self._freeing.launched(round_kind, ids)
        if self._chooser is None:
            return
        load = self._pool.load()
        plan = self._chooser.launched(round_kind, ids, prompt_tokens, policy_version, self._clock(), load)
        if plan is not None and plan.because is not None and not self._given_up:
            self._pool.withdraw(self._chooser.sets[self._chooser.current].hosts, OTHER_SET)
            await self._decided(plan.because, self._step, True)
            beside.start_soon(self.switch, plan)

    def ended(self, outcome: EndedOutcome) -> None:
        """Note a trajectory that came back."""
        identity, tokens = _end_of(outcome)
        if self._freeing is not None:
            self._freeing.ended(identity, tokens)
            self._changed.set()
        if self._chooser is not None:
            self._chooser.ended(identity, tokens)
            if self._clock() - self._looked_at >= SAMPLE_S:
                self._looked_at = self._clock()
                self._chooser.looked(self._pool.load())

    def batch_closed(self) -> None:
        """The batch of the round is complete."""
        if self._chooser is not None:
            self._chooser.round_closed(self._clock(), self._pool.load())

    async def begin_round(self, *, last: bool) -> None:
        """Have all engines of the set serve again; the next round may be launched when this returns. After the ``last``
        one nothing is freed or switched any more."""
        if last:
            self.give_up()
        if self._freeing is not None:
            async with self._one_at_a_time:
                self._freeing.begin_round()
                await self._serve_again()

    def give_up(self) -> None:
        """The run ends: engines are neither freed nor switched, and none is waited for."""
        self._given_up = True
        self._starting.cancel()

    def end(self) -> None:
        """The run is over: ``run`` returns."""
        self._looking.cancel()

    # ---- freeing -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Free engines whenever they can be spared, until ``end``."""
        if self._freeing is None:
            return
        with self._looking:
            while True:
                with anyio.move_on_after(ALONE_LOOK_S if self.freed else None):
                    await self._changed.wait()
                self._changed = anyio.Event()
                async with self._one_at_a_time:
                    await self._look(self._freeing)

    async def _look(self, freeing: Freeing) -> None:
        if self.freed and not self._pool.serving:  # those that served were lost
            await self._serve_again()
        if self._given_up or self.freed or not freeing.is_due:
            return
        engines = self._engines()
        if engines is None:
            return
        plan = freeing.plan(engines)
        self.freed = plan.free
        serving = len(self._pool.names) - len(self.freed)
        # It will be much the same in every round: people need not see each.
        await self._decided(plan.because, self._step, bool(plan.free) and serving != self._shown)
        if plan.free:
            self._shown = serving
            self._serve(serving)
            await self._free(plan)

    async def _free(self, plan: ReleasePlan) -> None:
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in plan.moves:
            by_target[move.to].append(move.request_id)
        with _dropped_in_time(plan.free):
            # An engine that was lost since the plan takes no requests, and the last one that serves stays.
            for target, request_ids in by_target.items():
                if target in self._pool.serving:
                    await self._pool.migrate(request_ids, target)
            for name in plan.free:
                if set(self._pool.serving) - {name}:
                    await self._pool.drain(name, FREED)
        await self._idle(len(plan.free))

    async def _serve_again(self) -> None:
        """Idle engines hold the live version: also in the midst of a round."""
        if self.freed:
            back, self.freed = self.freed, ()
            await self._idle(0)
            for name in back:
                self._pool.readmit(name, FREED)
        self._serve(len(self._pool.names))

    async def _idle(self, count: int) -> None:
        if self._share_cores is not None:
            await self._share_cores(count)

    def _engines(self) -> list[ServingEngine] | None:
        """What each engine serves; None where it is not known how far its requests are."""
        serving = self._pool.serving
        served = {name: requests for name, requests in self._pool.served().items() if name in serving}
        # A report has the pace of the moments before it: of none, when a round has just started.
        self._paces |= {name: load.token_s for name, load in self._pool.loads().items() if load.token_s}
        if any(requests and name not in self._paces for name, requests in served.items()):
            return None
        assert self._sizes is not None
        return [_serving(name, requests, self._sizes, self._paces.get(name, 0.0)) for name, requests in served.items()]

    # ---- sets --------------------------------------------------------------------------------------

    async def switch(self, plan: SetPlan) -> None:
        """Have the planned set serve; returns when it does, or the run ends.

        Raises ``EngineError`` when an engine does not stop, is not ready in time, or refuses the weights.
        """
        assert self._chooser is not None
        assert self._hosts is not None
        chooser, hosts, began = self._chooser, self._hosts, self._clock()
        leaving, joining = chooser.sets[chooser.current].hosts, chooser.sets[plan.engine_set].hosts
        # An engine that was ordered to stop is waited for, also when the run ends meanwhile.
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for name in leaving:
                    group.start_soon(self._stop, hosts, name)
        started = await self._start(hosts, joining)
        if len(started) < len(joining):
            return
        async with anyio.create_task_group() as group:
            for name, engine in started.items():
                group.start_soon(self._sync.admit, name, engine)
        now = self._clock()
        self._switches += 1
        self._switched_s = now - began
        chooser.switched(plan.engine_set, now, now - began, self._pool.load(), hosts.kv_tokens(joining[0]))
        for name in joining:
            self._pool.readmit(name, OTHER_SET)
        self._serve(len(joining))

    async def _stop(self, hosts: EngineHosts, name: str) -> None:
        with _dropped_in_time([name]):
            await self._pool.drain(name, OTHER_SET)
        self._sync.remove(hosts.detach(name))
        await hosts.stop(name)

    async def _start(self, hosts: EngineHosts, names: Sequence[str]) -> dict[str, Engine]:
        """Those that are ready; fewer than ``names`` when the run ends meanwhile."""
        started: dict[str, Engine] = {}
        if self._given_up:
            return started

        async def start(name: str) -> None:
            started[name] = await hosts.start(name)

        try:
            with anyio.fail_after(self._start_timeout_s), anyio.CancelScope() as self._starting:
                async with anyio.create_task_group() as group:
                    for name in names:
                        group.start_soon(start, name)
        except TimeoutError as error:
            late = ", ".join(name for name in names if name not in started)
            raise EngineError(
                f"{late}: not ready within {self._start_timeout_s:g} s of being started "
                "(engines.advanced.start_timeout_s)"
            ) from error
        for name in names:
            if name not in started:
                await hosts.give_up(name)
        return started


def _serving(name: str, requests: Sequence[ServedRequest[str]], sizes: EngineSizes, token_s: float) -> ServingEngine:
    """Engines return tokens when a completion ends: how many it has by now follows from their pace, ``token_s``."""
    now = anyio.current_time()

    def sampled(request: ServedRequest[str]) -> int:
        by_now = request.sampled + int((now - request.since) / token_s) if token_s else request.sampled
        return min(by_now, sizes.cap)

    return ServingEngine(
        name=name,
        kv_tokens=sizes.kv_tokens,
        max_num_seqs=sizes.max_num_seqs,
        block_tokens=sizes.block_tokens,
        requests=tuple(OpenRequest(request_id=r.request_id, prompt=r.prompt, sampled=sampled(r)) for r in requests),
    )


@contextmanager
def _dropped_in_time(names: Sequence[str]) -> Iterator[None]:
    try:
        with anyio.fail_after(DRAIN_SECONDS):
            yield
    except TimeoutError as error:
        raise EngineError(
            f"{', '.join(names)}: requests were not dropped within {DRAIN_SECONDS:g} s of an abort"
        ) from error


def _end_of(item: EndedOutcome) -> tuple[TrajectoryId, int | None]:
    """Which trajectory it is, and the length of its completion, if it has one."""
    if isinstance(item, TrajectoryLost):
        return item.id, None
    trajectory = item.outcome.trajectory
    return trajectory.id, trajectory.generated_tokens
