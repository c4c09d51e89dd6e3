"""A run from Python: start it, follow its steps, stop when it is good enough.

python examples/pipeline_from_python.py examples/sort/recipe.toml --until 0.6
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from streamrl import Pipeline, load_recipe


async def train(recipe: Path, overrides: list[str], until: float) -> float:
    """Train until the mean reward of a batch reaches ``until`` or the recipe's steps are done; returns the last one."""
    reward = 0.0
    async with Pipeline(load_recipe(recipe, overrides)) as pipeline:
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
