"""A trainer rank, served over streams."""

from __future__ import annotations

import msgspec

from streamrl.base.messages import TrainingEvent, TrainingOrder
from streamrl.learning.state.durable_files import newest_checkpoint
from streamrl.learning.trainer import TorchTrainer, trainer_options
from streamrl.plan.topology import RENDEZVOUS
from streamrl.run.controller_streams import controller_streams
from streamrl.stages.training import run_training
from streamrl.supervise.child import ChildContext


async def run_trainer_process(context: ChildContext) -> None:
    """Train until the batches end."""
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
    if context.plan.gpus:
        options = msgspec.structs.replace(options, device="cuda")  # the only one that it sees
    trainer = TorchTrainer(options)
    streams = controller_streams(context.topology, name, ("batches", TrainingOrder), ("reports", TrainingEvent))
    async with streams as (batches, reports):
        await run_training(trainer, batches, reports)
