"""What the simulator says about the figures of RollPacker, SortedRL and SAGC, and how fast it is. All simulated.

    python benchmarks/simulated_papers.py [rhythm] [eta] [engines] [sorted] [sagc] [sizes] [speed] [--out FILE]

No part means all. Takes some minutes on one core; the times that it prints are CPU time."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    GroupSizing,
    Keeps,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)
from streamrl.recipe.sections import ReleaseKind
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens
from streamrl.simulate.engine_changes import EnginePlan
from streamrl.simulate.fleet import DEMO, PRESETS, FleetEngines, FleetModel
from streamrl.simulate.lengths import LengthModel
from streamrl.simulate.report import SimulationReport, StepRow
from streamrl.simulate.simulation import simulate

ROLLPACKER_14B, ROLLPACKER_14B_CODE = PRESETS["rollpacker-14b-16k"], PRESETS["rollpacker-14b-16k-code"]

# RollPacker (arXiv 2509.21009) figure 11, cap 16k: rollout seconds by (eta_P, eta_R).
ETA_TABLE: dict[tuple[float, float], float] = {
    (1.0, 1.0): 277.0,
    (1.0, 1.125): 260.0,
    (1.0, 1.25): 232.0,
    (1.0, 1.5): 115.0,
    (1.125, 1.0): 244.0,
    (1.25, 1.0): 169.0,
    (1.5, 1.0): 143.0,
    (1.25, 1.25): 88.0,
}
FITTED = ((1.0, 1.0), (1.25, 1.25))
PROBE_SLOPE_S = 14e-3
SORTED_CAP, SORTED_BATCH = 8192, 512


def settings(**changes: Any) -> ControlSettings:
    """Defaults of a control core that drops nothing."""
    defaults: dict[str, Any] = {
        "steps": 1,
        "batch_groups": 128,
        "group_size": 8,
        "rounds": RoundKind.SYNCHRONOUS,
        "max_staleness": 0,
        "when_stale": StalePolicy.WAIT,
        "dynamic_sampling": False,
        "max_failed_share": 1.0,
        "failure_window": 8,
    }
    return ControlSettings(**{**defaults, **changes})


def part(model: FleetModel, name: str, **changes: Any) -> FleetModel:
    """``model`` with fields of one part replaced."""
    return msgspec.structs.replace(model, **{name: msgspec.structs.replace(getattr(model, name), **changes)})


def race(prompt_oversampling: float, response_oversampling: float) -> ControlSettings:
    """RollPacker's own rule: deferred prompts are regenerated. Both 1: synchronous."""
    if prompt_oversampling == response_oversampling == 1:
        return settings()
    racing = TailBatching(
        prompt_oversampling=prompt_oversampling,
        response_oversampling=response_oversampling,
        deferred_prompts=DeferredPrompts.REGENERATE,
    )
    return settings(rounds=RoundKind.TAIL_BATCHING, tail_batching=racing)


# ---- RollPacker ------------------------------------------------------------------------------------


def rhythm(say: Callable[[str], None], steps: int = 40) -> None:
    """The order of rounds at eta = 1.25 on both axes, and the longest completion of each."""
    for name, model in (("math", ROLLPACKER_14B), ("code", ROLLPACKER_14B_CODE)):
        report = simulate(race(1.25, 1.25), model, steps)
        kinds = "".join(row.round_kind[0] for row in report.recent)
        short = [row.longest for row in report.recent if row.round_kind == "short"]
        long = [row.longest for row in report.recent if row.round_kind == "long"]
        say(
            f"rhythm, {name}: {kinds} (the paper: ssssl repeated); longest of a short round {min(short)}-{max(short)}, "
            f"mean {fmean(short):.0f} (the paper, code: 1800-2403); of a long round {fmean(long):.0f} (16384); "
            f"trained length {report.length_ratio:.2f} of the unbiased one (the reference: 0.72 math, 0.78 code)"
        )


def late_rewards(say: Callable[[str], None], steps: int = 40) -> None:
    """Code, 14B, with its rewards after the rollout and as long as in the split that the paper gives of its 1.48."""
    after = part(ROLLPACKER_14B_CODE, "push", kind_s={"synchronous": 45.0, "short": 51.0, "long": 51.0})
    for name, model in (("within the rollout", ROLLPACKER_14B_CODE), ("45 and 51 s after it", after)):
        before, raced = (simulate(race(eta, eta), model, steps).step_s_mean for eta in (1.0, 1.25))
        say(f"rewards {name}, code: a step {before:.0f} to {raced:.0f} s, {before / raced:.2f} (the paper: 1.48)")


