"""Choice of engines that can be freed late in a round, because what they still serve fits elsewhere (RollPacker, arXiv
2509.21009, section 4.4): a decision without a clock, with its reason. The engines of a whole round are chosen in
``sets``."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Decision

ROUNDING = 1e-9

RECENT_LENGTHS = 2048
"""Completions of one kind of round that are remembered: about what four rounds of 64 prompts and 8 samples keep."""


class FreeingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's constants, where it has them.

    ``window``: progress (finished share of the round) in which engines are freed, looked at again after each
    ``progress_step``. ``largest_share``: of the engines that may be freed. ``headroom``: share of a cache that a
    projection may fill (ours); ``length_quantile``: of the lengths that are still possible, for a lone request (ours).
    ``least_lengths``: fewer recorded lengths than this say nothing, and the cap is assumed (ours)."""

    window: tuple[float, float] = (0.2, 0.5)
    progress_step: float = 0.05
    largest_share: float = 0.5
    headroom: float = 0.9
    length_quantile: float = 0.9
    least_lengths: int = 20


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an engine still serves, in tokens. ``sampled``: all parts of its completion together."""

    request_id: str
    prompt: int
    sampled: int


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_tokens``: what its cache holds, in blocks of ``block_tokens``."""

    name: str
    kv_tokens: int
    max_num_seqs: int
    requests: tuple[OpenRequest, ...]
    block_tokens: int = 16


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Completion lengths of recent rounds of the same kind, ascending; ``cap``: longest possible. In tokens."""

    ascending: tuple[int, ...]
    cap: int

    def expected_ends(self, sampled: Sequence[int], settings: FreeingSettings) -> list[int]:
        """Lengths of completions on one engine that have ``sampled`` tokens now, to be reckoned with.

        One alone is taken to end at the quantile of what is still possible; of n the i-th at the quantile
        ``(i + length_quantile) / n``: that *all* of many become as long as one in ten does never happens."""
        return [
            self.expected_end(one, (place + settings.length_quantile) / len(sampled), settings.least_lengths)
            for place, one in enumerate(sampled)
        ]

    def expected_end(self, sampled: int, quantile: float, least_lengths: int) -> int:
        """Length that a completion with ``sampled`` tokens will not exceed, with the probability ``quantile``."""
        first = bisect_right(self.ascending, sampled)
        longer = len(self.ascending) - first
        if longer < least_lengths:
            return self.cap
        return min(self.ascending[first + min(int(quantile * longer + ROUNDING), longer - 1)], self.cap)


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a freed engine that is sampled on, from its tokens, by engine ``to``."""

    request_id: str
    to: str


class ReleasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """``free``: engines to drain, none for "not now"."""

    free: tuple[str, ...]
    because: Decision
    moves: tuple[Move, ...] = ()


