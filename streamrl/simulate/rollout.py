"""The engines of a simulated cluster: what control launches, cancels, cuts and resumes, and when it finishes."""

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
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engines import NEVER, EngineClock, EngineModel, Request, RunningTogether
from streamrl.simulate.lengths import Turns
from streamrl.simulate.stages import EventQueue


class DeferredTokens:
    """Tokens of deferred trajectories until their draw is launched again: as many as the real engines' store has.
    Samples that lost beside the winners of their own prompt are never sampled again."""

    def __init__(self, rejected_per_token: float) -> None:
        self.most_open = 0
        self.tokens: dict[tuple[int, int], float] = {}
        self._rejected = rejected_per_token

    def verify(self, request: Request) -> None:
        """Begin ``request`` with the tokens of its draw, up to the first that the weights choose otherwise now."""
        tokens = self.tokens.pop((request.noise, request.id.sample), 0.0)
        if tokens < FEWEST_KEPT:
            return
        share = random.Random(hash((request.noise, request.id.sample, request.id.attempt))).random()
        until = math.log(1 - share) / math.log1p(-self._rejected) if self._rejected else math.inf
        request.sampled = float(int(min(tokens, until)))
        request.verified = True

    def add(self, request: Request) -> None:
        """Remember the tokens of a request that was stopped."""
        tokens = min(request.sampled, request.length - 1)
        if tokens < FEWEST_KEPT:
            return
        name = (request.noise, request.id.sample)
        self.tokens.pop(name, None)  # to the end
        self.tokens[name] = tokens
        while len(self.tokens) > ROUNDS_KEPT * self.most_open:
            del self.tokens[next(iter(self.tokens))]