def cycle_mean(rows: tuple[StepRow, ...], prompt_oversampling: float) -> float:
    """Rollout seconds as figure 11 averages them: the *longest* short and the longest long round of the run, in the
    fixed cycle of 1 / (eta_P - 1) short rounds to a long one. Without a cycle (no long rounds) the mean round."""
    short = [row.rollout_s for row in rows if row.round_kind != "long"]
    long = [row.rollout_s for row in rows if row.round_kind == "long"]
    if not long:
        return fmean(short)
    cycle = round(1 / (prompt_oversampling - 1))
    return (cycle * max(short) + max(long)) / (cycle + 1)


def eta_predictions(model: FleetModel, steps: int) -> dict[tuple[float, float], float]:
    """Rollout seconds of every entry of the table with a decode step of ``PROBE_SLOPE_S`` and no fixed cost."""
    probe = part(part(model, "push", round_s=0.0), "engine", base_s=PROBE_SLOPE_S)
    return {eta: cycle_mean(simulate(race(*eta), probe, steps).recent, eta[0]) for eta in ETA_TABLE}


def fit_pair(
    found: dict[tuple[float, float], float], fitted: tuple[tuple[float, float], ...]
) -> tuple[float, float, dict[tuple[float, float], float]]:
    """(scale of the decode step, fixed seconds, predictions): linear through two entries of the table."""
    first, second = fitted
    scale = (ETA_TABLE[first] - ETA_TABLE[second]) / (found[first] - found[second])
    fixed = ETA_TABLE[first] - scale * found[first]
    return scale, fixed, {eta: scale * seconds + fixed for eta, seconds in found.items()}


def errors(predicted: dict[tuple[float, float], float], fitted: tuple[tuple[float, float], ...]) -> list[float]:
    """Absolute relative errors of the entries that were not fitted, ascending."""
    return sorted(abs(predicted[eta] / ETA_TABLE[eta] - 1) for eta in ETA_TABLE if eta not in fitted)


def in_order(predicted: dict[tuple[float, float], float]) -> bool:
    """Whether the entries rank as in the paper."""
    return sorted(predicted, key=predicted.__getitem__) == sorted(ETA_TABLE, key=ETA_TABLE.__getitem__)


def eta(say: Callable[[str], None], steps: int = 36) -> None:
    """Fit two entries of figure 11, predict six; then the same for every other pair, and other correlations."""
    for name, model, correlation in (
        ("math", ROLLPACKER_14B, 0.3),
        ("math", ROLLPACKER_14B, 0.35),
        ("math", ROLLPACKER_14B, 0.4),
        ("code", ROLLPACKER_14B_CODE, 0.3),
    ):
        found = eta_predictions(part(model, "lengths", correlation=correlation), steps)
        scale, fixed, predicted = fit_pair(found, FITTED)
        wrong = errors(predicted, FITTED)
        shown = ", ".join(f"{p:g}/{r:g}: {predicted[p, r]:.0f} ({ETA_TABLE[p, r]:.0f})" for p, r in ETA_TABLE)
        good = whole = 0
        for pair in combinations(ETA_TABLE, 2):
            if abs(found[pair[0]] - found[pair[1]]) < 1:
                continue
            other_scale, _, others = fit_pair(found, pair)
            if 0.5 < other_scale < 2.5:  # otherwise the two entries do not determine a decode step
                whole += 1
                of_pair = errors(others, pair)
                good += in_order(others) and median(of_pair) <= 0.15 and of_pair[-1] <= 0.35
        say(
            f"eta table, {name}, correlation {correlation:g}, {steps} rounds each, fitted to 1/1 and 1.25/1.25: decode "
            f"step {1e3 * PROBE_SLOPE_S * scale:.1f} ms, fixed {fixed:.0f} s; eta_P/eta_R: predicted (paper): {shown}; "
            f"rank order {'right' if in_order(predicted) else 'WRONG'}, error median {median(wrong):.1%}, worst "
            f"{wrong[-1]:.1%}; of {whole} pairs that determine a decode step {good} meet the bounds"
        )


# ---- SortedRL --------------------------------------------------------------------------------------