class Freeing:
    """Follows the open round, and frees engines at most once in it. ``cap``: tokens of the longest completion."""

    def __init__(self, cap: int, *, settings: FreeingSettings = FreeingSettings()) -> None:  # noqa: B008 - frozen
        self.cap = cap
        self._settings = settings
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT_LENGTHS))
        self._open: set[TrajectoryId] = set()
        self._round_kind = ""
        self._launched = 0
        self._next_look = settings.window[0]
        self._freed = False

    def begin_round(self) -> None:
        """Start a round of which nothing is launched yet. Completions of the round before do not count any more."""
        self._open.clear()
        self._launched = 0
        self._next_look = self._settings.window[0]
        self._freed = False

    def launched(self, round_kind: str, ids: Sequence[TrajectoryId]) -> None:
        """Note trajectories of a round of that kind that were ordered."""
        self._round_kind = round_kind
        self._launched += len(ids)
        self._open.update(ids)

    def ended(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """Note one that came back, with a completion of so many tokens, or without one."""
        if trajectory in self._open:
            self._open.remove(trajectory)
            if tokens is not None:
                self._lengths[self._round_kind].append(tokens)

    @property
    def progress(self) -> float:
        """Finished share of what the round launched."""
        return (self._launched - len(self._open)) / max(self._launched, 1)

    @property
    def is_due(self) -> bool:
        """Return whether ``plan`` has something to decide: in the progress window, once for each step of progress, and
        where lengths of that kind of round are known."""
        known = len(self._lengths[self._round_kind]) >= self._settings.least_lengths
        return known and not self._freed and self._next_look <= self.progress <= self._settings.window[1]

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
    """Free as many engines as can be spared: at most the largest share, those with least to move first, in a round of
    which ``finished`` of ``launched`` are finished. Costs O(engines * requests * log(requests))."""
    progress = finished / max(launched, 1)
    # What is moved is prefilled again: the cheapest first.
    cheapest = sorted(engines, key=lambda engine: (_context(engine), engine.name))
    most = min(int(settings.largest_share * len(engines)), len(engines) - 1)
    for count in range(most, 0, -1):
        freed = cheapest[:count]
        remaining = cheapest[count:]
        placed = _place(freed, remaining, lengths, settings)
        if placed is not None:
            moves, peak_share = placed
            free = tuple(sorted(engine.name for engine in freed))
            reason = (
                f"{finished} of {launched} are finished ({progress:.0%}); {len(moves)} requests of"
                f" {', '.join(free)} fit on the {len(remaining)} that go on, which will be at most"
                f" {peak_share:.0%} full"
            )
            figures = {"progress": progress, "peak_share": peak_share, "moved": float(len(moves))}
            because = Decision(subject="engines_freed", reason=reason, figures=figures)
            return ReleasePlan(free=free, because=because, moves=moves)
    reason = f"at {progress:.0%} no engine can be spared: the caches of the others would be more than"
    because = Decision(
        subject="engines_freed", reason=f"{reason} {settings.headroom:.0%} full", figures={"progress": progress}
    )
    return ReleasePlan(free=(), because=because)


def projected_peak(requests: Sequence[OpenRequest], ends: Sequence[int], block_tokens: int = 1) -> int:
    """Most tokens that a KV cache of such blocks holds at once while ``requests`` run on to ``ends`` (lengths of their
    completions), all at the same pace. The worst time is just before one of them ends."""
    left = sorted(
        ((end - r.sampled, r.prompt + r.sampled) for r, end in zip(requests, ends, strict=True)), reverse=True
    )
    peak = 0
    context = 0
    for running, (steps, tokens) in enumerate(left, start=1):
        # Longest first: those seen so far run for at least ``steps`` more. The last block of each may be all but empty.
        context += tokens + block_tokens - 1
        peak = max(peak, context + running * max(steps, 0))
    return peak


def _place(
    freed: Sequence[ServingEngine], remaining: Sequence[ServingEngine], lengths: Lengths, settings: FreeingSettings
) -> tuple[tuple[Move, ...], float] | None:
    """Place the requests of ``freed``, with the use of the fullest cache; None where they do not fit. Largest first,
    each to the engine that is least full at the end; then every engine's peak is projected exactly."""
    served = {engine.name: list(engine.requests) for engine in remaining}
    rooms = {engine.name: engine for engine in remaining}
    ends = {
        r.request_id: lengths.expected_end(r.sampled, settings.length_quantile, settings.least_lengths)
        for e in (*freed, *remaining)
        for r in e.requests
    }

    def at_end(request: OpenRequest) -> int:
        return request.prompt + ends[request.request_id]

    filled = [(sum(map(at_end, e.requests)) / e.kv_tokens, e.name) for e in remaining]
    heapq.heapify(filled)
    moves: list[Move] = []
    for request in sorted((r for e in freed for r in e.requests), key=lambda r: (-at_end(r), r.request_id)):
        share, name = heapq.heappop(filled)
        served[name].append(request)
        moves.append(Move(request_id=request.request_id, to=name))
        heapq.heappush(filled, (share + at_end(request) / rooms[name].kv_tokens, name))
    peak_share = 0.0
    for name, requests in served.items():
        room = rooms[name]
        likely = lengths.expected_ends([r.sampled for r in requests], settings)
        share = projected_peak(requests, likely, room.block_tokens) / room.kv_tokens
        peak_share = max(peak_share, share)
        if share > settings.headroom or len(requests) > max(room.max_num_seqs, len(room.requests)):
            return None
    return tuple(moves), peak_share


def _context(engine: ServingEngine) -> int:
    return sum(request.prompt + request.sampled for request in engine.requests)