class RequestsOnEngines:
    """``requests``: all trajectories that have not ended, those that are being scored included. A caller that changes
    something calls ``settle`` before time goes on. ``aborted``: requests were stopped since it was last set to False;
    ``engines``: those of the largest set, of which the first ``serving`` ones serve; ``together``: what runs on all
    of them; ``fullest``: largest share of a cache that was in use when a request ended, since it was last set to 0;
    ``sampled``: is called with what its environment has ended.
    ``in_use``: engines of the set; ``absent``: returns those of so many whose host does not serve.
    ``verifies_deferred``: what was cancelled keeps its tokens until the same draw is launched again."""

    def __init__(
        self, model: ClusterModel, queue: EventQueue, *, max_tokens: int, most: int = 0, verifies_deferred: bool = False
    ) -> None:
        self.model = model
        self.together = RunningTogether()
        self.engines = [EngineClock(model.engine, self.together) for _ in range(max(most, model.engines.count))]
        self.fullest = 0.0
        self.aborted = False
        self.trace: ChromeTrace | None = None
        self.sampled: Callable[[Request], None]
        self.requests: dict[TrajectoryId, Request] = {}
        self._queue = queue
        self.deferred = DeferredTokens(model.engine.rejected_per_token) if verifies_deferred else None
        self._most_tokens = model.engines.prompt_tokens + max_tokens
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
        """The time."""
        return self._queue.now

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines, since the start."""
        return sum(engine.preemptions for engine in self.engines)

    def _submit(self, request: Request) -> None:
        if not self.serving:
            self._stranded.append(request)
            return
        lone = len(self.serving) == 1
        choose = self._router.choose
        index = self.serving[0] if lone else choose(request.request_id, request.prompt, self.serving)
        self._opened(request, index)
        gap = self.model.engine.arrival_s
        engine = self.engines[index]
        if gap:
            engine.last_arrival = max(engine.last_arrival, self._queue.now) + gap
            self._queue.add(engine.last_arrival, partial(self.arrived, request))
            return
        engine.submit(request)
        self._dirty.add(index)

    def _opened(self, request: Request, index: int) -> None:
        request.engine = index
        self._router.opened(
            ServedRequest(
                request_id=request.request_id,
                engine=index,
                prompt=request.prompt_tokens,
                sampled=int(request.sampled),
                most_tokens=self._most_tokens,
                since=self._queue.now,
            )
        )

    def choose_serving(self) -> None:
        """Send requests to all engines of the set and of further hosts but those that are freed, or ``absent``."""
        out = self._freed.union(self.absent(self.in_use))
        self.serving = tuple(index for index in range(self.in_use + self._further) if index not in out)

    def arrived(self, request: Request) -> None:
        """The front end of its engine took a request. From one that was lost on the way it goes on to another."""
        if request.stopped:
            return
        if request.engine in self._halted and request.engine not in self.serving:
            self._left(request)
            self._submit(request)
        else:
            self.engines[request.engine].submit(request)
            self._dirty.add(request.engine)

    def _take_off(self, request: Request) -> None:
        request.stopped = True
        if request.engine >= 0:
            engine = self.engines[request.engine]
            engine.advance(self._queue.now)
            engine.stop(request)
            self._dirty.add(request.engine)
            self._left(request)
            self.aborted = True

    def _left(self, request: Request) -> None:
        if self.trace is not None:
            figures = {"tokens": int(request.sampled), "version": request.first_version, "stopped": request.stopped}
            now = self._queue.now
            self.trace.request(request.request_id, request.engine, request.launched_s, now, (), **figures)
        self._router.closed(request.request_id)
        request.engine = -1

    def pause_engines(self) -> None:
        """Pause all engines; requests that are submitted meanwhile wait in them."""
        self._paused = True
        for index, engine in enumerate(self.engines):
            engine.pause(self._queue.now)
            self._dirty.add(index)

    def resume_engines(self, *, recompute: bool) -> None:
        """All engines go on, after what a new round costs."""
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
        """A decode step takes ``factor`` times as long from now on."""
        if self.engines[0].slowdown == factor:
            return
        for index, engine in enumerate(self.engines):
            engine.advance(self._queue.now)
            engine.slowdown = factor
            self._dirty.add(index)

    def settle(self) -> None:
        """Engines whose requests changed: admit what waits, and find out when each of them has something next."""
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

    def measure(self) -> on.EnginesMeasured:
        """Measure the engines since the last call, all together."""
        now = self._queue.now
        engines = self.engines
        for engine in engines:
            engine.advance(now)
        sums = [(one.generated, one.steps, one.decoding_s, one.preemptions) for one in engines]
        before = self._reported
        self._reported = tuple(map(sum, zip(*sums, strict=True)))
        generated, steps, decoding, preemptions = (a - b for a, b in zip(self._reported, before, strict=True))
        capacity = self.engines[0].model.kv_tokens
        return on.EnginesMeasured(
            # Of the steps that were made, as the real engines' statistics count it.
            running=generated / steps * self.in_use if steps > 0 else 0.0,
            waiting=sum(len(engine.waiting) for engine in engines),
            token_s=decoding / steps if steps > 0 else 0.0,
            kv_usage=max(engine.held_kv for engine in engines) / capacity if capacity else 0.0,
            preemptions=int(preemptions),
            environment=sum(bool(one.turns) and one.engine < 0 < one.length for one in self.requests.values()),
        )


class SimulatedRollout(RequestsOnEngines):
    """Simulated rollout: carries out the actions of control, and the loss and the joining of hosts."""

    def free(self, engines: Sequence[int], moves: Mapping[str, int]) -> None:
        """Send these engines nothing more; their requests continue from their tokens on the engines that ``moves``
        names (by id)."""
        self._freed.update(engines)
        self.choose_serving()
        for index in engines:
            engine = self.engines[index]
            engine.advance(self._queue.now)
            moving = [*engine.running, *(request for request in engine.waiting if not request.stopped)]
            for request in moving:
                self._take_off(request)
                moved = self.requests[request.id] = request.again()
                self._opened(moved, moves[request.request_id])
                self._queue.call_after(self.model.engines.migration_s, partial(self.arrived, moved))

    def take_back(self) -> None:
        """All engines of the set serve again."""
        self._freed.clear()
        self.choose_serving()

    def change(self, count: int, engine: EngineModel, seconds: float) -> None:
        """Serve with ``count`` engines of that model from ``seconds`` on. No request runs."""
        for index in range(max(count, self.in_use)):
            clock = self.engines[index]
            clock.advance(self._queue.now)
            clock.model = engine
            clock.blocked_until = max(clock.blocked_until, self._queue.now) + seconds
            self._dirty.add(index)
        self.in_use = count
        self.choose_serving()

    def halt(self, engines: Sequence[int]) -> None:
        """The host of these engines is lost, and nobody knows yet: they answer nothing, and get requests."""
        self._halted.update(engines)
        for index in engines:
            self.engines[index].pause(self._queue.now)
            self._dirty.add(index)

    def leave(self, engines: Sequence[int], *, keeps_tokens: bool) -> int:
        """The loss of these engines, which do not serve any more, is known: their requests go on elsewhere. Returns how
        many; without ``keeps_tokens`` each has those with which it came."""
        moved = []
        aborted = self.aborted
        for engine in (self.engines[index] for index in engines):
            for request in [*engine.running, *(request for request in engine.waiting if not request.stopped)]:
                came_with = request.sampled
                self._take_off(request)
                again = self.requests[request.id] = request.again()
                again.sampled = again.sampled if keeps_tokens else came_with
                moved.append(again)
        self.aborted = aborted  # no abort that a push would wait for
        for request in moved:
            self._submit(request)
        return len(moved)

    def restart(self, engines: Sequence[int]) -> None:
        """These engines serve from now on, and hold the live weights."""
        self._halted.difference_update(engines)
        for index in engines:
            self.engines[index].pause(self._queue.now) if self._paused else self.engines[index].resume(self._queue.now)
            self._dirty.add(index)
        stranded = self._stranded
        self._stranded = []
        for request in stranded:
            if not request.stopped:
                self._submit(request)

    def launch(self, action: do.LaunchGroup, prompt: int, lengths: list[int], turns: Sequence[Turns] = ()) -> None:
        """Submit a group; ``lengths`` by sample number, and ``turns`` if it has environments, which begin."""
        tokens = self.model.engines.prompt_tokens
        now = self._queue.now
        version = action.policy_version
        for identity in action.ids:
            request = Request(identity, prompt, tokens, lengths[identity.sample], now)
            request.first_version = version
            request.noise = action.seed_base
            request.turns = turns[identity.sample] if turns else ()
            if self.deferred is not None:
                self.deferred.verify(request)
            self.requests[identity] = request
            self._to_environment(request) if turns else self._submit(request)
        if self.deferred is not None:
            self.deferred.most_open = max(self.deferred.most_open, len(self.requests))

    def _to_environment(self, request: Request) -> None:
        seconds = request.next_turn(self.model.environment.factor)
        after = self._submit if request.length > request.sampled else self.sampled
        self._queue.call_after(seconds, lambda: None if request.stopped else after(request))

    def finished(self, index: int, stamp: int, time: float) -> list[Request]:
        """Take the trajectories that end on engine ``index`` at ``time``; none when things have changed since that was
        foreseen."""
        engine = self.engines[index]
        if engine.stamp != stamp:
            return []
        self._queue.now = time
        self._dirty.add(index)
        if engine.model.kv_tokens:
            engine.advance(time)
            self.fullest = max(self.fullest, min(engine.held_kv / engine.model.kv_tokens, 1.0))
        ended = engine.finished(time)
        for request in ended:
            self._router.answered(request.request_id)
            self._left(request)
        for request in (turned := [request for request in ended if request.turns]):
            self._to_environment(request)
        return [request for request in ended if request not in turned] if turned else ended

    def cancel(self, action: do.Drop) -> None:
        """Stop them and forget them, wherever they are."""
        for identity in action.ids:
            request = self.requests.pop(identity, None)
            if request is not None:
                self._take_off(request)
                if self.deferred is not None and not request.appended:
                    self.deferred.add(request)

    def pause_trajectories(self, action: do.PauseTrajectories) -> None:
        """Stop those that have not ended, and keep their tokens."""
        for identity in action.ids:
            request = self.requests.get(identity)
            if request is not None and (request.engine >= 0 or request.turns):  # others ended: rewards are on the way
                self._take_off(request)

    def resume_trajectories(self, action: do.ResumeTrajectories, live_version: int) -> None:
        """Submit what was paused again, with its tokens. Trajectories that ended meanwhile are left alone."""
        for identity in action.ids:
            old = self.requests.get(identity)
            if old is None or not old.stopped:
                continue
            request = old.again()
            request.first_version = old.first_version if old.sampled else live_version
            self.requests[identity] = request
            self._submit(request)
