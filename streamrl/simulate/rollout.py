"""The engines of a simulated fleet: requests from their launch to their end, as control launches, cancels, pauses and
resumes them.

``simulation`` calls ``SimulatedRollout`` for each action of control; ``engine_changes`` and ``host_changes`` change
which engines serve."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from streamrl.base.types import TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.engines.resumption import FEWEST_KEPT, ROUNDS_KEPT
from streamrl.engines.routing import Router, ServedRequest
from streamrl.observe.dashboard.chrome_trace import ChromeTrace
from streamrl.simulate.engines import NEVER, EngineClock, EngineModel, Request, RunningTogether
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.lengths import Turns
from streamrl.simulate.stages import EventQueue


class DeferredTokens:
    """Tokens of deferred trajectories, until the same draw is launched again, or newer ones take their place as in the
    store of real engines. The tokens of samples that lost the race of their own group are never used.

    ``tokens``: sampled tokens by seed base and sample number, oldest first; ``most_open``: largest number of open
    requests so far."""

    def __init__(self, rejected_per_token: float) -> None:
        self.most_open = 0
        self.tokens: dict[tuple[int, int], float] = {}
        self._rejected = rejected_per_token

    def verify(self, request: Request) -> None:
        """Begin ``request`` with the stored tokens of its draw, up to the first token that the new weights reject."""
        tokens = self.tokens.pop((request.seed_base, request.id.sample), 0.0)
        if tokens < FEWEST_KEPT:
            return
        accepted = math.inf
        if self._rejected:
            share = random.Random(hash((request.seed_base, request.id.sample, request.id.attempt))).random()
            accepted = math.log(1 - share) / math.log1p(-self._rejected)
        request.sampled = float(int(min(tokens, accepted)))
        request.verified = True

    def add(self, request: Request) -> None:
        """Store the tokens of a request that was stopped."""
        tokens = min(request.sampled, request.length - 1)
        if tokens < FEWEST_KEPT:
            return
        draw = (request.seed_base, request.id.sample)
        self.tokens.pop(draw, None)  # a new entry is the last one
        self.tokens[draw] = tokens
        while len(self.tokens) > ROUNDS_KEPT * self.most_open:
            del self.tokens[next(iter(self.tokens))]


class RequestsOnEngines:
    """Engines, and all requests on them. A caller that makes a change calls ``settle`` before time goes on.

    ``requests``: all trajectories that have not ended, those that wait for their reward included;
    ``engines``: engines of the largest set, and of hosts that join for the first time;
    ``in_use``: number of engines of the current set;
    ``serving``: numbers of the engines that get requests;
    ``absent``: function from the number of engines of a set to the engines whose host does not serve;
    ``together``: counter of the running requests of all engines;
    ``fullest``: largest share of a KV cache in use at the end of a request, since a caller set it to 0;
    ``aborted``: whether requests were stopped since a caller set it to False;
    ``on_sampled``: function to call with a request whose environment ended it;
    ``deferred``: tokens of cancelled requests, where deferred prompts are verified;
    ``trace``: trace of the requests, if the caller wants one.

    Parameters: ``max_tokens``: longest completion; ``most_engines``: size of the largest set of engines."""

    def __init__(
        self,
        model: FleetModel,
        queue: EventQueue,
        *,
        max_tokens: int,
        most_engines: int = 0,
        verifies_deferred: bool = False,
    ) -> None:
        self.model = model
        self.together = RunningTogether()
        self.engines = [EngineClock(model.engine, self.together) for _ in range(max(most_engines, model.engines.count))]
        self.fullest = 0.0
        self.aborted = False
        self.trace: ChromeTrace | None = None
        self.on_sampled: Callable[[Request], None]
        self.requests: dict[TrajectoryId, Request] = {}
        self._queue = queue
        self.deferred = DeferredTokens(model.engine.rejected_per_token) if verifies_deferred else None
        self._max_tokens = model.engines.prompt_tokens + max_tokens
        self.in_use = model.engines.count
        self.absent: Callable[[int], Collection[int]] = lambda in_use: ()
        self._further = model.hosts.further_engines(self.in_use)
        self.engines += [EngineClock(model.engine, self.together) for _ in range(self._further)]
        self._halted: set[int] = set()
        self._stranded: list[Request] = []
        self._paused = False
        self._freed: set[int] = set()
        self._router = Router(range(len(self.engines)))
        self.choose_serving()
        self._dirty: set[int] = set()
        self._reported: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
        self._round_costs()

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self._queue.now

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines, since the start."""
        return sum(engine.preemptions for engine in self.engines)

    def _submit(self, request: Request) -> None:
        if not self.serving:
            self._stranded.append(request)
            return
        if len(self.serving) == 1:
            index = self.serving[0]
        else:
            index = self._router.choose(request.request_id, request.prompt, self.serving)
        self._assign(request, index)
        gap = self.model.engine.arrival_s
        engine = self.engines[index]
        if gap:
            engine.last_arrival = max(engine.last_arrival, self._queue.now) + gap
            self._queue.add(engine.last_arrival, partial(self.arrive, request))
            return
        engine.submit(request)
        self._dirty.add(index)

    def _assign(self, request: Request, index: int) -> None:
        request.engine = index
        self._router.add_request(
            ServedRequest(
                request_id=request.request_id,
                engine=index,
                prompt=request.prompt_tokens,
                sampled=int(request.sampled),
                max_tokens=self._max_tokens,
                since=self._queue.now,
            )
        )

    def choose_serving(self) -> None:
        """Let all engines of the set and of further hosts serve, except freed and ``absent`` ones."""
        excluded = self._freed.union(self.absent(self.in_use))
        self.serving = tuple(index for index in range(self.in_use + self._further) if index not in excluded)

    def arrive(self, request: Request) -> None:
        """Hand ``request`` to its engine, whose front end has taken it; to another engine if this one was lost
        meanwhile."""
        if request.stopped:
            return
        if request.engine in self._halted and request.engine not in self.serving:
            self._unassign(request)
            self._submit(request)
        else:
            self.engines[request.engine].submit(request)
            self._dirty.add(request.engine)

    def _stop(self, request: Request) -> None:
        request.stopped = True
        if request.engine >= 0:
            engine = self.engines[request.engine]
            engine.advance(self._queue.now)
            engine.stop(request)
            self._dirty.add(request.engine)
            self._unassign(request)
            self.aborted = True

    def _unassign(self, request: Request) -> None:
        if self.trace is not None:
            figures = {"tokens": int(request.sampled), "version": request.first_version, "stopped": request.stopped}
            now = self._queue.now
            self.trace.request(request.request_id, request.engine, request.launched_s, now, (), **figures)
        self._router.remove_request(request.request_id)
        request.engine = -1

    def pause_engines(self) -> None:
        """Pause all engines. Requests that are submitted meanwhile wait in them."""
        self._paused = True
        for index, engine in enumerate(self.engines):
            engine.pause(self._queue.now)
            self._dirty.add(index)

    def resume_engines(self, *, recompute: bool) -> None:
        """Let all engines continue, after the fixed cost of a round."""
        self._paused = False
        for index, engine in enumerate(self.engines):
            if index not in self._halted:
                engine.resume(self._queue.now, recompute=recompute)
                self._dirty.add(index)
        self._round_costs()

    def _round_costs(self) -> None:
        for engine in self.engines:
            engine.blocked_until += self.model.push.round_s

    def slow_down(self, factor: float) -> None:
        """Make decode steps take ``factor`` times as long from now on."""
        if self.engines[0].slowdown == factor:
            return
        for index, engine in enumerate(self.engines):
            engine.advance(self._queue.now)
            engine.slowdown = factor
            self._dirty.add(index)

    def settle(self) -> None:
        """Admit waiting requests to all engines that have changed, and add their next events to the queue."""
        now = self._queue.now
        for index in self._dirty:
            engine = self.engines[index]
            engine.advance(now)
            engine.admit()
            engine.stamp += 1
            due = engine.next_event()
            if due < NEVER:
                self._queue.add(due, index, engine.stamp)
        self._dirty.clear()

    def measure(self, *, with_contexts: bool) -> on.EnginesMeasured:
        """Measure all engines since the last call. ``with_contexts``: also the contexts of trajectories, which only
        admission by KV caches and rounds of one's own read."""
        now = self._queue.now
        engines = self.engines
        for engine in engines:
            engine.advance(now)
        counts = [(engine.generated, engine.steps, engine.decoding_s, engine.preemptions) for engine in engines]
        before = self._reported
        self._reported = tuple(map(sum, zip(*counts, strict=True)))
        generated, steps, decoding_s, preemptions = (
            total - last for total, last in zip(self._reported, before, strict=True)
        )
        capacity = self.engines[0].model.kv_tokens
        in_environment = [
            request for request in self.requests.values() if request.turns and request.engine < 0 < request.length
        ]
        contexts: dict[int, int] = {}
        if with_contexts:
            contexts = self._contexts()
        return on.EnginesMeasured(
            # Mean over the decode steps, as in the statistics of real engines.
            running=generated / steps * self.in_use if steps > 0 else 0.0,
            waiting=sum(len(engine.waiting) for engine in engines),
            token_s=decoding_s / steps if steps > 0 else 0.0,
            kv_usage=max(engine.held_kv for engine in engines) / capacity if capacity else 0.0,
            preemptions=int(preemptions),
            environment=len(in_environment),
            contexts=contexts,
        )

    def _contexts(self) -> dict[int, int]:
        """Tokens of the contexts of open trajectories, by group id, in complete turns as of real engines."""
        tokens: dict[int, int] = {}
        for identity, request in self.requests.items():
            tokens.setdefault(identity.group_id, request.prompt_tokens)
            tokens[identity.group_id] += int(request.sampled) + request.appended
        return tokens


