"""On which devices a check runs, and the random models that the checks share."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from streamrl.base.run_events import RunFinished, StepFinished
from streamrl.base.types import TrainingSample, TrajectoryId, float_array, token_array
from streamrl.learning.batches.packing import PreparedSample
from streamrl.recipe.sections import Recipe

PRETENDED = bool(os.environ.get("FAKE_GPUS"))
"""Whether torch has GPUs that are not there (campaigns/pretended_gpu): models are as small as on a CPU."""
REHEARSING = os.environ.get("STREAMRL_REHEARSAL") == "1"
_ABSENT = "" if torch.cuda.is_available() else f"no CUDA device: torch {torch.__version__} sees none"
if "PYTEST_XDIST_WORKER" in os.environ:
    _ABSENT = _ABSENT or "the CUDA device is for one process at a time: python benchmarks/first_contact.py"
_SLOW = "slow without a GPU: python benchmarks/first_contact.py --rehearse runs it on the CPU"
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(_ABSENT), reason=_ABSENT)])
ON_BOTH = pytest.mark.parametrize("device", ["cpu", GPU])
"""The same check on a CPU, in small, so that its own code is known to run."""
ON_A_GPU = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.skipif(not REHEARSING, reason=_SLOW)), GPU]
)
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
HALF_B = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 28, "num_attention_heads": 16,
          "head_dim": 64, "vocab_size": 32_000}  # fmt: skip
ONE_AND_A_HALF_B = HALF_B | {"hidden_size": 1792, "intermediate_size": 7168, "head_dim": 128, "num_attention_heads": 14}


def write_model(directory: Path, **sizes: Any) -> str:
    """A random Qwen3 in bfloat16 with half as many heads of keys, untied, and a tokenizer; its path."""
    options = {"vocab_size": 64, "max_position_embeddings": 65_536, "tie_word_embeddings": False} | TINY | sizes
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.05}
    options["num_key_value_heads"] = options["num_attention_heads"] // 2
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options, **ids)).save_pretrained(directory)
    finally:
        torch.set_default_dtype(dtype)
    words = {name: index for index, name in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(directory / "tokenizer.json"))
    return str(directory)


QWEN3_0_6B = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
              "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12,
              "A10G": 70e12, "RTX 4090": 165e12, "RTX 3090": 71e12}  # fmt: skip
"""Of a card in bfloat16 without sparsity, by a part of its name."""


def large(device: str) -> bool:
    """Whether models of a real size can be trained on ``device``."""
    return device == "cuda" and not PRETENDED


def needs_gib(device: str, gib: float, what: str) -> None:
    """Skip a check that does not fit the card."""
    if large(device) and (has := torch.cuda.get_device_properties(0).total_memory / 2**30) < gib:
        pytest.skip(f"{what} needs a card of {gib:.0f} GiB; {torch.cuda.get_device_name()} has {has:.1f}")


def needs_bfloat16(device: str, what: str) -> None:
    """Skip a check of what compute capability 8.0 brought: bfloat16 and FlashAttention."""
    if device == "cuda" and (has := torch.cuda.get_device_capability()) < (8, 0):
        name = torch.cuda.get_device_name()
        pytest.skip(f"{what} needs compute capability 8.0; {name} has {has[0]}.{has[1]} and computes in float32")


def shared_model(factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> str:
    """One model of these sizes for all checks of a process."""
    named = "-".join(str(sizes[name]) for name in ("hidden_size", "intermediate_size", "vocab_size") if name in sizes)
    directory = factory.getbasetemp() / f"model-{named}"
    return str(directory) if directory.is_dir() else write_model(directory, **sizes)


CURVES = {
    "reward": "reward/mean",
    "tokens": "length/sampled_mean",
    "entropy": "policy/entropy",
    "kl_engine_to_trainer": "policy/kl_rollout",
    "grad_norm": "optim/grad_norm",
    "step_s": "time/step_s",
    "publish_s": "time/publish_s",
}
"""Metrics of a run by the names that they have in the report: a value of each step."""


def record_figures(record: Any, steps: list[Any]) -> None:
    """Put the curves of a run into the report."""
    for name, metric in CURVES.items():
        values = [float(f"{step.metrics[metric]:.4g}") for step in steps if metric in step.metrics]
        if values:
            record(name, values)


async def steps_of_run(recipe: Recipe, count: int, record: Any, began: float) -> list[StepFinished]:
    """Run a recipe of ``count`` steps to its end, and put its curves and seconds since ``began`` into the report."""
    from streamrl.launch.pipeline import Pipeline

    steps: list[StepFinished] = []
    last: Any = None
    async with Pipeline(recipe) as pipeline:
        async for last in pipeline.events():
            steps += [last] if isinstance(last, StepFinished) else []
    record_figures(record, steps)
    record("seconds", time.monotonic() - began)
    assert [event.step for event in steps] == list(range(1, count + 1))
    assert isinstance(last, RunFinished) and last.reason == "finished"
    return steps


def samples_of(lengths: list[int], vocabulary: int = 64, prompt: int = 4, batch: int = 0) -> list[TrainingSample]:
    """Random samples of these lengths, each in a group with the next one."""
    generator = torch.Generator().manual_seed(batch)
    return [
        TrainingSample(
            id=TrajectoryId(prompt_id=f"p{index // 2}", group_id=index // 2, sample=index % 2),
            token_ids=token_array(torch.randint(3, vocabulary, (length,), generator=generator).tolist()),
            loss_mask=b"\0" * prompt + b"\1" * (length - prompt),
            behavior_logprobs=float_array([-3.0] * length),
            reward=float(index % 2),
            oldest_version=batch,
            newest_version=batch,
        )
        for index, length in enumerate(lengths)
    ]


def prepared(samples: list[TrainingSample]) -> list[PreparedSample]:
    return [PreparedSample(sample) for sample in samples]
