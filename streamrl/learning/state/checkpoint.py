"""Checkpoints: trainer state in ``trainer/``, a Hugging Face directory in ``hf/``, complete or absent. With LoRA the
latter is the merged model, and ``adapter/`` is the adapter in peft's format.

Everything is written beside the final name, flushed, listed with its sha256 in ``digests``, and renamed at the end: a
directory of that name is a whole checkpoint, also after a power cut. Trainer state is ``torch.distributed.checkpoint``
on safetensors files (its default metadata is a pickle), scalars are msgpack; any number of ranks can load it."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as _load
from torch.distributed.checkpoint.state_dict_saver import save as _save

from streamrl.base.atomic_files import make_directory, sidecar_folder, take_sidecar
from streamrl.base.errors import UNDECODABLE, DiskFull, StreamRLError
from streamrl.learning.process_group import all_gather_bytes
from streamrl.learning.state import durable_files
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import PublishedWeights
from streamrl.pretrained.chat_template import TEMPLATE_FOLDER

FORMAT = 2
SCALARS = "trainer.msgpack"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
GIB = 1 << 30

T = TypeVar("T")


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """State that a trainer resumes from besides tensors. ``cohort``: moments (count, total, square) of past batches."""

    policy_version: int
    cohort: tuple[tuple[float, float, float], ...] = ()
    skipped_steps: int = 0


class _Format(msgspec.Struct, frozen=True):
    """The one field of ``trainer.msgpack`` that every format has."""

    format: int


class _Scalars(msgspec.Struct, frozen=True, kw_only=True):
    """``trainer.msgpack``. No generator's state: training draws nothing at random."""

    format: int
    state: TrainerState
    optimizer_steps: int
    moments: tuple[str, ...]
    extra: tuple[str, ...]


