"""Kills an engine host of a running demo while it generates, and says how long it was missed.

    python benchmarks/kill_engine.py --engines vllm --kills 2 --steps 130    # eight minutes on two cores

The run must go on: its steps are printed, with when the engine was lost and when it served again. The time that it was
missed is to be compared with what the engines needed when the run began; the difference is what recovery costs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import anyio
import msgspec
import psutil
from chaos_processes import log_name

from streamrl.base.run_events import EngineBack, EngineLost, RunFinished, RunStarted, StepFinished
from streamrl.launch.pipeline import Pipeline
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.sections import EngineKind, Recipe

DEMO = Path(__file__).parents[1] / "examples" / "sort" / "recipe.toml"


def main() -> int:
    """Exit code 1 unless every killed engine came back and the run finished."""
    arguments = argparse.ArgumentParser(description="Kill an engine host of a running demo.")
    arguments.add_argument("--engines", choices=[kind.value for kind in EngineKind], default="vllm")
    arguments.add_argument("--kills", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=130, help="they must last for all pauses")
    arguments.add_argument("--pause-s", type=float, default=60.0, help="from the start, or a return, to the next kill")
    arguments.add_argument("--directory", default="runs")
    options = arguments.parse_args()
    recipe = short_demo(EngineKind(options.engines), options.steps, options.directory)
    return 0 if anyio.run(kill_and_watch, recipe, options.kills, options.pause_s) else 1


def short_demo(kind: EngineKind, steps: int, directory: str) -> Recipe:
    """The demo with two engines and small batches, without evaluation and checkpoints."""
    recipe, replace = load_recipe(DEMO), msgspec.structs.replace
    return replace(
        recipe,
        run=replace(recipe.run, steps=steps, directory=directory),
        engines=replace(recipe.engines, kind=kind, count=2, restarts=5),
        rollout=replace(recipe.rollout, prompts_per_batch=16, group_size=8),
        evaluation=replace(recipe.evaluation, prompts="", at_start=False, at_end=False),
        checkpoint=replace(recipe.checkpoint, at_end=False),
    )


async def kill_and_watch(recipe: Recipe, kills: int, pause_s: float) -> bool:
    """Kill ``engine-0`` and ``engine-1`` in turn, each at the first step ``pause_s`` after the last one came back."""
    began, left, away, finished = time.monotonic(), kills, "", False
    whole = began

    def said(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    async with Pipeline(recipe) as pipeline:
        async for event in pipeline.events():
            match event:
                case RunStarted():
                    whole = time.monotonic()
                    said(f"started; everything took {whole - began:.1f} s")
                case StepFinished() if left and not away and time.monotonic() > whole + pause_s:
                    away = f"engine-{left % 2}"
                    left -= 1
                    said(f"step {event.step}; {away} is killed")
                    host_of(away).kill()
                case StepFinished():
                    said(f"step {event.step}")
                case EngineLost():
                    said(f"{event.engine} is lost with {event.requests} requests: {event.reason}")
                case EngineBack():
                    said(f"{event.engine} serves again; it was missed for {event.seconds:.1f} s")
                    away, whole = "" if event.engine == away else away, time.monotonic()
                case RunFinished():
                    said(f"finished: {event.reason}")
                    finished = event.reason == "finished"
    return finished and not left and not away


def host_of(name: str) -> psutil.Process:
    """The process of an engine host, which is a child of this one."""
    for process in psutil.Process().children():
        if log_name(process.pid) == name:
            return process
    raise SystemExit(f"{name} has no process")


if __name__ == "__main__":
    raise SystemExit(main())
