"""The controller: control, rollout and reward coroutines in one nursery."""

from __future__ import annotations

from streamrl.run.run_controller import run_controller
from streamrl.supervise.child import ChildContext


async def run_controller_process(context: ChildContext) -> None:
    """Run the pipeline's own loop until the run is complete, or drained after SIGTERM."""
    await run_controller(context.recipe, context.topology, context.run_directory, resumes=context.resumes)
