"""How well the simulator tells the time of a run whose engines and rank take turns: a run in turns and one side by
side, each beside its own simulation, and each forecast from the record of the other.

    python benchmarks/simulated_turns.py [--steps 24] [--recipe examples/sort/recipe.toml] [--sharing in_turns]

On a CPU a switch moves nothing, and takes the drain of the engine, its wake and the push that it then takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from training_run import DEMO_RECIPE, training_run

from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import GpuSharing, Recipe
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.recording import MOST_WARM_UP, agreement, load_recording
from streamrl.simulate.simulation import simulate_recipe

TIMEOUT_S = 3600.0
SHARINGS = (GpuSharing.IN_TURNS, GpuSharing.SIDE_BY_SIDE)
Fitted = tuple[RecordedRun, Recipe, FleetModel]


def recorded(path: Path, steps: int, sharing: GpuSharing) -> Fitted:
    """Run ``steps`` steps; print what each takes, and what the simulation of the same recipe says."""
    overrides = {
        "run.steps": steps,
        "rollout.prompts_per_batch": 16,
        "engines.advanced.gpu_sharing": sharing.value,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
    }
    with training_run(path, overrides) as run:
        run.wait(timeout_s=TIMEOUT_S)
        assert run.directory is not None
        record = load_recording(run.directory)
        recipe = load_recipe(run.directory / "recipe.toml")
    model = calibrate(record, recipe).model
    match = agreement(record, recipe, model)
    print(
        f"{sharing}: recorded {match.recorded['']:.2f} s a step, simulated {match.simulated['']:.2f} s, goodput "
        f"{match.mismatch:+.1%}; switches {model.push.to_ranks_s:.2f} and {model.push.to_engines_s:.2f} s",
        flush=True,
    )
    return record, recipe, model


def main() -> None:
    """Print a line for each run, and one for each forecast."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    parser.add_argument("--sharing", type=GpuSharing, choices=SHARINGS, help="one of both alone")
    arguments = parser.parse_args()
    sharings = [arguments.sharing] if arguments.sharing else SHARINGS
    runs = {sharing: recorded(arguments.recipe, arguments.steps, sharing) for sharing in sharings}
    for sharing, (record, recipe, _) in runs.items():
        lengths = RecordedLengths(record, resample=False)
        steps_s = [line.step_s for line in record.steps[MOST_WARM_UP:]]
        for other, (_, _, model) in runs.items():
            if other is not sharing:
                report = simulate_recipe(recipe, model, len(steps_s), lengths, warm_up=MOST_WARM_UP)
                forecast_s = fmean(row.step_s for row in report.recent)
                print(f"{sharing} from the record of {other}: {forecast_s:.2f} s a step, {fmean(steps_s):.2f} recorded")


if __name__ == "__main__":
    main()
