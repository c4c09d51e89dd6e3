"""The observer of a run that frees engines late in a round, and switches between sets of engines.

``launch.observers`` makes one in the controller of every run. It carries out the decisions of ``freeing`` and
``engine_sets`` on the engine pool and the engine processes (``engine_processes``). In a run with neither it only
reports restarts.

At the boundary of two rounds, first the freed engines of the current set serve again, then the set of the next round is
chosen, then the requests of the round are submitted to engines of this set.

A freed engine is drained: other engines continue its requests from their tokens. It is idle, still gets every weight
push, and serves again in the next round; the trainer uses its cores until the next version is live.

A set is chosen when the first group of a round is launched, since only then its kind is known. The engines of the old
set get no more requests; their open requests are aborted and continue on the new set. Requests wait until it serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf

from anyio import CancelScope, Event, Lock, create_task_group, current_time, fail_after, move_on_after
from msgspec.structs import replace

from streamrl.base.errors import EngineError, StreamRLError
from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import EndedOutcome, TrajectoryLost, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import Clock, Metrics, Texts, TrajectoryId
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import Observer, PushReport
from streamrl.control.actions import ControlAction, Decision, LaunchGroup, StepOptimizer
from streamrl.control.events import ControlEvent, Steered, StopRequested
from streamrl.engines.elastic.engine_processes import DRAIN_SECONDS, EngineProcesses
from streamrl.engines.elastic.engine_sets import SetChooser, SetPlan
from streamrl.engines.elastic.freeing import Freeing, OpenRequest, ReleasePlan, ServingEngine
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.routing import ServedRequest
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.recipe.topology import PreparedSet, prepared_sets

FREED = "freed"
"""The pool's reason to drain a freed engine. Engines that are drained for another reason are not readmitted here."""

ALONE_LOOK_S = 1.0
"""Interval of the check that engines still serve while others are freed."""
SAMPLE_S = 0.2
"""Interval in which engines report their load: it changes no more often."""


def set_chooser(recipe: Recipe, kv_tokens: Mapping[str, int], switch_s: float) -> SetChooser:
    """Return the chooser between the sets of ``recipe``.

    ``kv_tokens``: capacity of the KV cache of one engine in tokens, by set
    ``switch_s``: expected seconds of the first switch

    Raises ``StreamRLError`` when engines are to be freed and the capacity of the first set is unknown."""
    sets = [replace(engine_set, kv_tokens=kv_tokens[engine_set.name]) for engine_set in prepared_sets(recipe)]
    release = recipe.engines.release
    if release is not ReleaseKind.NEVER and not sets[0].kv_tokens:
        raise StreamRLError(
            f'engines.release = "{release}" must know how many tokens a KV cache holds, and these engines do not say '
            'it: set release = "never"'
        )
    return SetChooser(sets, steps=recipe.run.steps, switch_s=switch_s)


