"""Parallelism planning for the rollout, after RollPacker (arXiv 2509.21009, sections 4.2 and 4.4): pure decisions.

Between rounds: which prepared set of engines serves the next one (``plan_engine_set``). Late in a round: which engines
can be freed, because what they still serve fits elsewhere (``plan_release``). Every answer says why.

Where the paper is silent: preemptions are compared with the last round *of the same kind* (short rounds launch more
than long ones, so any other comparison fires at each change of kind); a step back must fit the KV use that was
measured; and a step back that failed doubles the patience before the next, so that a steady load settles.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from streamrl.control.actions import Explain
from streamrl.errors import RecipeError


class EngineSet(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use the devices of the rollout. ``kv_tokens``: tokens that the KV cache of *one* engine holds."""

    name: str
    engines: int
    tensor_parallel: int
    kv_tokens: int

    @property
    def capacity(self) -> int:
        """Tokens that all caches hold together: grows with the tensor-parallel size, since weights are stored once."""
        return self.engines * self.kv_tokens


class PlanningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The paper's constants, where it has them.

    ``rise``: preemptions above this multiple of the last round's ask for a larger set; ``quiet_rounds``: so many rounds
    without one allow a smaller. ``window``: progress (finished share of the round) in which engines are freed, looked
    at again after each ``progress_step``. ``largest_share``: of the engines that may be freed. ``headroom``: share of
    a cache that a projection may fill (ours); ``length_quantile``: of the lengths that are still possible (ours).
    ``least_lengths``: fewer recorded lengths than this say nothing, and the cap is assumed (ours).
    """

    rise: float = 1.05
    quiet_rounds: int = 4
    window: tuple[float, float] = (0.2, 0.5)
    progress_step: float = 0.05
    largest_share: float = 0.5
    headroom: float = 0.9
    length_quantile: float = 0.9
    least_lengths: int = 20


# ---- between rounds: which set ---------------------------------------------------------------------


class KindHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one kind of round. ``quiet``: rounds in a row without preemption on the set in use;
    ``patience``: how many of them allow a smaller set; ``stepped_back``: the set in use was reached by such a step."""

    engine_set: str
    preemptions: int = 0
    quiet: int = 0
    patience: int = 0
    stepped_back: bool = False


class RoundMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """One finished round. ``kv_usage``: largest share of an engine's KV cache in use."""

    round_kind: str
    preemptions: int
    kv_usage: float


class SetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``engine_set`` serves the next round of that kind; ``history`` goes into the next call (and the checkpoint).
    ``because`` is None where nothing changes."""

    engine_set: str
    history: dict[str, KindHistory]
    because: Explain | None = None


def check_engine_sets(sets: Sequence[EngineSet]) -> None:
    """Raises ``RecipeError`` unless ``sets`` is ordered by rising capacity and its names differ."""
    if not sets:
        raise RecipeError(["parallelism planning needs at least one set of engines"])
    if len({one.name for one in sets}) < len(sets):
        raise RecipeError([f"sets of engines share a name: {', '.join(one.name for one in sets)}"])
    for smaller, larger in itertools.pairwise(sets):
        if larger.capacity <= smaller.capacity:
            problem = (
                f"engine set {larger.name} holds {larger.capacity} tokens, {smaller.name} before it"
                f" {smaller.capacity}; order the sets by rising capacity and leave out those that hold no more"
            )
            raise RecipeError([problem])


def plan_engine_set(
    sets: Sequence[EngineSet],
    history: Mapping[str, KindHistory],
    measured: RoundMeasured,
    settings: PlanningSettings = PlanningSettings(),  # noqa: B008 - frozen
) -> SetPlan:
    """The set for the next round of the kind that was measured. A kind that is new to ``history`` begins on the first.

    Raises ``RecipeError`` when ``history`` names a set that is not in ``sets`` (``check_engine_sets`` checks the rest).
    """
    before = history.get(measured.round_kind)
    last = before or KindHistory(engine_set=sets[0].name, patience=settings.quiet_rounds)
    at = _position(sets, last.engine_set)
    quiet = last.quiet + 1 if measured.preemptions == 0 else 0
    kept = msgspec.structs.replace(last, preemptions=measured.preemptions, quiet=quiet)
    figures = {
        "preemptions": float(measured.preemptions),
        "preemptions_before": float(last.preemptions),
        "kv_usage": measured.kv_usage,
        "quiet_rounds": float(quiet),
    }
    rose = before is not None and measured.preemptions > settings.rise * last.preemptions
    if rose and at + 1 < len(sets):
        # Back where the step came from: it was taken too early, so the next one waits twice as long.
        patience = 2 * last.patience if last.stepped_back else last.patience
        chosen = sets[at + 1].name
        now = msgspec.structs.replace(kept, engine_set=chosen, quiet=0, patience=patience, stepped_back=False)
        reason = (
            f"{measured.round_kind} rounds: preemptions rose from {last.preemptions} to {measured.preemptions}, above"
            f" {settings.rise:g} times those of the last such round; more KV cache in set {chosen}"
        )
        return _set_plan(history, measured.round_kind, now, reason, figures)
    if quiet >= last.patience and at > 0:
        share = measured.kv_usage * sets[at].capacity / sets[at - 1].capacity
        if share <= settings.headroom:
            chosen = sets[at - 1].name
            now = msgspec.structs.replace(kept, engine_set=chosen, quiet=0, stepped_back=True)
            reason = (
                f"{measured.round_kind} rounds: none of the last {quiet} preempted, and set {chosen} would be"
                f" {share:.0%} full at the peak"
            )
            return _set_plan(history, measured.round_kind, now, reason, figures | {"kv_usage_expected": share})
    return SetPlan(engine_set=last.engine_set, history={**history, measured.round_kind: kept})


def _set_plan(
    history: Mapping[str, KindHistory], kind: str, now: KindHistory, reason: str, figures: dict[str, float]
) -> SetPlan:
    because = Explain(subject="engine_set", reason=reason, figures=figures)
    return SetPlan(engine_set=now.engine_set, history={**history, kind: now}, because=because)


def _position(sets: Sequence[EngineSet], name: str) -> int:
    for index, one in enumerate(sets):
        if one.name == name:
            return index
    raise RecipeError([f"engine set {name!r} is not among {', '.join(one.name for one in sets)}"])


# ---- late in a round: which engines to free -----------------------------------------------------------


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
    max_running: int
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

    def expected_end(self, sampled: int, settings: PlanningSettings) -> int:
        """Length that a completion with ``sampled`` tokens will not exceed, with the probability of the quantile."""
        first = bisect_right(self.ascending, sampled)
        longer = len(self.ascending) - first
        if longer < settings.least_lengths:
            return self.cap
        quantile = self.ascending[first + min(int(settings.length_quantile * longer), longer - 1)]
        return min(quantile, self.cap)


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
    ends = {r.request_id: lengths.expected_end(r.sampled, settings) for e in (*freed, *remaining) for r in e.requests}

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
        share = projected_peak(requests, [ends[r.request_id] for r in requests], room.block_tokens) / room.kv_tokens
        peak_share = max(peak_share, share)
        if share > settings.headroom or len(requests) > max(room.max_running, len(room.requests)):
            return None
    return tuple(moves), peak_share


def _context(engine: ServingEngine) -> int:
    return sum(request.prompt + request.sampled for request in engine.requests)
