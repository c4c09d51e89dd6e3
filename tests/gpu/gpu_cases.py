"""On which devices a check runs, and the random models that the checks share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from streamrl.base.types import TrainingSample, TrajectoryId, float_array, token_array
from streamrl.learning.batches.packing import PreparedSample

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
    options = {"vocab_size": 64, "max_position_embeddings": 65_536, "initializer_range": 0.05} | TINY | sizes
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
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


def shared_model(factory: pytest.TempPathFactory, sizes: dict[str, Any]) -> str:
    """One model of these sizes for all checks of a process."""
    directory = factory.getbasetemp() / f"model-{sizes['hidden_size']}"
    return str(directory) if directory.is_dir() else write_model(directory, **sizes)


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
