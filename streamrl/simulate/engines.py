"""One engine as an event-to-event cost model: no loop over tokens.

All running requests decode together, so an engine has one token clock. A decode step with ``b`` running requests and
``K`` tokens of context takes ``a + c b + g K`` seconds, and ``K`` grows by ``b``: ``n`` steps take
``n (a + c b + g K) + g b n^2 / 2``. Between events the clock jumps; a request costs a heap operation or two."""

from __future__ import annotations

import heapq
import math
from collections import deque

import msgspec

from streamrl.base.types import TrajectoryId
from streamrl.engines.step_cost import StepCost
from streamrl.simulate.lengths import Turns

NEVER = math.inf
ROUNDING = 1e-6  # tokens: below what the clock resolves after hours


class EngineModel(StepCost, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decode step (``StepCost``), and in seconds and tokens:

    ``max_num_seqs``: requests at once; ``kv_tokens``: KV capacity (0: no limit); when it is full the newest request is
    preempted and computed again. ``prefill_tokens_s``: rate of prefill (0: free); siblings on one engine share their
    prompt. ``arrival_s``: interval at which the front end takes requests; ``admission_s + admission_per_running_s x
    running``: how long each holds up decoding; ``presubmitted_s``: the same for one that came while the engine was
    paused. ``rejected_per_token``: where deferred prompts are verified, the chance that the weights of the long round
    choose another token than the one that was sampled before (assumed). ``prefix_cache``: a later turn on the same
    engine under the same weights prefills only what was appended; without it the whole context."""

    max_num_seqs: int = 256
    kv_tokens: int = 0
    prefill_tokens_s: float = 0.0
    arrival_s: float = 0.0
    admission_s: float = 0.0
    admission_per_running_s: float = 0.0
    presubmitted_s: float = 0.0
    rejected_per_token: float = 0.001
    prefix_cache: bool = True


class Request(msgspec.Struct, eq=False):
    """One trajectory on its way. ``length``: tokens it will have, at the end of its turn; ``sampled``: before it runs,
    or since it was stopped (in parts of a token: the clock stops anywhere). ``noise``: of its group; ``verified``: it
    begins with tokens of an earlier attempt. ``turns``: still to come; ``appended``: tokens of its environment;
    ``sampling_s``: from launch to end, without ``environment_s``."""

    id: TrajectoryId
    prompt: int
    prompt_tokens: int
    length: int
    launched_s: float
    request_id: str = ""
    sampled: float = 0.0
    start: float = 0.0
    attempt_serial: int = 0
    engine: int = -1
    first_version: int = -1
    newest_version: int = 0
    running: bool = False
    stopped: bool = False
    paused_arrival: bool = False
    noise: int = -1
    verified: bool = False
    turns: Turns = ()
    appended: int = 0
    environment_s: float = 0.0
    sampling_s: float = 0.0

    def __post_init__(self) -> None:
        self.request_id = str(self.id)

    def next_turn(self, factor: float) -> float:
        """Begin the next turn. Returns the seconds that its environment takes before it, ``factor`` times as long."""
        appended, seconds, tokens, _ = self.turns[0]
        self.turns = self.turns[1:]
        self.appended += appended
        self.length = int(self.sampled) + tokens
        self.environment_s += seconds * factor
        return seconds * factor

    def again(self) -> Request:
        """The same trajectory, to be submitted anew with the tokens that it has: this one may still be in a queue."""
        return msgspec.structs.replace(self, stopped=False, verified=False, engine=-1)


class RunningTogether:
    """Requests that run on all engines. ``busy_s``: their integral over time, of no more than ``capacity`` at once."""

    def __init__(self) -> None:
        self.capacity = math.inf
        self.busy_s = 0.0
        self._running = 0
        self._since = 0.0

    def change(self, now: float, by: int) -> None:
        """Change the number of running requests by ``by`` from ``now`` on."""
        self.advance(now)
        self._running += by

    def advance(self, now: float) -> None:
        """Count until ``now``."""
        if now > self._since:
            self.busy_s += min(self._running, self.capacity) * (now - self._since)
            self._since = now


class EngineClock:
    """One engine. Times never go back; ``advance`` before anything changes, ``next_event`` after it. ``together``: what
    counts the requests of all engines."""

    def __init__(self, model: EngineModel, together: RunningTogether | None = None) -> None:
        self.model = model
        self._together = together or RunningTogether()
        self.time = 0.0
        self.clock = 0.0
        self.blocked_until = 0.0
        self.slowdown = 1.0
        self.paused = False
        self.stamp = 0
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.context = 0.0
        self.held_kv = 0.0
        self.generated = 0.0
        self.preemptions = 0
        self.last_arrival = 0.0
        self.decoding_s = 0.0
        self.steps = 0.0
        self._finishing: list[tuple[float, int, Request]] = []
        self._serial = 0
        self._held_up_s = 0.0
        self._prefixes: dict[int, int] = {}
        self._cached: dict[TrajectoryId, float] = {}

    def _step_s(self) -> float:
        return self.model.step_s(len(self.running), self.context) * self.slowdown

    def advance(self, now: float) -> None:
        """Decode until ``now``."""
        begun = self.time
        self.time = max(now, self.time)
        running = len(self.running)
        if not running or now <= begun:
            return
        spent = now - max(begun, self.blocked_until)
        if self.paused or spent <= 0:
            return
        step = self._step_s()
        growth = self.model.per_context_token_s * running * self.slowdown
        steps = (math.sqrt(step * step + 2 * growth * spent) - step) / growth if growth else spent / step
        self.clock += steps
        self.steps += steps
        self.decoding_s += spent
        self.context += steps * running
        self.held_kv += steps * running
        self.generated += steps * running

    def next_event(self) -> float:
        """Time at which the next request finishes or the KV cache is full; ``NEVER`` when nothing runs."""
        finishing = self._finishing
        while finishing and (not finishing[0][2].running or finishing[0][2].attempt_serial != finishing[0][1]):
            heapq.heappop(finishing)
        if self.paused or not finishing:
            return NEVER
        running = len(self.running)
        steps = max(finishing[0][0] - self.clock, 0.0)
        if self.model.kv_tokens and running > 1:
            steps = min(steps, max(self.model.kv_tokens - self.held_kv, 0.0) / running)
        growth = self.model.per_context_token_s * running * self.slowdown
        seconds = steps * self._step_s() + growth * steps * steps / 2
        return max(self.time, self.blocked_until) + seconds

    def finished(self, now: float) -> list[Request]:
        """Decode until ``now``, the time of ``next_event``; what ended leaves, and what waits moves up."""
        self.advance(now)
        ended: list[Request] = []
        finishing = self._finishing
        while finishing and finishing[0][0] <= self.clock + ROUNDING:
            _, serial, request = heapq.heappop(finishing)
            if request.running and request.attempt_serial == serial:
                self._leave(request)
                request.sampled = request.length
                if request.turns and self.model.prefix_cache:
                    self._cached[request.id] = request.sampled + request.appended
                ended.append(request)
        if not ended:
            self._preempt_when_full()
        self.admit()
        return ended

    def sampled_by_now(self, request: Request) -> int:
        """Whole tokens that ``request`` has, at the engine's time."""
        return int(request.sampled + (self.clock - request.start if request.running else 0.0))

    def submit(self, request: Request) -> None:
        """Queue a request that reached the engine. ``admit`` lets it run."""
        request.paused_arrival = self.paused
        self.waiting.append(request)

    def admit(self) -> None:
        """Let waiting requests run, first come first served, while there is room."""
        waiting = self.waiting
        model = self.model
        while waiting and not self.paused and len(self.running) < model.max_num_seqs:
            request = waiting[0]
            if request.stopped:
                waiting.popleft()
                continue
            if model.kv_tokens and self.running:
                shared = request.id.group_id in self._prefixes
                needed = request.sampled + request.appended + 1 + (0 if shared else request.prompt_tokens)
                if self.held_kv + needed > model.kv_tokens:
                    return
            waiting.popleft()
            self._enter(request)

    def _enter(self, request: Request) -> None:
        model = self.model
        if not self.running:
            # so that rounding never adds up
            self.clock = 0.0
            self.context = 0.0
            self.held_kv = 0.0
            self._finishing.clear()
            self._prefixes.clear()
        group = request.id.group_id
        siblings = self._prefixes.get(group, 0)
        self._prefixes[group] = siblings + 1
        after_prompt = request.sampled + request.appended
        own = after_prompt + (0 if siblings else request.prompt_tokens)
        held_up = model.presubmitted_s if request.paused_arrival else model.admission_s
        if not request.paused_arrival:
            held_up += model.admission_per_running_s * len(self.running)
        if request.verified:
            held_up *= 2  # what verifies it is a request of its own
        if model.prefill_tokens_s:
            cached = self._cached.pop(request.id, 0.0)
            held_up += (after_prompt - cached if cached else own) / model.prefill_tokens_s
        if held_up:
            self.blocked_until = max(self.blocked_until, self.time) + held_up
        self._serial += 1
        request.attempt_serial = self._serial
        request.running = True
        request.start = self.clock
        self.running[request] = None
        self._together.change(self.time, 1)
        self.context += request.prompt_tokens + after_prompt
        self.held_kv += own
        finish = self.clock + request.length - request.sampled
        heapq.heappush(self._finishing, (finish, self._serial, request))

    def _leave(self, request: Request) -> None:
        del self.running[request]
        self._together.change(self.time, -1)
        request.running = False
        decoded = self.clock - request.start
        self.context -= request.prompt_tokens + request.sampled + request.appended + decoded
        self.held_kv -= request.sampled + request.appended + decoded
        group = request.id.group_id
        left = self._prefixes[group] - 1
        if left:
            self._prefixes[group] = left
        else:
            del self._prefixes[group]
            self.held_kv -= request.prompt_tokens
        request.sampled = min(request.sampled + decoded, request.length)

    def stop(self, request: Request) -> None:
        """Take one request off, at the engine's time; its ``sampled`` tokens are then final."""
        if request.running:
            self._leave(request)

    def _preempt_when_full(self) -> None:
        """The newest request gives up its KV and is computed again when there is room (vLLM's rule)."""
        while self.model.kv_tokens and len(self.running) > 1 and self.held_kv >= self.model.kv_tokens - ROUNDING:
            request = next(reversed(self.running))
            self._leave(request)
            request.paused_arrival = False
            self.waiting.appendleft(request)
            self.preemptions += 1

    def pause(self, now: float) -> None:
        """Run nothing until ``resume``."""
        self.advance(now)
        if not self.paused:
            self._held_up_s = max(self.blocked_until - now, 0.0)
        self.paused = True

    def resume(self, now: float, *, recompute: bool = False) -> None:
        """Resume; ``recompute``: the KV of all that runs is made again under the new weights."""
        self.advance(now)
        self._cached.clear()
        self.paused = False
        held_up = self._held_up_s if self.running else 0.0  # what was due is still to be done, unless it was taken off
        if recompute and self.model.prefill_tokens_s:
            held_up = max(held_up, self.held_kv / self.model.prefill_tokens_s)
        self.blocked_until = now + held_up
        self.admit()
