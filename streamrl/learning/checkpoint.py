"""Checkpoints: trainer state in ``trainer/``, a Hugging Face directory in ``hf/``, complete or absent.

Everything is written beside the final name and renamed at the end, so a directory of that name is a whole checkpoint.
Trainer state is ``torch.distributed.checkpoint`` on safetensors files (its default metadata is a pickle), scalars are
msgpack; it can be loaded by another number of ranks.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as _load
from torch.distributed.checkpoint.state_dict_saver import save as _save

from streamrl.errors import StreamRLError
from streamrl.learning.published_weights import PublishedWeights

FORMAT = 1
SCALARS = "trainer.msgpack"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class TrainerScalars(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds besides tensors."""

    format: int
    policy_version: int
    optimizer_steps: int
    ranks: int


def _tensors(weights: PublishedWeights, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Views of everything that is saved: loading writes into them."""
    state = optimizer.state[weights.masters_L]
    flats = {"master": weights.masters_L, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    return {f"{kind}.{name}": t for kind, flat in flats.items() for name, t in weights.as_tensors(flat).items()}


def _ensure_moments(weights: PublishedWeights, optimizer: torch.optim.Optimizer) -> None:
    """Zero moments for an optimizer that has not stepped yet: it makes its own only at its first step."""
    if not optimizer.state[weights.masters_L]:
        optimizer.state[weights.masters_L] = {
            "step": torch.zeros((), dtype=torch.float32, device=weights.masters_L.device),
            "exp_avg": torch.zeros_like(weights.masters_L.data),
            "exp_avg_sq": torch.zeros_like(weights.masters_L.data),
        }


def save(
    directory: Path,
    weights: PublishedWeights,
    optimizer: torch.optim.Optimizer,
    *,
    policy_version: int,
    model_path: Path,
) -> None:
    """Write a checkpoint. Collective; every rank must see the same file system. Replaces a checkpoint of that name."""
    partial = directory.with_name(f".{directory.name}.partial")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "trainer").mkdir(parents=True)
    dist.barrier()
    _ensure_moments(weights, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(partial / "trainer"), save_distributed=True)
        _save(_tensors(weights, optimizer), storage_writer=writer)
    published = weights.full_published()
    if first:
        save_hugging_face(partial / "hf", published, model_path)
        scalars = TrainerScalars(
            format=FORMAT,
            policy_version=policy_version,
            optimizer_steps=int(optimizer.state[weights.masters_L]["step"]),
            ranks=dist.get_world_size(),
        )
        (partial / SCALARS).write_bytes(msgspec.msgpack.encode(scalars))
        _replace(partial, directory)
    dist.barrier()


def _replace(partial: Path, directory: Path) -> None:
    old = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def save_hugging_face(directory: Path, published: dict[str, Tensor], model_path: Path) -> None:
    """A directory that transformers and vLLM load: the published bfloat16 tensors, tied ones once, and everything
    of the original directory that is not weights (tokenizer, generation settings, chat template)."""
    directory.mkdir(parents=True)
    for source in sorted(model_path.iterdir()):
        if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(source, directory / source.name)
    config = json.loads((model_path / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    save_torch_state_dict(published, directory, metadata={"format": "pt"})


def load(directory: Path, weights: PublishedWeights, optimizer: torch.optim.Optimizer) -> int:
    """Fill masters and optimizer state of this rank from a checkpoint and return its policy version. Collective.

    Raises ``StreamRLError`` when it is not a checkpoint, or one of another model.
    """
    try:
        scalars = msgspec.msgpack.decode((directory / SCALARS).read_bytes(), type=TrainerScalars)
    except (OSError, msgspec.MsgspecError) as error:
        raise StreamRLError(f"{str(directory)!r} is not a checkpoint of streamrl: {error}") from error
    if scalars.format != FORMAT:
        raise StreamRLError(f"checkpoint {str(directory)!r} has format {scalars.format}; this version reads {FORMAT}")
    _ensure_moments(weights, optimizer)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            tensors = _tensors(weights, optimizer)
            _load(tensors, storage_reader=HuggingFaceStorageReader(str(directory / "trainer")))
        except (CheckpointException, RuntimeError, ValueError) as error:
            raise StreamRLError(f"checkpoint {str(directory)!r} does not fit this model: {error}") from error
    optimizer.state[weights.masters_L]["step"].fill_(scalars.optimizer_steps)
    return scalars.policy_version