class ElasticEngines(Observer):
    """Frees and switches engines, by the rounds that it observes. ``run`` carries out both.

    ``store``: store with the prompts of launched trajectories
    ``on_decision``: callback with a decision, its step, and whether users see it
    ``freeing``: choice of the engines to free (None: no engine is freed)
    ``block_tokens``: tokens of a block of the engines' KV caches
    ``share_cores``: callback with the number of idle engines, whose cores the trainer may use"""

    def __init__(
        self,
        pool: EnginePool,
        processes: EngineProcesses,
        chooser: SetChooser,
        store: TrajectoryStore,
        *,
        on_decision: Callable[[Decision, int, bool], Awaitable[None]],
        freeing: Freeing | None = None,
        block_tokens: int = 16,
        share_cores: Callable[[int], Awaitable[None]] | None = None,
        clock: Clock = current_time,
    ) -> None:
        self._pool = pool
        self._processes = processes
        self._chooser = chooser
        self._store = store
        self._on_decision = on_decision
        self._freeing = freeing
        self._block_tokens = block_tokens
        self._share_cores = share_cores
        self._clock = clock
        self._step = 0
        self._given_up = False
        self._planned: SetPlan | None = None  # from the decision until its set serves
        self._running = CancelScope()
        self._switching = CancelScope()
        self._changed = Event()
        self._switch_planned = Event()
        self._one_at_a_time = Lock()
        self._loads: dict[str, EngineLoad] = {}  # of the last plan, by engine
        self._token_s: dict[str, float] = {}  # seconds a token of a request, by engine
        self._idle = 0
        self._shown_serving = 0  # number of serving engines in the last decision that users saw
        self._looked_at = -inf
        self._switches = 0
        self._switched_s = 0.0
        self._last_set = self._set  # the set of the last complete batch
        self.freed: Texts = ()
        """Names of the engines that are idle until the next round."""

    @property
    def figures(self) -> Metrics:
        """Metrics of the step that ends now. The read resets the seconds of switches."""
        if len(self._chooser.sets) == 1:
            return self._processes.figures
        seconds = self._switched_s
        self._switched_s = 0.0
        return self._processes.figures | {
            "engines/set": float(list(self._chooser.sets).index(self._last_set.name)),
            "engines/serving": float(self._last_set.count),
            "engines/switches_total": float(self._switches),
            "time/engine_switch_s": seconds,
        }

    @property
    def _set(self) -> PreparedSet:
        return self._chooser.sets[self._chooser.current]

    # ---- events and actions of the controller ------------------------------------------------------

    async def on_event(self, event: ControlEvent) -> None:
        """Carry out orders about an engine. Stop freeing and switching, and cancel a switch, once the run is to end."""
        if isinstance(event, Steered) and event.engine:
            self._processes.set_availability(event.engine, event.order)
        if isinstance(event, StopRequested):
            self._given_up = True
            self._switching.cancel()

    async def on_action(self, action: ControlAction) -> None:
        """Choose the set of a round that begins. Between a complete batch and the next round no engine is freed."""
        if isinstance(action, LaunchGroup):
            await self._on_launch(action)
        elif isinstance(action, StepOptimizer):
            self._last_set = self._set
            self._chooser.note_round_closed(self._clock(), self._pool.load())
            if self._freeing is not None:
                self._freeing.begin_round()

    async def _on_launch(self, group: LaunchGroup) -> None:
        ids = group.ids
        round_kind = group.round_kind
        policy_version = group.policy_version
        prompt_tokens = len(self._store.prompts[ids[0].prompt_id].token_ids)
        self._step = policy_version + 1
        if self._chooser.is_between_rounds:
            async with self._one_at_a_time:
                self._readmit_freed()
        if self._freeing is not None:
            self._freeing.note_launch(round_kind, ids)
        load = self._pool.load()
        plan = self._chooser.note_launch(round_kind, ids, prompt_tokens, policy_version, self._clock(), load)
        if plan is not None and plan.because is not None and not self._given_up and self._planned is None:
            self._planned = plan
            self._pool.withdraw(self._set.engines, UNAVAILABLE)
            await self._on_decision(plan.because, self._step, True)
            self._switch_planned.set()

    def on_outcome(self, outcome: TrajectoryOutcome) -> None:
        """Note the length of a completion that has ended."""
        if isinstance(outcome, TrajectoryPaused):
            return
        identity, tokens = _end_of(outcome)
        if self._freeing is not None:
            self._freeing.note_end(identity, tokens)
            self._changed.set()
        self._chooser.note_end(identity, tokens)
        if self._clock() - self._looked_at >= SAMPLE_S:
            self._looked_at = self._clock()
            self._chooser.note_load(self._pool.load())

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Have all engines of the set serve: they sample requests that were submitted in advance. After the ``last``
        version no engine is freed, and no switch begins; a switch in progress continues, for the last evaluation."""
        self._given_up = self._given_up or last
        self._chooser.note_live_version(push.policy_version, self._clock(), self._pool.load())
        async with self._one_at_a_time:
            self._readmit_freed()
            await self._set_idle(0)

    def end(self) -> None:
        """End ``run`` without waiting for a switch."""
        self._running.cancel()

    # ---- freeing -----------------------------------------------------------------------------------

    async def run(self, notify: Callable[[ControlEvent], None]) -> None:
        """Free engines when they can be spared, and carry out planned switches, until ``end``."""
        with self._running:
            async with create_task_group() as tasks:
                if self._freeing is not None:
                    tasks.start_soon(self._free_when_due, self._freeing)
                while True:
                    await self._switch_planned.wait()
                    self._switch_planned = Event()
                    if self._planned is not None:
                        await self._switch(self._planned)

    async def _free_when_due(self, freeing: Freeing) -> None:
        while True:
            with move_on_after(ALONE_LOOK_S if self.freed else None):
                await self._changed.wait()
            self._changed = Event()
            async with self._one_at_a_time:
                await self._try_to_free(freeing)

    async def _try_to_free(self, freeing: Freeing) -> None:
        if self.freed and not self._pool.serving:  # the serving engines were lost
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
        # The decision is much the same in every round: users see only a new number of engines.
        await self._on_decision(plan.because, self._step, bool(plan.free) and serving != self._shown_serving)
        if plan.free:
            self._shown_serving = serving
            await self._free(plan)

    async def _free(self, plan: ReleasePlan) -> None:
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in plan.moves:
            by_target[move.to].append(move.request_id)
        try:
            with fail_after(DRAIN_SECONDS):
                # An engine that was lost since the plan takes no requests, and the last serving engine is not drained.
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
        """Have freed engines serve again. They hold the live version, or are paused for the next one."""
        names = self.freed
        self.freed = ()
        for name in names:
            self._pool.readmit(name, FREED)

    async def _set_idle(self, count: int) -> None:
        if self._share_cores is not None and count != self._idle:
            await self._share_cores(count)
        self._idle = count

    def _engines(self) -> list[ServingEngine] | None:
        """List the serving engines with their open requests. Returns None when the progress of a request is unknown, or
        fewer than two engines serve."""
        serving = self._pool.serving
        requests_of = {name: requests for name, requests in self._pool.open_requests().items() if name in serving}
        for name, load in self._pool.loads().items():
            before = self._loads.get(name, EngineLoad())
            self._loads[name] = load
            steps = load.decode_steps - before.decode_steps
            if steps > 0:
                step_s = (load.decode_s - before.decode_s) / steps
                sampled = load.decode_tokens - before.decode_tokens
                accepted = load.accepted_tokens - before.accepted_tokens  # drafted tokens come beside the sampled ones
                self._token_s[name] = step_s / (1 + accepted / max(sampled, 1))
        if len(requests_of) < 2 or not self._set.kv_tokens:
            return None
        if any(requests and name not in self._token_s for name, requests in requests_of.items()):
            return None
        return [
            self._serving_engine(name, requests, self._token_s.get(name, 0.0)) for name, requests in requests_of.items()
        ]

    def _serving_engine(self, name: str, requests: Sequence[ServedRequest[str]], token_s: float) -> ServingEngine:
        """Return an engine with estimates of the sampled tokens: engines return tokens only at the end of a completion.
        ``token_s``: seconds a token of a request (0: unknown)."""
        assert self._freeing is not None
        now = current_time()
        cap = self._freeing.cap

        def estimated(request: ServedRequest[str]) -> OpenRequest:
            sampled = request.sampled
            if token_s:
                sampled += int((now - request.since) / token_s)
            return OpenRequest(request_id=request.request_id, prompt=request.prompt, sampled=min(sampled, cap))

        return ServingEngine(
            name=name,
            kv_tokens=self._set.kv_tokens,
            max_num_seqs=self._set.max_num_seqs,
            block_tokens=self._block_tokens,
            requests=tuple(map(estimated, requests)),
        )

    # ---- sets --------------------------------------------------------------------------------------

    async def _switch(self, plan: SetPlan) -> None:
        """Have the planned set serve; returns when it serves, or the run ends."""
        began = self._clock()
        with CancelScope() as self._switching:
            await self._processes.use(self._chooser.sets[plan.engine_set].engines)
            now = self._clock()
            self._switches += 1
            self._switched_s = now - began
            self._chooser.note_switch(plan.engine_set, now, now - began, self._pool.load(), self._processes.kv_tokens)
        self._planned = None


def _end_of(outcome: EndedOutcome) -> tuple[TrajectoryId, int | None]:
    """Return the trajectory's id, and the length of its completion if it has one."""
    if isinstance(outcome, TrajectoryLost):
        return outcome.id, None
    trajectory = outcome.outcome.trajectory
    return trajectory.id, trajectory.generated_tokens