def save(
    directory: Path,
    weights: PublishedWeights,
    optimizer: MasterOptimizer,
    *,
    state: TrainerState,
    model_path: Path,
    extra: Mapping[str, Tensor] | None = None,
    min_free_bytes: int = 0,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint. Collective; every rank must see the same file system. Replaces a checkpoint of that name.

    ``extra``: tensors that are equal on every rank, by name. ``beside``: sha256 by name of the files that
    ``atomic_files.stage_sidecar`` left for it. Raises ``StreamRLError`` on every rank when one of them cannot write, or
    when less than ``min_free_bytes`` would be left on the disk; nothing half-written stays."""
    partial = directory.with_name(f".{directory.name}.partial")
    first = dist.get_rank() == 0
    moments = optimizer.moments()
    extra = extra or {}
    tensors = _tensors(weights, weights.masters.whole(), moments, extra)
    published = weights.full_published()
    scalars = _Scalars(
        format=FORMAT,
        state=state,
        optimizer_steps=optimizer.steps,
        moments=tuple(sorted(moments)),
        extra=tuple(sorted(extra)),
    )

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        _refuse_full_disk(directory, [*tensors.values(), *published.values()], min_free_bytes)
        (partial / "trainer").mkdir(parents=True)

    def export() -> None:
        save_hugging_face(partial / "hf", published, model_path)
        (partial / SCALARS).write_bytes(msgspec.msgpack.encode(scalars))
        take_sidecar(directory, partial, beside or {})

    try:
        _on_first_rank(prepare)
        _write_tensors(partial / "trainer", tensors)
        _on_every_rank(lambda: weights.save_adapter(partial / "adapter"))
        _on_first_rank(export)
        digests = _on_every_rank(lambda: durable_files.flush_and_digest(partial, _my_share(partial)))
        _on_first_rank(lambda: durable_files.write_digests(partial, digests))
        _on_first_rank(lambda: durable_files.move_into_place(partial, directory))
    except StreamRLError:
        if first:
            for half_written in (partial, sidecar_folder(directory)):
                shutil.rmtree(half_written, ignore_errors=True)
        raise


def load(
    directory: Path, weights: PublishedWeights, optimizer: MasterOptimizer, *, extra: Mapping[str, Tensor] | None = None
) -> TrainerState:
    """Fill masters, optimizer state and ``extra`` of this rank from a checkpoint. Collective. Raises ``StreamRLError``
    when it is not a checkpoint, has a damaged file, is one of another model, or lacks a tensor of ``extra``."""
    directory = durable_files.surviving(directory)
    _verify_together(directory)
    scalars = _read_scalars(directory)
    buffers = {name: torch.zeros_like(moment) for name, moment in optimizer.moments().items()}
    _refuse_missing(directory, "optimizer state", buffers, scalars.moments, "keep training.optimizer as it was")
    remedy = (
        "keep objective.algorithm and objective.value_model as they were, or start from the checkpoint's hf directory "
        "as model.path"
    )
    _refuse_missing(directory, "tensors", extra or {}, scalars.extra, remedy)
    masters_L = weights.masters.whole()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            reader = HuggingFaceStorageReader(str(directory / "trainer"))
            _load(_tensors(weights, masters_L, buffers, extra or {}), storage_reader=reader, no_dist=_alone())
        except (CheckpointException, RuntimeError, ValueError) as error:
            raise StreamRLError(f"checkpoint {str(directory)!r} does not fit this model: {error}") from error
    weights.masters.load(masters_L)
    optimizer.load_moments(buffers, scalars.optimizer_steps)
    return scalars.state


def save_hugging_face(directory: Path, published: dict[str, Tensor], model_path: Path) -> None:
    """A directory that transformers and vLLM load: the published bfloat16 tensors, tied ones once, and everything
    of the original directory that is not weights (tokenizer, generation settings, chat template)."""
    directory.mkdir(parents=True)
    for source in sorted(model_path.iterdir()):
        if source.is_file() and not source.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(source, directory / source.name)
        elif source.name == TEMPLATE_FOLDER:
            shutil.copytree(source, directory / source.name)
    config = json.loads((model_path / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    save_torch_state_dict(published, directory, metadata={"format": "pt"})


def save_shards(files: Iterable[Path], directory: Path, largest: str) -> None:
    """Write the tensors of safetensors ``files`` anew in files of at most ``largest``, such as 2GB, with their index.
    Raises ``ValueError`` for a size that is none."""
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    save_torch_state_dict(tensors, directory, max_shard_size=largest, metadata={"format": "pt"})


# ---- tensors -------------------------------------------------------------------------------------


def _tensors(
    weights: PublishedWeights, masters_L: Tensor, moments: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Views of everything that is saved: loading writes into them."""
    flats = {"master": masters_L, **moments}
    tensors = {f"{kind}.{name}": t for kind, flat in flats.items() for name, t in weights.as_tensors(flat).items()}
    return tensors | {f"extra.{name}": tensor.detach() for name, tensor in extra.items()}


def _write_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
            _save(tensors, storage_writer=writer, no_dist=_alone())
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise StreamRLError(f"cannot write checkpoint files in {str(directory)!r}: {causes}") from error


def _refuse_full_disk(directory: Path, tensors: list[Tensor], min_free_bytes: int) -> None:
    # numel of a distributed tensor counts the elements of all ranks.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    make_directory(directory.parent)
    free = shutil.disk_usage(directory.parent).free
    if free - size < min_free_bytes:
        raise DiskFull(
            f"checkpoint {str(directory)!r} takes {size / GIB:.2f} GiB and {free / GIB:.2f} GiB are free there: less "
            f"than {min_free_bytes / GIB:.2f} GiB (checkpoint.advanced.min_free_gib) would be left; make room, keep "
            f"fewer "
            "(checkpoint.keep, keep_best, keep_every), or lower min_free_gib"
        )


# ---- checks --------------------------------------------------------------------------------------


def _verify_together(directory: Path) -> None:
    """Verify the files, each rank a part of them; every rank raises what any of them found."""

    def my_faults() -> list[str]:
        digests = durable_files.read_digests(directory)
        mine = sorted(digests)[dist.get_rank() :: dist.get_world_size()]
        return durable_files.faults(directory, {name: digests[name] for name in mine})

    durable_files.refuse_faults(directory, [fault for found in _on_every_rank(my_faults) for fault in found])


def _read_scalars(directory: Path) -> _Scalars:
    try:
        encoded = (directory / SCALARS).read_bytes()
        written = msgspec.msgpack.decode(encoded, type=_Format).format
        if written != FORMAT:
            raise StreamRLError(f"checkpoint {str(directory)!r} has format {written}; this version reads {FORMAT}")
        return msgspec.msgpack.decode(encoded, type=_Scalars)
    except (OSError, *UNDECODABLE) as error:
        raise StreamRLError(f"{str(directory)!r} is not a checkpoint of streamrl: {error}") from error


def _refuse_missing(
    directory: Path, what: str, wanted: Mapping[str, Tensor], written: tuple[str, ...], remedy: str
) -> None:
    missing = sorted(set(wanted) - set(written))
    if missing:
        raise StreamRLError(
            f"checkpoint {str(directory)!r} has no {what} {', '.join(missing)}, which this recipe needs "
            f"(it has {', '.join(written) or 'none'}): {remedy}"
        )


# ---- ranks ---------------------------------------------------------------------------------------


def _alone() -> bool:
    """One rank plans by itself; of several torch exchanges the plans as pickles (SECURITY.md, ranks)."""
    return dist.get_world_size() == 1


def _my_share(directory: Path) -> list[str]:
    return durable_files.files_below(directory)[dist.get_rank() :: dist.get_world_size()]


def _on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work`` and return its results on all ranks (of other ranks as msgpack's own types). Raises
    ``StreamRLError`` on all of them when it failed on one."""
    mine: tuple[T | None, str]
    cause: Exception | None = None
    try:
        mine = (work(), "")
    except (OSError, RuntimeError, SafetensorError, StreamRLError) as error:
        mine = (None, str(error))
        cause = error
    encoded = all_gather_bytes(msgspec.msgpack.encode(mine))
    everything: list[tuple[T, str]] = [msgspec.msgpack.decode(one, type=tuple[Any, str]) for one in encoded]
    if failure := next((failure for _, failure in everything if failure), ""):
        raise StreamRLError(failure) from cause
    return [value for value, _ in everything]


def _on_first_rank(work: Callable[[], None]) -> None:
    """Rank 0 works while the others wait. Raises ``StreamRLError`` on all of them when it failed."""
    _on_every_rank(work if dist.get_rank() == 0 else lambda: None)
