"""The tables of a chaos campaign."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from campaigns.chaos.chaos_plan import Method, Phase, Shot
from campaigns.chaos.chaos_run import CellResult, ShotResult


def read_results(folder: Path) -> list[CellResult]:
    """All cells that were run."""
    return [msgspec.json.decode(path.read_bytes(), type=CellResult) for path in sorted(folder.glob("*-*.json"))]


def report(results: Sequence[CellResult]) -> list[str]:
    """One part for each kind of engines."""
    lines: list[str] = []
    for engines in sorted({result.cell.engines for result in results}):
        chosen = [result for result in results if result.cell.engines == engines]
        shots = [shot for result in chosen for shot in result.shots]
        lines += [*_counts(engines, chosen, shots), "", *_by_victim(shots), "", *_totals(chosen), ""]
    return lines


def _counts(engines: str, results: Sequence[CellResult], shots: Sequence[ShotResult]) -> list[str]:
    outcomes = Counter(shot.outcome for shot in shots)
    hits = [shot for shot in shots if shot.outcome != "vacuous"]
    phases = Counter(shot.shot.phase.value for shot in hits)
    methods = Counter(shot.shot.method.value for shot in hits)
    together = sum(len(shot.shot.victims) > 1 for shot in hits)
    head = f"{engines} engines: {len(results)} runs, {len(hits)} shots that hit ({together} at two at once)"
    return [
        f"{head}, {outcomes['vacuous']} vacuous",
        "  " + ", ".join(f"{count} {name}" for name, count in outcomes.most_common()),
        "  by phase: " + ", ".join(f"{name} {count}" for name, count in phases.most_common()),
        "  by method: " + ", ".join(f"{name} {count}" for name, count in methods.most_common()),
    ]


def _by_victim(shots: Sequence[ShotResult]) -> list[str]:
    """Recovery times: of what died until it works again; of the whole run from the resume command to its first step."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, list[float]] = defaultdict(list)
    for shot in shots:
        together = _circumstances(shot.shot)
        for victim in shot.shot.victims:
            outcomes[_component(victim) + together][shot.outcome] += 1
        for victim, taken in shot.recovery_s.items():
            if shot.shot.method is not Method.STOP_RESUME:
                seconds["streamrl resume" if victim == "resume" else _component(victim) + together].append(taken)
        if shot.step_s and shot.outcome == "recovered":
            seconds["(until the next step)"].append(shot.step_s)
    lines = [
        "| died | shots | recovered | resumed | not | P50 s | P99 s | max s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for victim in sorted({*outcomes, *seconds}):
        counts = outcomes[victim]
        not_ = counts["ended"] + counts["stuck"]
        hits = counts.total() - counts["vacuous"]
        row = [hits, counts["recovered"], counts["resumed"], not_] if victim in outcomes else ["-"] * 4
        lines.append(f"| {victim} | " + " | ".join(map(str, [*row, *_quantiles(seconds[victim])])) + " |")
    return lines


def _circumstances(shot: Shot) -> str:
    """Without a trainer nobody gets work: who died beside one, or as a run starts, works when it has loaded."""
    if shot.phase is Phase.START or (len(shot.victims) > 1 and any(_component(v) == "trainer" for v in shot.victims)):
        return " (no trainer yet)"
    return " (two at once)" if len(shot.victims) > 1 else ""


def _quantiles(seconds: Sequence[float]) -> list[str]:
    """Median, 99th percentile, maximum."""
    if not seconds:
        return ["-"] * 3
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return [f"{figure:.2f}" for figure in (statistics.median(ordered), p99, ordered[-1])]


def _totals(results: Sequence[CellResult]) -> list[str]:
    verdicts = [result.verdict for result in results]
    work = f"{sum(v.steps for v in verdicts)} steps, {sum(v.groups for v in verdicts)} groups trained"
    scored = f"{sum(v.scored for v in verdicts)} scored ({sum(v.scored_again for v in verdicts)} of them again)"
    if calls := sum(v.calls for v in verdicts):
        scored += f", {calls} calls of tools ({sum(v.called_again for v in verdicts)} of them again)"
    rounding = f"{sum(v.other_rounding for v in verdicts)} of them with another rounding"
    again = f"{sum(v.retrained for v in verdicts)} steps trained again ({rounding})"
    again += f", {sum(v.commits for v in verdicts)} commits"
    wrong = f"lost {sum(v.lost for v in verdicts)}, trained twice {sum(v.twice for v in verdicts)}"
    lines = [f"{work}, {scored}, {again}"]
    lines += [f"{wrong}, runs with a fault {sum(bool(r.faults) for r in results)} of {len(results)}"]
    lines += [f"socket directories left for streamrl resume: {sum(r.for_clean for r in results)}"]
    for name, killed in (("killed", True), ("not killed", False)):
        found = [r.accuracy for r in results if r.accuracy is not None and bool(r.shots) is killed]
        if found:
            bounds = f"lowest {min(found):.3f}, highest {max(found):.3f}, {len(found)} runs"
            lines.append(f"accuracy, {name}: {statistics.mean(found):.3f} ({bounds})")
    kinds = Counter(_kind_of(fault) for result in results for fault in result.faults)
    return [*lines, *(f"  {count} x {fault}" for fault, count in kinds.most_common(25))]


def _component(victim: str) -> str:
    """``engine-0/EngineCore#2`` is one of ``engine/EngineCore``."""
    role, _, below = victim.partition("/")
    return "/".join(part for part in (role.partition("-")[0], below.partition("#")[0]) if part)


def _kind_of(fault: str) -> str:
    return "".join("#" if character.isdigit() else character for character in fault)[:160]
