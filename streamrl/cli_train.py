"""``streamrl train RECIPE``: the parent process of a run, and what its user sees of it."""

from __future__ import annotations

import logging
import sys

import anyio

from streamrl.config.recipe import Recipe
from streamrl.messages import RunFinished
from streamrl.observe.stdout import StdoutReporter


def train(recipe: Recipe) -> bool:
    """Run ``recipe``. True: it is done or drained; False: it was cut short. Raises what broke it."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    return anyio.run(_follow, recipe, backend_options={"use_uvloop": sys.platform != "win32"})


async def _follow(recipe: Recipe) -> bool:
    from streamrl.pipeline import Pipeline

    finished = False
    with StdoutReporter() as report:
        async with Pipeline(recipe) as pipeline:
            async for event in pipeline.events():
                report(event)
                finished = finished or isinstance(event, RunFinished)
    return finished