class SimulatedRollout(RequestsOnEngines):
    """Engines that carry out the actions of control, and changes of engines and hosts."""

    def free(self, engines: Sequence[int], moves: Mapping[str, int]) -> None:
        """Free ``engines``. Their requests continue from their tokens on other engines. ``moves``: number of the new
        engine by the id of a request."""
        self._freed.update(engines)
        self.choose_serving()
        for index in engines:
            engine = self.engines[index]
            engine.advance(self._queue.now)
            for request in open_requests(engine):
                self._stop(request)
                moved = request.again()
                self.requests[request.id] = moved
                self._assign(moved, moves[request.request_id])
                self._queue.call_after(self.model.engines.migration_s, partial(self.arrive, moved))

    def readmit(self) -> None:
        """Let all engines of the set serve again."""
        self._freed.clear()
        self.choose_serving()

    def change(self, count: int, engine: EngineModel, seconds: float) -> None:
        """Serve with ``count`` engines of the model ``engine``, ``seconds`` from now on. No request may run."""
        for index in range(max(count, self.in_use)):
            clock = self.engines[index]
            clock.advance(self._queue.now)
            clock.model = engine
            clock.blocked_until = max(clock.blocked_until, self._queue.now) + seconds
            self._dirty.add(index)
        self.in_use = count
        self.choose_serving()

    def halt(self, engines: Sequence[int]) -> None:
        """Halt the engines of a lost host. Until the loss is noticed they get requests, but never finish one."""
        self._halted.update(engines)
        for index in engines:
            self.engines[index].pause(self._queue.now)
            self._dirty.add(index)

    def leave(self, engines: Sequence[int], *, keeps_tokens: bool) -> int:
        """Move the requests of lost ``engines``, which no longer serve, to other engines. Returns their number.
        ``keeps_tokens``: whether they keep the tokens that they sampled there."""
        moved_requests = []
        aborted = self.aborted
        for index in engines:
            for request in open_requests(self.engines[index]):
                sampled_before = request.sampled
                self._stop(request)
                moved = request.again()
                self.requests[request.id] = moved
                if not keeps_tokens:
                    moved.sampled = sampled_before
                moved_requests.append(moved)
        self.aborted = aborted  # a push does not wait for these aborts
        for request in moved_requests:
            self._submit(request)
        return len(moved_requests)

    def restart(self, engines: Sequence[int]) -> None:
        """Let ``engines``, which hold the live weights, serve from now on."""
        self._halted.difference_update(engines)
        for index in engines:
            if self._paused:
                self.engines[index].pause(self._queue.now)
            else:
                self.engines[index].resume(self._queue.now)
            self._dirty.add(index)
        stranded = self._stranded
        self._stranded = []
        for request in stranded:
            if not request.stopped:
                self._submit(request)

    def launch(
        self, action: do.LaunchGroup, prompt: int, lengths: list[int], samples_turns: Sequence[Turns] = ()
    ) -> None:
        """Submit a group. ``lengths``: lengths by sample number; ``samples_turns``: turns by sample number, for a group
        with environments, where the environments begin."""
        tokens = self.model.engines.prompt_tokens
        now = self._queue.now
        version = action.policy_version
        for identity in action.ids:
            request = Request(identity, prompt, tokens, lengths[identity.sample], now)
            request.first_version = version
            request.seed_base = action.seed_base
            if samples_turns:
                request.turns = samples_turns[identity.sample]
            if self.deferred is not None:
                self.deferred.verify(request)
            self.requests[identity] = request
            if samples_turns:
                self._to_environment(request)
            else:
                self._submit(request)
        if self.deferred is not None:
            self.deferred.most_open = max(self.deferred.most_open, len(self.requests))

    def _to_environment(self, request: Request) -> None:
        """Begin the next turn of ``request``, after the time of its environment."""
        seconds = request.next_turn(self.model.environment.factor)
        # A turn without tokens is the last wait for the environment (``TurnTimes``).
        next_stage = self._submit if request.length > request.sampled else self.on_sampled

        def leave_environment() -> None:
            if not request.stopped:
                next_stage(request)

        self._queue.call_after(seconds, leave_environment)

    def finish(self, index: int, stamp: int, time: float) -> list[Request]:
        """Let requests finish on engine ``index`` at ``time``, and begin their next turns. Returns the requests without
        a further turn; none where the engine has changed since this event was added."""
        engine = self.engines[index]
        if engine.stamp != stamp:
            return []
        self._queue.now = time
        self._dirty.add(index)
        if engine.model.kv_tokens:
            engine.advance(time)
            self.fullest = max(self.fullest, min(engine.held_kv / engine.model.kv_tokens, 1.0))
        finished = engine.finished(time)
        for request in finished:
            self._router.note_turn(request.request_id)
            self._unassign(request)
        last_turns: list[Request] = []
        for request in finished:
            if request.turns:
                self._to_environment(request)
            else:
                last_turns.append(request)
        return last_turns

    def cancel(self, action: do.Drop) -> None:
        """Stop and forget the trajectories of ``action``."""
        for identity in action.ids:
            request = self.requests.pop(identity, None)
            if request is not None:
                self._stop(request)
                if self.deferred is not None and not request.appended:
                    self.deferred.add(request)

    def pause_trajectories(self, action: do.PauseTrajectories) -> None:
        """Stop the trajectories of ``action`` that have not ended, and keep their tokens."""
        for identity in action.ids:
            request = self.requests.get(identity)
            if request is not None and (request.engine >= 0 or request.turns):  # all others wait for their reward
                if request.engine >= 0 and request.running:
                    self.engines[request.engine].keep_context(request)
                self._stop(request)

    def resume_trajectories(self, action: do.ResumeTrajectories, live_version: int) -> None:
        """Submit paused trajectories again, with their tokens. Trajectories that ended meanwhile are ignored."""
        for identity in action.ids:
            paused = self.requests.get(identity)
            if paused is None or not paused.stopped:
                continue
            request = paused.again()
            request.first_version = paused.first_version if paused.sampled else live_version
            self.requests[identity] = request
            self._submit(request)


def open_requests(engine: EngineClock) -> list[Request]:
    """Requests that run or wait on ``engine``."""
    return [*engine.running, *(request for request in engine.waiting if not request.stopped)]
