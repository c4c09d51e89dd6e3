"""One optimizer step on completions of ``streamrl try``, measured in a process of its own:
``python -m streamrl.prepare.measured_step``. The process of the command calls ``measure_step``."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct, msgpack
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CloseBatch
from streamrl.base.types import (
    ScoredTrajectory,
    TrainingGroup,
    Trajectory,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.recipe.sections import Recipe
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway


class MeasuredStep(Struct, frozen=True, kw_only=True):
    """One step of one rank.

    ``trajectories``, ``tokens``: number of trajectories, and of their tokens, those of prompts included.
    ``seconds``: time of forward, backward, optimizer and publishing.
    ``cpu_bytes``, ``device_bytes``: peak memory of the process.
    ``problem``: reason why no step was measured, such as ``none within 60 s`` (empty: the step was measured)."""

    trajectories: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu_bytes: int = 0
    device_bytes: int = 0
    problem: str = ""


def measure_step(recipe: Recipe, groups: Sequence[Sequence[Trajectory]], timeout_s: float) -> MeasuredStep:
    """Load the model as a trainer rank of ``recipe`` does, and train one batch of ``groups``. Blocking.

    Rewards of 0 and 1 alternate within a group, so that every group has a signal: the trainer skips groups without one.
    Several ranks are measured as one rank, which holds the whole model."""
    recipe = replace(recipe, training=replace(recipe.training, ranks=1))
    batch = [
        TrainingGroup(
            group_id=number,
            batch_id=0,
            samples=tuple(
                to_training_sample(ScoredTrajectory(trajectory=trajectory, reward=float(index % 2)))
                for index, trajectory in enumerate(group)
            ),
        )
        for number, group in enumerate(groups)
    ]
    with tempfile.TemporaryDirectory(prefix="streamrl-") as directory:
        path = Path(directory, "step")
        path.write_bytes(msgpack.encode((recipe, batch), enc_hook=list))  # arrays as lists
        child = run_throwaway("streamrl.prepare.measured_step", [str(path)], timeout_s)
    if not child.written or child.failure:
        return MeasuredStep(problem=f"none within {timeout_s:g} s" if child.late else child.failure or "no answer")
    return msgpack.decode(child.written, type=MeasuredStep)


def _measured(recipe: Recipe, groups: Sequence[TrainingGroup], directory: Path) -> MeasuredStep:
    from streamrl.learning.options import trainer_options
    from streamrl.learning.process_group import peak_device_bytes
    from streamrl.learning.trainer import TorchTrainer
    from streamrl.weights.publish.torch_tensors import start_publisher

    options = trainer_options(recipe, 0, run_id="trial", weights_endpoint=f"ipc://{directory}/weights")
    trainer = TorchTrainer(options, start_publisher)
    samples = [sample for group in groups for sample in group.samples]
    try:
        trainer.start()
        began = time.perf_counter()
        for group in groups:
            trainer.train_group(group)
        close = CloseBatch(
            batch_id=0,
            policy_version=trainer.policy_version + 1,
            groups=len(groups),
            samples=len(samples),
            trained_tokens=sum(sample.trained_tokens for sample in samples),
        )
        trainer.close_batch(close)
        return MeasuredStep(
            trajectories=len(samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            seconds=time.perf_counter() - began,
            cpu_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            device_bytes=peak_device_bytes(),
        )
    finally:
        trainer.close()


def _array(_: type, values: Any) -> Any:
    return float_array(values) if values and isinstance(values[0], float) else token_array(values)


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    path = Path(arguments[0])
    batch = msgpack.decode(path.read_bytes(), type=tuple[Recipe, tuple[TrainingGroup, ...]], dec_hook=_array)
    try:
        measured = _measured(*batch, path.parent)
    except (StreamRLError, MemoryError, RuntimeError) as error:  # torch's OutOfMemoryError is a RuntimeError
        measured = MeasuredStep(problem=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.300}")
    answers.write(msgpack.encode(measured))


if __name__ == "__main__":
    answer_parent(_answer)
