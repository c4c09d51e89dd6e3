"""Engines that are freed late in a round, or exchanged for a set of another shape, as the controller sees them: this
module carries out the decisions of ``freeing`` and ``sets``. Without either, only restarts are reported.

At the boundary of two rounds: freed engines of the set in use serve again; then the set of the next round is chosen;
then the round's requests are submitted, to engines of that set alone.

A freed engine is drained: the others sample on what it serves, from its tokens. It is idle, still gets every weight
push, and serves again in the next round; the trainer has its cores until the next version is live.

A set is chosen when the first group of a round is launched: only then is its kind known. Engines that leave get no more
requests; their requests are cut and continue on the set that joins. Requests wait until it does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import msgspec

from streamrl.base.errors import EngineError, StreamRLError
from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import TrajectoryId
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import Observer, PushReport
from streamrl.control.actions import ControlAction, Decision, LaunchGroup, StepOptimizer
from streamrl.control.events import ControlEvent, StopRequested
from streamrl.engines.elastic.freeing import Freeing, OpenRequest, ReleasePlan, ServingEngine
from streamrl.engines.elastic.hosts import DRAIN_SECONDS, EngineHosts
from streamrl.engines.elastic.sets import SetChooser, SetPlan
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.routing import ServedRequest
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.recipe.topology import PreparedSet, prepared_sets

FREED = "freed"
"""The reason to drain, as the pool knows it: an engine that was drained for another one is not readmitted from here."""

ALONE_LOOK_S = 1.0
"""Between looks at whether the engines that were not freed still live."""
SAMPLE_S = 0.2
"""Engines report so often; asking more often teaches nothing."""


def set_chooser(recipe: Recipe, kv_tokens: Mapping[str, int], switch_s: float) -> SetChooser:
    """Return what chooses between the sets of ``recipe``, the one that begins first. ``kv_tokens``: of one engine, by
    set; ``switch_s``: what a switch is taken to cost until one was made. Raises ``StreamRLError`` where engines are to
    be freed and the room of the first set is not known."""
    sets = [msgspec.structs.replace(one, kv_tokens=kv_tokens[one.name]) for one in prepared_sets(recipe)]
    release = recipe.engines.release
    if release is not ReleaseKind.NEVER and not sets[0].kv_tokens:
        raise StreamRLError(
            f'engines.release = "{release}" must know how many tokens a KV cache holds, and these engines do not say '
            'it: set release = "never"'
        )
    return SetChooser(sets, steps=recipe.run.steps, switch_s=switch_s)


class ElasticEngines(Observer):
    """Frees and switches engines by what it observes of the rounds; ``run`` is needed for both.

    ``store``: has the prompts of what is launched. ``decided`` is given each decision, the step that it concerns, and
    whether people shall see it; ``share_cores`` how many engines are idle. ``freeing`` None: none is freed.
    ``block_tokens``: of the engines' KV caches."""

    def __init__(
        self,
        pool: EnginePool,
        hosts: EngineHosts,
        chooser: SetChooser,
        store: TrajectoryStore,
        *,
        decided: Callable[[Decision, int, bool], Awaitable[None]],
        freeing: Freeing | None = None,
        block_tokens: int = 16,
        share_cores: Callable[[int], Awaitable[None]] | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._pool = pool
        self._hosts = hosts
        self._chooser = chooser
        self._store = store
        self._decided = decided
        self._freeing = freeing
        self._block_tokens = block_tokens
        self._share_cores = share_cores
        self._clock = clock
        self._step = 0
        self._given_up = False
        self._planned: SetPlan | None = None  # until its set serves
        self._running = anyio.CancelScope()
        self._switching = anyio.CancelScope()
        self._changed = anyio.Event()
        self._switch_planned = anyio.Event()
        self._one_at_a_time = anyio.Lock()
        self._loads: dict[str, EngineLoad] = {}
        self._paces: dict[str, float] = {}
        self._idle = 0
        self._shown = 0
        self._looked_at = -math.inf
        self._switches = 0
        self._switched_s = 0.0
        self._served_by = self._set
        self.freed: tuple[str, ...] = ()
        """Engines that are idle until the next round."""

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the step that ends now; then the seconds count anew."""
        if len(self._chooser.sets) == 1:
            return self._hosts.figures
        seconds = self._switched_s
        self._switched_s = 0.0
        return self._hosts.figures | {
            "engines/set": float(list(self._chooser.sets).index(self._served_by.name)),
            "engines/serving": float(self._served_by.count),
            "engines/switches_total": float(self._switches),
            "time/engine_switch_s": seconds,
        }

    @property
    def _set(self) -> PreparedSet:
        return self._chooser.sets[self._chooser.current]

    # ---- what the controller does ------------------------------------------------------------------

    async def on_event(self, event: ControlEvent) -> None:
        """Free and switch nothing any more, and wait for no engine, once the run is to end."""
        if isinstance(event, StopRequested):
            self._given_up = True
            self._switching.cancel()

    async def on_action(self, action: ControlAction) -> None:
        """Choose the set of a round that begins; free no engine between a complete batch and the next round."""
        if isinstance(action, LaunchGroup):
            await self._launched(action)
        elif isinstance(action, StepOptimizer):
            self._served_by = self._set
            self._chooser.round_closed(self._clock(), self._pool.load())
            if self._freeing is not None:
                self._freeing.begin_round()

    async def _launched(self, group: LaunchGroup) -> None:
        ids = group.ids
        round_kind = group.round_kind
        policy_version = group.policy_version
        prompt_tokens = len(self._store.prompts[ids[0].prompt_id].token_ids)
        self._step = policy_version + 1
        if self._chooser.is_between_rounds:
            async with self._one_at_a_time:
                self._readmit_freed()
        if self._freeing is not None:
            self._freeing.launched(round_kind, ids)
        load = self._pool.load()
        plan = self._chooser.launched(round_kind, ids, prompt_tokens, policy_version, self._clock(), load)
        if plan is not None and plan.because is not None and not self._given_up and self._planned is None:
            self._planned = plan
            self._pool.withdraw(self._set.engines, UNAVAILABLE)
            await self._decided(plan.because, self._step, True)
            self._switch_planned.set()

    def on_outcome(self, outcome: TrajectoryOutcome) -> None:
        """Note the length of what ended."""
        if isinstance(outcome, TrajectoryPaused):
            return
        identity, tokens = _end_of(outcome)
        if self._freeing is not None:
            self._freeing.ended(identity, tokens)
            self._changed.set()
        self._chooser.ended(identity, tokens)
        if self._clock() - self._looked_at >= SAMPLE_S:
            self._looked_at = self._clock()
            self._chooser.looked(self._pool.load())

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Have all engines of the set serve, which sample what was submitted in advance. After the ``last`` version
        nothing is freed or switched any more; a switch under way goes on, for the last evaluation."""
        self._given_up = self._given_up or last
        self._chooser.went_live(push.policy_version, self._clock(), self._pool.load())
        async with self._one_at_a_time:
            self._readmit_freed()
            await self._set_idle(0)

    def end(self) -> None:
        """End ``run``: no switch is waited for."""
        self._running.cancel()

    # ---- freeing -----------------------------------------------------------------------------------

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Free engines whenever they can be spared, and switch sets as planned, until ``end``."""
        with self._running:
            async with anyio.create_task_group() as tasks:
                if self._freeing is not None:
                    tasks.start_soon(self._free_when_due, self._freeing)
                while True:
                    await self._switch_planned.wait()
                    self._switch_planned = anyio.Event()
                    if self._planned is not None:
                        await self._switch(self._planned)

    async def _free_when_due(self, freeing: Freeing) -> None:
        while True:
            with anyio.move_on_after(ALONE_LOOK_S if self.freed else None):
                await self._changed.wait()
            self._changed = anyio.Event()
            async with self._one_at_a_time:
                await self._try_to_free(freeing)

    async def _try_to_free(self, freeing: Freeing) -> None:
        if self.freed and not self._pool.serving:  # those that served were lost
            self._readmit_freed()
            await self._set_idle(0)
        if self._given_up or self.freed or not freeing.is_due:
            return
        engines = self._engines()
        if engines is None:
            return
        plan = freeing.plan(engines)
        self.freed = plan.free
        serving = len(engines) - len(self.freed)
        # It will be much the same in every round: people need not see each.
        await self._decided(plan.because, self._step, bool(plan.free) and serving != self._shown)
        if plan.free:
            self._shown = serving
            await self._free(plan)

    async def _free(self, plan: ReleasePlan) -> None:
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in plan.moves:
            by_target[move.to].append(move.request_id)
        try:
            with anyio.fail_after(DRAIN_SECONDS):
                # An engine that was lost since the plan takes no requests, and the last one that serves stays.
                for target, request_ids in by_target.items():
                    if target in self._pool.serving:
                        await self._pool.migrate(request_ids, target)
                for name in plan.free:
                    if set(self._pool.serving) - {name}:
                        await self._pool.drain(name, FREED)
        except TimeoutError as error:
            raise EngineError(
                f"{', '.join(plan.free)}: requests were not dropped within {DRAIN_SECONDS:g} s of an abort"
            ) from error
        await self._set_idle(len(plan.free))

    def _readmit_freed(self) -> None:
        """Have freed engines serve again: they hold the live version, or are paused for the next one."""
        back = self.freed
        self.freed = ()
        for name in back:
            self._pool.readmit(name, FREED)

    async def _set_idle(self, count: int) -> None:
        if self._share_cores is not None and count != self._idle:
            await self._share_cores(count)
        self._idle = count

    def _engines(self) -> list[ServingEngine] | None:
        """List the serving engines; None where the progress of their requests is unknown, or there is no choice."""
        serving = self._pool.serving
        served = {name: requests for name, requests in self._pool.served().items() if name in serving}
        for name, load in self._pool.loads().items():
            before = self._loads.get(name, EngineLoad())
            self._loads[name] = load
            if (steps := load.decode_steps - before.decode_steps) > 0:
                sampled = load.decode_tokens - before.decode_tokens
                more = load.accepted_tokens - before.accepted_tokens
                self._paces[name] = (load.decode_s - before.decode_s) / steps / (1 + more / max(sampled, 1))
        if len(served) < 2 or not self._set.kv_tokens:
            return None
        if any(requests and name not in self._paces for name, requests in served.items()):
            return None
        return [self._serving(name, requests, self._paces.get(name, 0.0)) for name, requests in served.items()]

    def _serving(self, name: str, requests: Sequence[ServedRequest[str]], token_s: float) -> ServingEngine:
        """Engines return tokens when a completion ends: how many it has by now follows from their pace, ``token_s``."""
        assert self._freeing is not None
        now = anyio.current_time()
        cap = self._freeing.cap

        def sampled(request: ServedRequest[str]) -> int:
            by_now = request.sampled + int((now - request.since) / token_s) if token_s else request.sampled
            return min(by_now, cap)

        return ServingEngine(
            name=name,
            kv_tokens=self._set.kv_tokens,
            max_num_seqs=self._set.max_num_seqs,
            block_tokens=self._block_tokens,
            requests=tuple(OpenRequest(request_id=r.request_id, prompt=r.prompt, sampled=sampled(r)) for r in requests),
        )

    # ---- sets --------------------------------------------------------------------------------------

    async def _switch(self, plan: SetPlan) -> None:
        """Have the planned set serve; returns when it does, or the run ends."""
        began = self._clock()
        with anyio.CancelScope() as self._switching:
            await self._hosts.use(self._chooser.sets[plan.engine_set].engines)
            now = self._clock()
            self._switches += 1
            self._switched_s = now - began
            self._chooser.switched(plan.engine_set, now, now - began, self._pool.load(), self._hosts.kv_tokens)
        self._planned = None


def _end_of(item: EndedOutcome) -> tuple[TrajectoryId, int | None]:
    """Return the trajectory's id, and the length of its completion if it has one."""
    if isinstance(item, TrajectoryLost):
        return item.id, None
    trajectory = item.outcome.trajectory
    return trajectory.id, trajectory.generated_tokens