def sorted_reports(capacity: int, cohort: int, cohorts: int = 2) -> dict[str, SimulationReport]:
    """Baseline, on-policy and partial mode at one capacity and cohort size; whole cohorts."""
    model = part(ROLLPACKER_14B, "lengths", cap=SORTED_CAP, cap_share=0.0229)
    model = part(model, "engine", max_num_seqs=capacity, kv_tokens=0)
    model = part(model, "push", round_s=0.0)
    model = msgspec.structs.replace(model, engines=FleetEngines(count=1, prompt_tokens=128, capacity=capacity))
    modes: dict[str, dict[str, Any]] = {
        "baseline": {},
        "on-policy": {
            "rounds": RoundKind.LENGTH_SORTED,
            "length_sorted": LengthSorted(cohort_batches=cohort, single=True),
        },
        "partial": {
            "rounds": RoundKind.LENGTH_SORTED,
            "length_sorted": LengthSorted(cohort_batches=cohort, single=True, partial=True),
            "max_staleness": cohort - 1,
        },
    }
    return {
        name: simulate(settings(batch_groups=SORTED_BATCH, group_size=1, **mode), model, cohort * cohorts)
        for name, mode in modes.items()
    }


def sorted_rounds(say: Callable[[str], None], capacity: int = 320, cohort: int = 48) -> None:
    """The bubble ratio of the rollout (SortedRL, arXiv 2603.23414: 74 %, 5.81 %, 3.37 %)."""
    for name, report in sorted_reports(capacity, cohort, cohorts=1).items():
        say(
            f"SortedRL, cap {SORTED_CAP}, batch {SORTED_BATCH}, capacity {capacity}, cohort of {cohort} batches, "
            f"{name}: bubble {report.rollout_bubble:.2%}, trained length {report.length_ratio:.2f}, generated/trained "
            f"{report.generated_tokens / report.trained_tokens:.2f}, goodput {report.goodput:.0f} tokens/s, staleness "
            f"at most {report.staleness_max}"
        )


# ---- SAGC ------------------------------------------------------------------------------------------


def drifting(steps: int) -> FleetModel:
    """Lengths that grow by a factor of 2.7 over the run, into a cap: stragglers get more frequent."""
    lengths = LengthModel(
        cap=1024, weights=(1.0,), mus=(5.0,), sigmas=(0.64,), correlation=0.61, drift_per_step=1.0 / steps
    )
    model = part(DEMO, "engine", arrival_s=0.0, admission_s=0.0, admission_per_running_s=0.0)
    return msgspec.structs.replace(model, lengths=lengths)


