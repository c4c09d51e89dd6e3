"""A run from Python: start it, follow its steps, stop when it is good enough; with a sink and an observer of one's own.

python examples/pipeline_from_python.py examples/sort/recipe.toml --until 0.6"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from streamrl import Pipeline, load_recipe
from streamrl.base.messages import Message
from streamrl.base.types import ScoredTrajectory
from streamrl.contracts import Observer


class EventLog:
    """A sink: called in this process, on a thread of its own, with every event of the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def record(self, event: Message) -> None:
        print(type(event).__name__, file=self._file)

    def close(self) -> None:
        self._file.close()


class BestOfBatch(Observer):
    """An observer: made and called in the controller's process, with what never leaves it."""

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        best = max(batch, key=lambda scored: scored.reward)
        with Path("best.txt").open("a") as file:  # in the directory from which the run was started
            file.write(f"{policy_version}: {best.trajectory.prompt.prompt_id} {best.reward:.3f}\n")


async def train(recipe: Path, overrides: list[str], until: float) -> float:
    """Train until the mean reward of a batch reaches ``until`` or the recipe's steps are done; returns the last one."""
    reward = 0.0
    run = Pipeline(load_recipe(recipe, overrides), sinks=[EventLog(Path("events.txt"))], observers=[BestOfBatch])
    async with run as pipeline:
        print(f"files are in {pipeline.run_directory}")
        async for step in pipeline:
            reward = step.metrics["reward/mean"]
            print(f"step {step.step}: reward {reward:.3f}, weights of version {step.policy_version} are live")
            if reward >= until:
                pipeline.drain()  # the iteration goes on until the run has saved and ended
    return reward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--until", type=float, default=1.0, help="stop when a batch's mean reward reaches this")
    arguments = parser.parse_args()
    asyncio.run(train(arguments.recipe, arguments.overrides, arguments.until))
