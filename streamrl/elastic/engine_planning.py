"""Which engines can be freed late in a round, because what they still serve fits elsewhere (RollPacker, arXiv
2509.21009, section 4.4): a pure decision, which says why. Which engines serve a round at all is decided by
``engine_sets``.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from streamrl.control.actions import Explain

ROUNDING = 1e-9


class PlanningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's constants, where it has them.

    ``window``: progress (finished share of the round) in which engines are freed, looked at again after each
    ``progress_step``. ``largest_share``: of the engines that may be freed. ``headroom``: share of a cache that a
    projection may fill (ours); ``length_quantile``: of the lengths that are still possible, for a lone request (ours).
    ``least_lengths``: fewer recorded lengths than this say nothing, and the cap is assumed (ours).
    """

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
    """``kv_tokens``: what its cache holds, in blocks of ``block_tokens``. ``unit``: engines of one unit are freed
    together (they share a training replica's devices); empty: it stands alone."""

    name: str
    kv_tokens: int
    max_num_seqs: int
    requests: tuple[OpenRequest, ...]
    block_tokens: int = 16
    unit: str = ""


class RoundProgress(msgspec.Struct, frozen=True, kw_only=True):
    """An open round. ``looked_at``: progress at the last ``plan_release`` that looked (-1: none); ``freed``: engines
    were freed in this round already, and one time is all there is."""

    round_kind: str
    finished: int
    launched: int
    engines: tuple[ServingEngine, ...]
    looked_at: float = -1.0
    freed: bool = False

    @property
    def progress(self) -> float:
        """Finished share of what the round launched."""
        return self.finished / max(self.launched, 1)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Completion lengths of recent rounds of the same kind, ascending; ``cap``: longest possible. In tokens."""

    ascending: tuple[int, ...]
    cap: int

    def expected_ends(self, sampled: Sequence[int], settings: PlanningSettings) -> list[int]:
        """Lengths of completions on one engine that have ``sampled`` tokens now, to be reckoned with.

        One alone is taken to end at the quantile of what is still possible; of n the i-th at the quantile
        ``(i + length_quantile) / n``: that *all* of many become as long as one in ten does never happens.
        """
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
    """A request of a freed engine that goes on, from its tokens, on engine ``to``."""

    request_id: str
    to: str


class ReleasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """``free``: engines to drain, none for "not now". ``looked``: hand the progress in as ``looked_at`` next time.
    ``peak_share``: fullest cache of those that remain, as projected."""

    free: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    peak_share: float = 0.0
    looked: bool = False
    because: Explain | None = None


def plan_release(
    round_now: RoundProgress,
    lengths: Lengths,
    settings: PlanningSettings = PlanningSettings(),  # noqa: B008 - frozen
) -> ReleasePlan:
    """Free as many engines as can be spared: whole units, at most the largest share, those with least to move first.

    Nothing outside of the progress window, before the progress has grown by a step, twice in a round, or without
    lengths of that kind of round. Costs O(units * requests * log(requests)).
    """
    progress = round_now.progress
    low, high = settings.window
    too_soon = round_now.looked_at >= 0 and progress < round_now.looked_at + settings.progress_step
    if round_now.freed or too_soon or not low <= progress <= high or len(lengths.ascending) < settings.least_lengths:
        return ReleasePlan()
    units: dict[str, list[ServingEngine]] = {}
    for engine in round_now.engines:
        units.setdefault(engine.unit or engine.name, []).append(engine)
    # What is moved is prefilled again: the cheapest first.
    cheapest = sorted(units.values(), key=lambda unit: (sum(_context(engine) for engine in unit), unit[0].name))
    most = int(settings.largest_share * len(round_now.engines))
    for count in range(len(cheapest) - 1, 0, -1):
        freed = [engine for unit in cheapest[:count] for engine in unit]
        if len(freed) > most:
            continue
        names = {engine.name for engine in freed}
        remaining = [engine for engine in round_now.engines if engine.name not in names]
        placed = _place(freed, remaining, lengths, settings)
        if placed is not None:
            moves, peak_share = placed
            reason = (
                f"{round_now.finished} of {round_now.launched} are finished ({progress:.0%}); {len(moves)} requests of"
                f" {', '.join(sorted(names))} fit on the {len(remaining)} that go on, which will be at most"
                f" {peak_share:.0%} full"
            )
            figures = {"progress": progress, "peak_share": peak_share, "moved": float(len(moves))}
            because = Explain(subject="engines_freed", reason=reason, figures=figures)
            return ReleasePlan(
                free=tuple(sorted(names)), moves=moves, peak_share=peak_share, looked=True, because=because
            )
    reason = f"at {progress:.0%} no engine can be spared: the caches of the others would be more than"
    because = Explain(
        subject="engines_freed", reason=f"{reason} {settings.headroom:.0%} full", figures={"progress": progress}
    )
    return ReleasePlan(looked=True, because=because)


def projected_peak(requests: Sequence[OpenRequest], ends: Sequence[int], block_tokens: int = 1) -> int:
    """Most tokens that a KV cache of such blocks holds at once while ``requests`` run on to ``ends`` (lengths of their
    completions), all at the same pace. The worst time is just before one of them ends."""
    left = sorted(
        ((end - r.sampled, r.prompt + r.sampled) for r, end in zip(requests, ends, strict=True)), reverse=True
    )
    peak = context = 0
    for running, (steps, tokens) in enumerate(left, start=1):
        # Longest first: those seen so far run for at least ``steps`` more. The last block of each may be all but empty.
        context += tokens + block_tokens - 1
        peak = max(peak, context + running * max(steps, 0))
    return peak


def _place(
    freed: Sequence[ServingEngine], remaining: Sequence[ServingEngine], lengths: Lengths, settings: PlanningSettings
) -> tuple[tuple[Move, ...], float] | None:
    """Where the requests of ``freed`` go, and how full the fullest cache becomes; None where they do not fit.

    Largest first, each to the engine that is least full at the end; then every engine's peak is projected exactly.
    """
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
