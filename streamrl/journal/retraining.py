"""Ranks that hold an older version than control knows train again what the journal has, up to where the run was."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CloseBatch, StepReport
from streamrl.control.actions import StepOptimizer
from streamrl.journal.recovered_run import RecoveredRun
from streamrl.run.trainer_ranks import TrainerRanks


class Retrained(msgspec.Struct, frozen=True):
    """``policy_version``: what ranks hold now, ``batches`` of which they trained again; ``reports``: of the last."""

    policy_version: int
    batches: int = 0
    reports: Sequence[StepReport] = ()


async def retrain_batches(trainer: TrainerRanks, recovered: RecoveredRun, held: int) -> Retrained:
    """Bring ranks that hold version ``held`` to the version of the journal, which was replayed for them: nothing is
    sampled anew for that.

    Raises ``StreamRLError`` for ranks that are ahead, or that hold a version from before the journal's base.
    """
    wanted = recovered.version
    if held > wanted:
        raise StreamRLError(
            f"the trainer holds version {held}, the journal ends at version {wanted}: it is of another run, or was "
            "cut; start from a checkpoint (checkpoint.resume_from)"
        )
    batches = recovered.trained_since(held)
    if not recovered.leads_on:
        raise StreamRLError(
            f"the trainer begins with version {held}, the journal has no batches of versions {held + 1} to {wanted}: "
            "is a checkpoint of this run missing or damaged? start from another one (checkpoint.resume_from)"
        )
    reports: Sequence[StepReport] = ()
    for batch in batches:
        for group in recovered.training_groups(batch):
            await trainer.train_group(group)
        gather = await trainer.close_batch(close_of(batch.step))
        reports = await gather()
        await trainer.acknowledge(batch.policy_version)  # engines take the newest at once, when it is announced
    return Retrained(wanted, len(batches), reports)


def close_of(step: StepOptimizer) -> CloseBatch:
    """The order to ranks that carries out ``step``."""
    return CloseBatch(
        batch_id=step.batch_id,
        policy_version=step.policy_version,
        groups=step.groups,
        samples=step.samples,
        trained_tokens=step.trained_tokens,
        engines_idle=step.engines_idle,
    )
