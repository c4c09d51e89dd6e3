"""Choice of engines that can be freed late in a round, since the remaining requests fit on the other engines
(RollPacker, arXiv 2509.21009, section 4.4). The decisions use no clock, and have a reason.

``elastic_engines`` (controller) and ``streamrl simulate`` (the command's own process) follow the rounds with
``Freeing``. The engines of a full round are chosen in ``engine_sets``."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from heapq import heappop, heappush

from msgspec import Struct

from streamrl.base.types import Texts, TrajectoryId
from streamrl.control.actions import Decision

ROUNDING = 1e-9

RECENT_LENGTHS = 2048
"""Number of stored lengths for each kind of round: about four rounds of 64 prompts and 8 samples."""


class FreeingSettings(Struct, frozen=True, kw_only=True):
    """Constants: the paper's, and our own ones where the paper has none.

    ``window``: progress (finished share of the round) between which engines are freed
    ``progress_step``: progress after which the choice is made again
    ``largest_share``: largest share of the engines that may be freed
    ``headroom``: share of a KV cache that a projection may fill (ours)
    ``length_quantile``: quantile of the possible lengths that is assumed for a lone request (ours)
    ``least_lengths``: number of stored lengths below which the longest length is assumed (ours)"""

    window: tuple[float, float] = (0.2, 0.5)
    progress_step: float = 0.05
    largest_share: float = 0.5
    headroom: float = 0.9
    length_quantile: float = 0.9
    least_lengths: int = 20


class OpenRequest(Struct, frozen=True, kw_only=True):
    """A request that an engine serves. ``prompt``, ``sampled``: tokens of the prompt, and of all parts of its
    completion so far."""

    request_id: str
    prompt: int
    sampled: int


class ServingEngine(Struct, frozen=True, kw_only=True):
    """An engine with its open requests. ``kv_tokens``: capacity of its KV cache, in blocks of ``block_tokens``."""

    name: str
    kv_tokens: int
    max_num_seqs: int
    requests: tuple[OpenRequest, ...]
    block_tokens: int = 16


class Lengths(Struct, frozen=True, kw_only=True):
    """Completion lengths of recent rounds of the same kind, in tokens, in ascending order. ``cap``: longest possible
    length."""

    ascending: tuple[int, ...]
    cap: int

    def expected_ends(self, sampled: Sequence[int], settings: FreeingSettings) -> list[int]:
        """Return the lengths to assume for completions on one engine that have ``sampled`` tokens now.

        A lone completion ends at the quantile ``length_quantile`` of the possible lengths, the i-th of n completions at
        the quantile ``(i + length_quantile) / n``: many completions do *all* not become as long as one in ten does."""
        return [
            self.expected_end(tokens, (place + settings.length_quantile) / len(sampled), settings.least_lengths)
            for place, tokens in enumerate(sampled)
        ]

    def expected_end(self, sampled: int, quantile: float, least_lengths: int) -> int:
        """Return the length that a completion with ``sampled`` tokens does not exceed with probability ``quantile``."""
        first = bisect_right(self.ascending, sampled)
        longer = len(self.ascending) - first
        if longer < least_lengths:
            return self.cap
        position = first + min(int(quantile * longer + ROUNDING), longer - 1)
        return min(self.ascending[position], self.cap)


class Move(Struct, frozen=True, kw_only=True):
    """A request of a freed engine that the engine ``to`` continues from its tokens."""

    request_id: str
    to: str


class ReleasePlan(Struct, frozen=True, kw_only=True):
    """``free``: engines to drain (empty: no engine now); ``because``: the decision with its reason."""

    free: Texts
    because: Decision
    moves: tuple[Move, ...] = ()


class Freeing:
    """Follows the open round, and plans the freeing of engines, at most once a round. ``cap``: tokens of the longest
    completion."""

    def __init__(self, cap: int, *, settings: FreeingSettings = FreeingSettings()) -> None:  # noqa: B008 - frozen
        self.cap = cap
        self._settings = settings
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT_LENGTHS))
        self._open: set[TrajectoryId] = set()
        self._round_kind = ""
        self.begin_round()

    def begin_round(self) -> None:
        """Begin a round. Later completions of the round before do not count."""
        self._open.clear()
        self._launched = 0
        self._next_look = self._settings.window[0]
        self._freed = False

    def note_launch(self, round_kind: str, ids: Sequence[TrajectoryId]) -> None:
        """Note trajectories that were launched in the open round, which is of ``round_kind``."""
        self._round_kind = round_kind
        self._launched += len(ids)
        self._open.update(ids)

    def note_end(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """Note a trajectory that has ended. ``tokens``: length of its completion (None: it has none)."""
        if trajectory in self._open:
            self._open.remove(trajectory)
            if tokens is not None:
                self._lengths[self._round_kind].append(tokens)

    @property
    def progress(self) -> float:
        """Finished share of the trajectories that the round launched."""
        return (self._launched - len(self._open)) / max(self._launched, 1)

    @property
    def is_due(self) -> bool:
        """Return whether ``plan`` should be called: within the progress window, once for each step of progress, and
        with enough lengths of this kind of round."""
        if self._freed or len(self._lengths[self._round_kind]) < self._settings.least_lengths:
            return False
        return self._next_look <= self.progress <= self._settings.window[1]

    def plan(self, engines: Sequence[ServingEngine]) -> ReleasePlan:
        """Decide which of ``engines`` to free now."""
        self._next_look = self.progress + self._settings.progress_step
        lengths = Lengths(ascending=tuple(sorted(self._lengths[self._round_kind])), cap=self.cap)
        finished = self._launched - len(self._open)
        plan = plan_release(finished, self._launched, engines, lengths, self._settings)
        self._freed = bool(plan.free)
        return plan


def plan_release(
    finished: int,
    launched: int,
    engines: Sequence[ServingEngine],
    lengths: Lengths,
    settings: FreeingSettings = FreeingSettings(),  # noqa: B008 - frozen
) -> ReleasePlan:
    """Plan to free as many engines as possible, up to the largest share, those with the fewest tokens to move first.
    Costs O(engines * requests * log(requests)).

    ``finished``, ``launched``: number of trajectories of the round"""
    progress = finished / max(launched, 1)
    # Moved requests are prefilled again: begin with the engines whose requests have the fewest tokens.
    cheapest = sorted(engines, key=lambda engine: (_context_tokens(engine), engine.name))
    largest_count = min(int(settings.largest_share * len(engines)), len(engines) - 1)
    for count in range(largest_count, 0, -1):
        freed = cheapest[:count]
        remaining = cheapest[count:]
        placement = _place(freed, remaining, lengths, settings)
        if placement is not None:
            moves, peak_share = placement
            free = tuple(sorted(engine.name for engine in freed))
            reason = (
                f"{finished} of {launched} are finished ({progress:.0%}); {len(moves)} requests of"
                f" {', '.join(free)} fit on the {len(remaining)} that go on, which will be at most"
                f" {peak_share:.0%} full"
            )
            figures = {"progress": progress, "peak_share": peak_share, "moved": float(len(moves))}
            because = Decision(subject="engines_freed", reason=reason, figures=figures)
            return ReleasePlan(free=free, because=because, moves=moves)
    reason = (
        f"at {progress:.0%} no engine can be spared: the caches of the others would be more than"
        f" {settings.headroom:.0%} full"
    )
    because = Decision(subject="engines_freed", reason=reason, figures={"progress": progress})
    return ReleasePlan(free=(), because=because)


def projected_peak(requests: Sequence[OpenRequest], ends: Sequence[int], block_tokens: int = 1) -> int:
    """Return the largest number of tokens in a KV cache while ``requests`` run on to ``ends``, the lengths of their
    completions, all at the same pace. The largest number occurs just before the end of one of them."""
    remaining = []
    for request, end in zip(requests, ends, strict=True):
        steps = end - request.sampled
        tokens = request.prompt + request.sampled
        remaining.append((steps, tokens))
    remaining.sort(reverse=True)
    peak = 0
    context = 0
    # The request with the most remaining steps comes first: all requests up to this one run for ``steps`` more steps.
    for running, (steps, tokens) in enumerate(remaining, start=1):
        context += tokens + block_tokens - 1  # the last block may have a single token
        peak = max(peak, context + running * max(steps, 0))
    return peak


def _place(
    freed: Sequence[ServingEngine], remaining: Sequence[ServingEngine], lengths: Lengths, settings: FreeingSettings
) -> tuple[tuple[Move, ...], float] | None:
    """Place the requests of ``freed`` on the ``remaining`` engines. Returns the moves and the peak share of the fullest
    cache; None if the requests do not fit.

    The largest requests come first, and each goes to the engine that will be least full at the end. Then the peak of
    every engine is projected exactly."""
    moving = [request for engine in freed for request in engine.requests]
    staying = [request for engine in remaining for request in engine.requests]
    ends = {
        request.request_id: lengths.expected_end(request.sampled, settings.length_quantile, settings.least_lengths)
        for request in (*moving, *staying)
    }

    def final_tokens(request: OpenRequest) -> int:
        return request.prompt + ends[request.request_id]

    fullness = [(sum(map(final_tokens, engine.requests)) / engine.kv_tokens, engine.name) for engine in remaining]
    heapq.heapify(fullness)
    engines = {engine.name: engine for engine in remaining}
    requests_on = {engine.name: list(engine.requests) for engine in remaining}
    moves: list[Move] = []
    for request in sorted(moving, key=lambda request: (-final_tokens(request), request.request_id)):
        share, name = heappop(fullness)
        requests_on[name].append(request)
        moves.append(Move(request_id=request.request_id, to=name))
        heappush(fullness, (share + final_tokens(request) / engines[name].kv_tokens, name))
    peak_share = 0.0
    for name, requests in requests_on.items():
        engine = engines[name]
        expected_ends = lengths.expected_ends([request.sampled for request in requests], settings)
        share = projected_peak(requests, expected_ends, engine.block_tokens) / engine.kv_tokens
        peak_share = max(peak_share, share)
        if share > settings.headroom or len(requests) > max(engine.max_num_seqs, len(engine.requests)):
            return None
    return tuple(moves), peak_share


def _context_tokens(engine: ServingEngine) -> int:
    return sum(request.prompt + request.sampled for request in engine.requests)