def sagc(say: Callable[[str], None], steps: int = 2000, budget: float = 0.4) -> None:
    """The long-run straggler rate against its budget, and that of fixed sizes."""
    cases = [(f"sagc, budget {budget:g}", GroupSizing(kind=SizingKind.SAGC, budget=budget), 8)]
    cases += [(f"fixed {size}", GroupSizing(), size) for size in (4, 8, 16)]
    for name, sizing, size in cases:
        chosen = settings(batch_groups=64 // size, group_size=size, group_sizing=sizing)
        report = simulate(chosen, drifting(steps), steps)
        say(
            f"SAGC, {steps} steps of 64 trajectories, lengths x 2.7 by drift, {name}: straggler rate "
            f"{report.straggler_rate:.4f}, groups by size {report.group_sizes}"
        )


def sizes(say: Callable[[str], None], steps: int = 400, budget: float = 0.6) -> None:
    """Wall time of every size, of SAGC and of random sizes with its shares, under each kind of rounds: a sample at 64
    trajectories a batch, a batch at 8 prompts."""
    prompts = TailBatching(prompt_oversampling=1.5, deferred_prompts=DeferredPrompts.VERIFY, long_round_batches=4)
    both = TailBatching(
        prompt_oversampling=1.25,
        response_oversampling=1.25,
        deferred_prompts=DeferredPrompts.REGENERATE,
        long_round_batches=4,
    )
    kinds: dict[str, dict[str, Any]] = {
        "synchronous": {},
        "race of prompts": {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": prompts},
        "race of prompts and responses": {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": both},
        "length_sorted": {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=4)},
        "continuous": {"rounds": RoundKind.CONTINUOUS, "max_staleness": 1},
    }
    for keeps, (name, rounds) in product(Keeps, kinds.items()):
        controlled = GroupSizing(kind=SizingKind.SAGC, keeps=keeps, budget=budget, tradeoff=0.5)
        report = simulate(settings(batch_groups=8, group_sizing=controlled, **rounds), DEMO, steps)
        a_batch = {size: 8 if keeps is Keeps.PROMPTS else 64 // size for size in controlled.sizes}
        batches = [report.group_sizes.get(size, 0) / groups for size, groups in a_batch.items()]
        shares = tuple(round(count / sum(batches), 4) for count in batches)
        random = GroupSizing(kind=SizingKind.RANDOM, keeps=keeps, shares=shares)
        cases = {
            "SAGC": report,
            "random": simulate(settings(batch_groups=8, group_sizing=random, **rounds), DEMO, steps),
        }
        for size, groups in a_batch.items():
            cases[f"size {size}"] = simulate(settings(batch_groups=groups, group_size=size, **rounds), DEMO, steps)

        def each_ms(one: SimulationReport, *, keeps: Keeps = keeps) -> str:
            if keeps is Keeps.TRAJECTORIES:
                return f"{1000 * one.seconds / one.trained.count:.2f}"
            return f"{1000 * one.seconds / sum(one.group_sizes.values()) * 8:.0f}"

        told = ", ".join(
            f"{case} {each_ms(one)} ({one.straggler_rate:.2f}, {one.length_ratio:.2f})" for case, one in cases.items()
        )
        unit = "ms a batch of 8 prompts" if keeps is Keeps.PROMPTS else "ms a sample"
        say(f"sizes, {name}, {unit} (straggler rate, trained over unbiased length): {told}")


# ---- engines that are freed late in a round, and sets of them ------------------------------------


def engine_changes(say: Callable[[str], None], steps: int = 40) -> None:
    """Step seconds with and without freed engines; then two sets of engines where KV is short."""
    schedules = {
        "synchronous": settings(),
        "race of prompts 1.25": race(1.25, 1.0),
        "race 1.25 / 1.25": race(1.25, 1.25),
    }
    freeing = EnginePlan(release=ReleaseKind.DRAIN)
    for lengths, model in (("math", ROLLPACKER_14B), ("code", ROLLPACKER_14B_CODE)):
        for name, chosen in schedules.items():
            never, drain = (simulate(chosen, model, steps, engines=plan) for plan in (EnginePlan(), freeing))
            say(f"engines freed, {lengths}, {name}: {_compared(never, drain)}")
    for kv_tokens in (490_000, 80_000, 40_000):
        model = part(ROLLPACKER_14B, "engine", kv_tokens=kv_tokens)
        room = expected_kv_tokens(kv_tokens, 4, of=2, weight_tokens=model.engines.weight_tokens)
        own = PreparedSet(count=16, tensor_parallel_size=2, kv_tokens=kv_tokens)
        other = PreparedSet(count=8, tensor_parallel_size=4, kv_tokens=room, max_num_seqs=512)
        for name, chosen in schedules.items():
            alone, both = (simulate(chosen, model, steps, engines=EnginePlan(sets=s)) for s in ((), (own, other)))
            preempted = f"preemptions {alone.preemptions} to {both.preemptions}"
            changes = f"{both.reasons.get('engine_set', 0)} changes"
            say(f"sets of engines, KV {kv_tokens}, {name}: {_compared(alone, both)}; {preempted}, {changes}")


def _compared(before: SimulationReport, after: SimulationReport) -> str:
    kinds = {kind.round_kind: (kind, other) for kind, other in zip(before.kinds, after.kinds, strict=True)}
    rounds = ", ".join(
        f"{name} {a.step_s:.0f} to {b.step_s:.0f} s (rollout {a.rollout_s:.0f} to {b.rollout_s:.0f})"
        for name, (a, b) in kinds.items()
    )
    ratio = before.step_s_mean / after.step_s_mean
    return f"a step {before.step_s_mean:.1f} to {after.step_s_mean:.1f} s, {ratio:.3f} times as fast; {rounds}"


# ---- speed -----------------------------------------------------------------------------------------


def speed(say: Callable[[str], None], engines: int = 1000, steps: int = 15) -> None:
    """CPU seconds of 1,000 engines with 64 requests each over 15 steps, and the largest resident size."""
    model = msgspec.structs.replace(ROLLPACKER_14B, engines=FleetEngines(count=engines, prompt_tokens=128))
    begun = time.process_time()
    report = simulate(settings(batch_groups=engines * 8), model, steps)
    seconds = time.process_time() - begun
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    say(
        f"speed, {engines} engines x 64 requests x {steps} steps: {report.trajectories} trajectories in "
        f"{seconds:.1f} s of CPU time, {report.trajectories / seconds:.0f} a second, {resident:.0f} MiB at most"
    )


PARTS: dict[str, Callable[[Callable[[str], None]], None]] = {
    "rhythm": rhythm,
    "late_rewards": late_rewards,
    "eta": eta,
    "engines": engine_changes,
    "sorted": sorted_rounds,
    "sagc": sagc,
    "sizes": sizes,
    "speed": speed,
}


def main() -> int:
    """Run the parts named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")

    def say(line: str) -> None:
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    for name in options.parts or PARTS:
        PARTS[name](say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
