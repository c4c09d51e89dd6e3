"""``streamrl train RECIPE``: the parent process of a run, and what its user sees of it."""

from __future__ import annotations

import logging
import sys

import anyio

from streamrl.config.recipe import Recipe
from streamrl.observe.stdout import StdoutReporter
from streamrl.pipeline import Pipeline


def train(recipe: Recipe) -> int:
    """Run ``recipe`` until it is done, drained or broken. Raises what ended it, where that was a failure."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    anyio.run(_follow, recipe, backend_options={"use_uvloop": sys.platform != "win32"})
    return 0


async def _follow(recipe: Recipe) -> None:
    with StdoutReporter() as report:
        async with Pipeline(recipe) as pipeline:
            async for event in pipeline.events():
                report(event)
