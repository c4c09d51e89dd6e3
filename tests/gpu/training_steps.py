"""Steps of a real trainer on given samples, timed, with the memory of the last."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sample_groups import train_batch

from streamrl.base.types import TrainingGroup, TrainingSample
from streamrl.learning.options import TrainerOptions
from streamrl.learning.trainer import TorchTrainer
from streamrl.weights.publish.torch_tensors import start_publisher


@dataclass
class Steps:
    """What the steps took; ``peak``: bytes on the device in the last, 0 on a CPU."""

    parameters: int
    trained_parameters: int
    seconds: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    peak: int = 0

    @property
    def steps(self) -> int:
        return len(self.seconds)


def groups_of(samples: list[TrainingSample], batch: int) -> list[TrainingGroup]:
    numbers = sorted({sample.id.group_id for sample in samples})
    members = {number: tuple(sample for sample in samples if sample.id.group_id == number) for number in numbers}
    return [TrainingGroup(group_id=n, batch_id=batch, samples=members[n]) for n in numbers]


def train_steps(path: str, device: str, sockets: Path, batches: list[list[TrainingSample]], **options: Any) -> Steps:
    """One step for each batch."""
    endpoint = f"ipc://{sockets}/weights"
    settings = {"threads": 1} if device == "cpu" else {}
    chosen = TrainerOptions(
        model_path=path, run_id="gpu", weights_endpoint=endpoint, device=device, **settings, **options
    )
    trainer = TorchTrainer(chosen, start_publisher)
    try:
        ready = trainer.start()
        done = Steps(ready.parameters, ready.trained_parameters)
        for batch, samples in enumerate(batches):
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            groups, began = groups_of(samples, batch), time.perf_counter()
            done.metrics.append(train_batch(trainer, groups, batch + 1).metrics)
            if device == "cuda":
                torch.cuda.synchronize()
                done.peak = torch.cuda.max_memory_allocated()
            done.seconds.append(time.perf_counter() - began)
            trainer.acknowledge(batch + 1)
    finally:
        trainer.close()
        if device == "cuda":
            torch.cuda.empty_cache()
    return done
