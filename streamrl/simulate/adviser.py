"""The adviser of ``rounds = "auto"``: predicts the goodput of each kind of round from the trace of the run.

``advise`` runs in the controller. From time to time it starts this module as a niced process, which reads the last part
of ``trace.jsonl``, fits a fleet model to it, simulates each kind of round with the recorded lengths, and prints the
predictions. Control gets them as ``RoundsAdvised``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import current_time, sleep
from msgspec import json
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.control.events import RoundsAdvised
from streamrl.control.settings import control_settings
from streamrl.observe.report.trajectory_trace import RecordedRun, read_trace
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.engine_changes import engine_plan
from streamrl.simulate.fleet import DEMO
from streamrl.simulate.lengths import RecipeLengths, RecordedLengths
from streamrl.simulate.simulation import simulate_candidates

FIRST_ROUNDS_BETWEEN = 2
"""Rounds between the first advice, after one round, and the second. The number doubles with each advice: the first ones
come from few lengths, and are corrected soon."""

MOST_ROUNDS_BETWEEN = 8
BUSY_SHARE = 0.05
FREE_S = 20.0
"""The adviser takes at most ``BUSY_SHARE`` of one core over the life of a run, and ``FREE_S`` seconds beside it: a run
that is about to begin its third round should not wait for its advice."""

POLL_S = 0.5
RECENT_TRAJECTORIES = 2048
RECENT_STEPS = 12
"""Trajectories and steps at the end of a run that the adviser uses, whichever is longer. Lengths drift while a policy
learns."""

TAIL_BYTES = 8 << 20
NICE = 19


async def advise(
    run_directory: Path, recipe: Recipe, live_version: Callable[[], int], notify: Callable[[RoundsAdvised], None]
) -> None:
    """Simulate the run in ``run_directory`` after its first round, and then every ``MOST_ROUNDS_BETWEEN`` rounds or
    more often, and ``notify`` the advice, until cancelled."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "streamrl.simulate.adviser", str(run_directory)]
    run_began_s = current_time()
    busy_s = 0.0
    due_version = 1
    rounds_between = FIRST_ROUNDS_BETWEEN
    while True:
        await sleep(POLL_S)
        began_s = current_time()
        if live_version() < due_version or busy_s > FREE_S + BUSY_SHARE * (began_s - run_began_s):
            continue
        result = await anyio.run_process(command, check=False, stderr=None, env=variables)
        busy_s += current_time() - began_s
        due_version = live_version() + 1
        if result.returncode == 0 and result.stdout:
            notify(json.decode(result.stdout, type=RoundsAdvised))
            due_version = live_version() + rounds_between
            rounds_between = min(2 * rounds_between, MOST_ROUNDS_BETWEEN)


def advice_for(run: RecordedRun, recipe: Recipe) -> RoundsAdvised:
    """Predict the goodput of each kind of round from the last part of ``run``. In the first rounds the cost of a decode
    step has the shape of the demo's, scaled to what was measured. Raises ``StreamRLError`` where the record is too
    short."""
    run = recent(run)
    fit = calibrate(run, recipe, prior=DEMO.engine)
    lengths = RecipeLengths(recipe, fit.model.environment, RecordedLengths(run))
    engines = engine_plan(recipe, fit.model)
    reports = simulate_candidates(control_settings(recipe), fit.model, lengths, engines=engines)
    figures = {"trajectories": float(len(run.trajectories)), "step_error": fit.step_error}
    return RoundsAdvised(
        goodput={name: report.goodput for name, report in reports.items()},
        seconds={name: {kind.round_kind: kind.step_s for kind in report.kinds} for name, report in reports.items()},
        figures=figures | {f"length_share {name}": report.length_ratio for name, report in reports.items()},
    )


def recent(run: RecordedRun) -> RecordedRun:
    """Limit ``run`` to its last ``RECENT_TRAJECTORIES`` or its last ``RECENT_STEPS``, whichever is longer."""
    start_s = 0.0
    if len(run.trajectories) > RECENT_TRAJECTORIES and len(run.steps) > RECENT_STEPS:
        start_s = min(run.trajectories[-RECENT_TRAJECTORIES].ended_s, run.steps[-RECENT_STEPS].time_s)
    return replace(
        run,
        trajectories=tuple(line for line in run.trajectories if line.launched_s >= start_s),
        steps=tuple(line for line in run.steps if line.time_s >= start_s),
        engines=tuple(line for line in run.engines if line.time_s >= start_s),
    )


def main() -> int:
    """Print the advice for the run directory on the command line as JSON. The exit code is 1 where there is no advice
    yet."""
    os.nice(NICE)
    directory = Path(sys.argv[1])
    try:
        advice = advice_for(read_trace(directory / "trace.jsonl", TAIL_BYTES), load_recipe(directory / "recipe.toml"))
    except StreamRLError:
        return 1
    sys.stdout.buffer.write(json.encode(advice))
    return 0


if __name__ == "__main__":
    sys.exit(main())
