"""One simulated engine, whose clock jumps from event to event without a loop over tokens. ``rollout`` drives the
engines.

All running requests decode together, so an engine has one clock, which counts decode steps. A step with ``b`` running
requests and ``K`` tokens of context takes ``a + c b + g K`` seconds, and ``K`` grows by ``b``. So ``n`` steps take
``n (a + c b + g K) + g b n^2 / 2``. A request costs one or two operations on a heap."""

from __future__ import annotations

import heapq
import math
from collections import deque

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.types import TrajectoryId
from streamrl.engines.step_cost import StepCost
from streamrl.simulate.lengths import Turns

NEVER = math.inf
ROUNDING = 1e-6  # tokens; the clock is this exact after hours of virtual time


class EngineModel(StepCost, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of an engine: a decode step (``StepCost``), and these, in seconds and tokens.

    ``max_num_seqs``: requests that run at once;
    ``kv_tokens``: KV capacity (0: no limit), beyond which the newest request is preempted and computed again;
    ``prefill_tokens_s``: rate of prefill (0: no cost), where siblings on one engine share their prompt;
    ``arrival_s``: interval at which the front end takes requests;
    ``admission_s``, ``admission_per_running_s``: time for which the admission of a request holds up decoding, constant
      and for each running request;
    ``presubmitted_s``: the same time for a request that came while the engine was paused;
    ``rejected_per_token``: probability, where deferred prompts are verified, that the weights of the long round choose
      another token than the recorded one (assumed);
    ``prefix_cache``: whether a later turn on the same engine under the same weights prefills only the appended tokens,
      and not the full context."""

    max_num_seqs: int = 256
    kv_tokens: int = 0
    prefill_tokens_s: float = 0.0
    arrival_s: float = 0.0
    admission_s: float = 0.0
    admission_per_running_s: float = 0.0
    presubmitted_s: float = 0.0
    rejected_per_token: float = 0.001
    prefix_cache: bool = True


class Request(Struct, eq=False):
    """One trajectory that has not ended.

    ``prompt``: number of its prompt;
    ``length``: sampled tokens at the end of its current turn;
    ``launched_s``: time of its launch;
    ``sampled``: sampled tokens when it began to run, or was stopped (with fractions, since the clock stops anywhere);
    ``start``: clock of the engine when it began to run;
    ``attempt_serial``: number of its last admission;
    ``engine``: number of its engine, -1 for none;
    ``stopped``: whether it was cancelled or paused;
    ``paused_arrival``: whether it came to a paused engine;
    ``seed_base``: number of its group, from which the seeds of its completions are made;
    ``verified``: whether it begins with tokens of an earlier attempt;
    ``turns``: remaining turns;
    ``appended``: tokens of its environment so far;
    ``environment_s``: seconds in its environment;
    ``sampling_s``: seconds from launch to end, without ``environment_s``."""

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
    seed_base: int = -1
    verified: bool = False
    turns: Turns = ()
    appended: int = 0
    environment_s: float = 0.0
    sampling_s: float = 0.0

    def __post_init__(self) -> None:
        self.request_id = str(self.id)

    def next_turn(self, factor: float) -> float:
        """Begin the next turn. Returns the seconds of its environment before the turn, multiplied by ``factor``."""
        appended, seconds, tokens, _ = self.turns[0]
        self.turns = self.turns[1:]
        self.appended += appended
        self.length = int(self.sampled) + tokens
        self.environment_s += seconds * factor
        return seconds * factor

    def again(self) -> Request:
        """Copy for another submission with the same tokens. The original may still be in the queue of an engine."""
        return replace(self, stopped=False, verified=False, engine=-1)


class RunningTogether:
    """Number of requests that run on all engines. ``capacity``: largest number that counts; ``busy_s``: integral of the
    number over time."""

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
        """Integrate until ``now``."""
        if now > self._since:
            self.busy_s += min(self._running, self.capacity) * (now - self._since)
            self._since = now


class EngineClock:
    """One engine. Times never go back. Call ``advance`` before a change and ``next_event`` after it. ``together``:
    counter of the running requests of all engines."""

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
        last_time = self.time
        self.time = max(now, self.time)
        running = len(self.running)
        if not running or now <= last_time:
            return
        decoding_s = now - max(last_time, self.blocked_until)
        if self.paused or decoding_s <= 0:
            return
        step_s = self._step_s()
        growth = self.model.per_context_token_s * running * self.slowdown
        if growth:
            steps = (math.sqrt(step_s * step_s + 2 * growth * decoding_s) - step_s) / growth
        else:
            steps = decoding_s / step_s
        self.clock += steps
        self.steps += steps
        self.decoding_s += decoding_s
        self.context += steps * running
        self.held_kv += steps * running
        self.generated += steps * running

    def next_event(self) -> float:
        """Time at which the next request finishes or the KV cache is full; ``NEVER`` when no request runs."""
        finishing = self._finishing
        while finishing and not _is_current(finishing[0]):
            heapq.heappop(finishing)
        if self.paused or not finishing:
            return NEVER
        running = len(self.running)
        finish, _, _ = finishing[0]
        steps = max(finish - self.clock, 0.0)
        if self.model.kv_tokens and running > 1:
            steps = min(steps, max(self.model.kv_tokens - self.held_kv, 0.0) / running)
        growth = self.model.per_context_token_s * running * self.slowdown
        seconds = steps * self._step_s() + growth * steps * steps / 2
        return max(self.time, self.blocked_until) + seconds

    def finished(self, now: float) -> list[Request]:
        """Decode until ``now``, the time of ``next_event``, and admit waiting requests. Returns the requests that
        finished."""
        self.advance(now)
        finished_requests: list[Request] = []
        finishing = self._finishing
        while finishing and finishing[0][0] <= self.clock + ROUNDING:
            entry = heapq.heappop(finishing)
            if not _is_current(entry):
                continue
            request = entry[2]
            self._leave(request)
            request.sampled = request.length
            if request.turns:
                self.keep_context(request)
            finished_requests.append(request)
        if not finished_requests:
            self._preempt_when_full()
        self.admit()
        return finished_requests

    def keep_context(self, request: Request) -> None:
        """Keep the context of ``request``, which leaves the engine for a while, until running requests need its
        room."""
        if self.model.prefix_cache:
            self._cached[request.id] = self.sampled_by_now(request) + request.appended

    def _evict(self) -> None:
        """Remove contexts of requests that have left, the oldest first, until all others fit into the KV cache."""
        if not self.model.kv_tokens:
            return
        room = self.model.kv_tokens - self.held_kv
        excess = sum(self._cached.values()) - room
        while excess > 0 and self._cached:
            excess -= self._cached.pop(next(iter(self._cached)))

    def sampled_by_now(self, request: Request) -> int:
        """Number of complete tokens that ``request`` has at the engine's time."""
        sampled = request.sampled
        if request.running:
            sampled += self.clock - request.start
        return int(sampled)

    def submit(self, request: Request) -> None:
        """Queue a request that has reached the engine. ``admit`` lets it run."""
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
                needed = request.sampled + request.appended + 1
                if request.id.group_id not in self._prefixes:
                    needed += request.prompt_tokens
                if self.held_kv + needed > model.kv_tokens:
                    return
            waiting.popleft()
            self._enter(request)

    def _enter(self, request: Request) -> None:
        model = self.model
        self._evict()
        if not self.running:
            # An idle engine starts from exact zeros, so that rounding errors never accumulate.
            self.clock = 0.0
            self.context = 0.0
            self.held_kv = 0.0
            self._finishing.clear()
            self._prefixes.clear()
        group = request.id.group_id
        siblings = self._prefixes.get(group, 0)
        self._prefixes[group] = siblings + 1
        after_prompt = request.sampled + request.appended
        new_kv = after_prompt if siblings else after_prompt + request.prompt_tokens
        if request.paused_arrival:
            held_up_s = model.presubmitted_s
        else:
            held_up_s = model.admission_s + model.admission_per_running_s * len(self.running)
        if request.verified:
            held_up_s *= 2  # a second request verifies the tokens
        if model.prefill_tokens_s:
            cached = self._cached.pop(request.id, 0.0)
            prefilled = after_prompt - cached if cached else new_kv
            held_up_s += prefilled / model.prefill_tokens_s
        if held_up_s:
            self.blocked_until = max(self.blocked_until, self.time) + held_up_s
        self._serial += 1
        request.attempt_serial = self._serial
        request.running = True
        request.start = self.clock
        self.running[request] = None
        self._together.change(self.time, 1)
        self.context += request.prompt_tokens + after_prompt
        self.held_kv += new_kv
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
        siblings = self._prefixes[group] - 1
        if siblings:
            self._prefixes[group] = siblings
        else:
            del self._prefixes[group]
            self.held_kv -= request.prompt_tokens
        request.sampled = min(request.sampled + decoded, request.length)

    def stop(self, request: Request) -> None:
        """Stop one request at the engine's time; its ``sampled`` tokens are final then."""
        if request.running:
            self._leave(request)

    def _preempt_when_full(self) -> None:
        """Preempt the newest request while the KV cache is full; it is computed again when there is room, as in
        vLLM."""
        while self.model.kv_tokens and len(self.running) > 1 and self.held_kv >= self.model.kv_tokens - ROUNDING:
            request = next(reversed(self.running))
            self._leave(request)
            request.paused_arrival = False
            self.waiting.appendleft(request)
            self.preemptions += 1

    def pause(self, now: float) -> None:
        """Pause all requests until ``resume``."""
        self.advance(now)
        if not self.paused:
            self._held_up_s = max(self.blocked_until - now, 0.0)
        self.paused = True

    def resume(self, now: float, *, recompute: bool = False) -> None:
        """Resume all requests. ``recompute``: whether their KV is computed again under the new weights."""
        self.advance(now)
        self._cached.clear()
        self.paused = False
        # The pause interrupted admissions, which still hold up decoding, unless their requests have left.
        held_up_s = self._held_up_s if self.running else 0.0
        if recompute and self.model.prefill_tokens_s:
            held_up_s = max(held_up_s, self.held_kv / self.model.prefill_tokens_s)
        self.blocked_until = now + held_up_s
        self.admit()


def _is_current(entry: tuple[float, int, Request]) -> bool:
    """Return whether ``entry`` of the heap of finishing requests is of a request's current admission."""
    _, serial, request = entry
    return request.running and request.attempt_serial == serial
