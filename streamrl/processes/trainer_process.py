"""A trainer rank, served over streams."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.config.topology import RENDEZVOUS, ProcessPlan, Role
from streamrl.learning.durable_files import newest_checkpoint
from streamrl.learning.loading import import_architecture
from streamrl.learning.trainer import TorchTrainer, trainer_options
from streamrl.messages import TrainingEvent, TrainingOrder
from streamrl.processes.child import ChildContext, load_context
from streamrl.processes.controller_streams import controller_streams
from streamrl.stages.training import run_training, serve_controllers


async def run_trainer_process(context: ChildContext) -> None:
    """Train until the batches end. Where the run forgives its controller's death, a rank waits for the next one."""
    name, endpoint, recipe = context.plan.name, context.topology.endpoint, context.recipe
    newest = newest_checkpoint(context.run_directory) if context.resumes else None
    options = trainer_options(
        recipe,
        context.plan.index,
        recipe.run.name,
        endpoint(name, "weights"),
        rendezvous=context.topology.endpoints[RENDEZVOUS] or f"file://{context.socket_directory / 'rendezvous'}",
        resume_from=str(newest or ""),
    )
    open_controller = controller_streams(context.topology, name, ("batches", TrainingOrder), ("reports", TrainingEvent))
    if context.plan.gpus:
        options = msgspec.structs.replace(options, device="cuda")  # the only one that it sees
    trainer = TorchTrainer(options)
    if recipe.core_restarts:
        await serve_controllers(trainer, open_controller)
        return
    async with open_controller() as (batches, reports):
        await run_training(trainer, batches, reports)


def import_trainer(run_directory: Path) -> None:
    """What any rank of the run imports until it trains, beside this module."""
    recipe = load_context(ProcessPlan(role=Role.TRAINER, index=0), run_directory).recipe
    from streamrl.learning import checkpoint  # noqa: F401 - for its imports

    import_architecture(recipe.model.path, ranks=recipe.training.ranks)
