"""Checkpoints: trainer state in ``trainer/``, a Hugging Face directory in ``hf/``, complete or absent. With LoRA,
``hf/`` is the merged model, and ``adapter/`` is the adapter in peft's format.

``updates`` saves and loads them in each trainer rank. All files are written in a partial directory, flushed, listed
with their sha256 in ``digests``, and the directory is renamed at the end: a directory of the final name is a complete
checkpoint, also after a power cut. Trainer state is ``torch.distributed.checkpoint`` on safetensors files (its default
metadata is a pickle), scalars are msgpack. Any number of ranks can load it."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import save_torch_state_dict
from msgspec import Struct, msgpack
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import get_rank, get_world_size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as _load
from torch.distributed.checkpoint.state_dict_saver import save as _save

from streamrl.base.atomic_files import make_directory, sidecar_folder, take_sidecar
from streamrl.base.errors import UNDECODABLE, DiskFull, StreamRLError
from streamrl.base.types import Texts
from streamrl.learning.process_group import all_gather_bytes
from streamrl.learning.state import durable_files
from streamrl.learning.state.masters import Tensors
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import ADAPTER_TENSORS, PEFT_PREFIX, PublishedWeights
from streamrl.learning.state.tensor_meaning import ADAPTER
from streamrl.pretrained.chat_template import TEMPLATE_FOLDER
from streamrl.pretrained.model_facts import read_model_config
from streamrl.pretrained.weight_files import stored_tensors

FORMAT = 2
SCALARS = "trainer.msgpack"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
GIB = 1 << 30

T = TypeVar("T")


class TrainerState(Struct, frozen=True, kw_only=True):
    """State without tensors that a trainer resumes from. ``cohort``: moments (count, total, square) of past batches."""

    policy_version: int
    cohort: tuple[tuple[float, float, float], ...] = ()
    skipped_steps: int = 0


class _Format(Struct, frozen=True):
    """The only field of ``trainer.msgpack`` that every format has."""

    format: int


class _Scalars(Struct, frozen=True, kw_only=True):
    """Content of ``trainer.msgpack``. It has no state of a random generator: training draws no random numbers.

    ``moments``: names of the optimizer's moments.
    ``extra``: names of the tensors besides masters and moments.
    ``base``: sum over the bits of the model that adapters are beside (None: there are no adapters, or an older streamrl
    wrote it)."""

    format: int
    state: TrainerState
    optimizer_steps: int
    moments: Texts
    extra: Texts
    base: int | None = None


def save(
    directory: Path,
    weights: PublishedWeights,
    optimizer: MasterOptimizer,
    *,
    state: TrainerState,
    model_path: Path,
    extra: Mapping[str, Tensor] | None = None,
    min_free_bytes: int = 0,
    sidecar_digests: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint, or replace the one of the same name. Collective; all ranks must have the same file system.

    ``extra``: tensors that are equal on every rank, by name.
    ``sidecar_digests``: sha256, by name, of the files that ``atomic_files.write_sidecar`` wrote for the checkpoint.
    Raises ``StreamRLError`` on every rank when a rank cannot write, or when less than ``min_free_bytes`` would be left
    on the disk. A failed write leaves no partial files."""
    partial = directory.with_name(f".{directory.name}.partial")
    moments = optimizer.moments()
    extra = extra or {}
    tensors = _tensors(weights, weights.masters.full(), moments, extra)
    published = weights.full_published()
    scalars = _Scalars(
        format=FORMAT,
        state=state,
        optimizer_steps=optimizer.steps,
        moments=tuple(sorted(moments)),
        extra=tuple(sorted(extra)),
        base=_base(weights),
    )

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        published.update(_constants(model_path, published))
        _refuse_full_disk(directory, [*tensors.values(), *published.values()], min_free_bytes)
        (partial / "trainer").mkdir(parents=True)

    def export() -> None:
        save_hugging_face(partial / "hf", published, model_path)
        (partial / SCALARS).write_bytes(msgpack.encode(scalars))
        take_sidecar(directory, partial, sidecar_digests or {})

    try:
        _on_first_rank(prepare)
        _write_tensors(partial / "trainer", tensors)
        _on_every_rank(lambda: weights.save_adapter(partial / ADAPTER))
        _on_first_rank(export)
        shares = slice(get_rank(), None, get_world_size())
        digests = _on_every_rank(
            lambda: durable_files.flush_and_digest(partial, durable_files.files_below(partial)[shares])
        )
        _on_first_rank(lambda: durable_files.write_digests(partial, digests))
        _on_first_rank(lambda: durable_files.move_into_place(partial, directory))
    except StreamRLError:
        if get_rank() == 0:
            for unfinished in (partial, sidecar_folder(directory)):
                shutil.rmtree(unfinished, ignore_errors=True)
        raise


def load(
    directory: Path, weights: PublishedWeights, optimizer: MasterOptimizer, *, extra: Mapping[str, Tensor] | None = None
) -> TrainerState:
    """Fill masters, optimizer state and ``extra`` of this rank from a checkpoint. Collective. Raises ``StreamRLError``
    when the directory is not a checkpoint, has a damaged file, is of another model, or lacks a tensor of ``extra``."""
    directory = durable_files.surviving_directory(directory)
    _verify_together(directory)
    scalars = _read_scalars(directory)
    buffers = {name: torch.zeros_like(moment) for name, moment in optimizer.moments().items()}
    _refuse_missing(directory, "optimizer state", buffers, scalars.moments, "keep training.optimizer as it was")
    remedy = (
        "keep objective.algorithm and objective.value_model as they were, or start from the checkpoint's hf directory "
        "as model.path"
    )
    _refuse_missing(directory, "tensors", extra or {}, scalars.extra, remedy)
    _refuse_other_adapters(directory, weights)
    if scalars.base is not None and scalars.base != _base(weights):
        raise StreamRLError(
            f"model.path: the adapters of checkpoint {str(directory)!r} belong to a model with other weights: give the "
            f"one that {directory / ADAPTER} names, not a model with the adapters merged"
        )
    masters_L = weights.masters.full()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            reader = HuggingFaceStorageReader(str(directory / "trainer"))
            _load(_tensors(weights, masters_L, buffers, extra or {}), storage_reader=reader, no_dist=_is_single_rank())
        except (CheckpointException, RuntimeError, ValueError) as error:
            raise StreamRLError(f"checkpoint {str(directory)!r} does not fit this model: {error}") from error
    weights.masters.load(masters_L)
    optimizer.load_moments(buffers, scalars.optimizer_steps)
    return scalars.state


def save_hugging_face(directory: Path, published: Tensors, model_path: Path) -> None:
    """Write a directory that transformers and vLLM load: the published bfloat16 tensors, tied ones once, the constants
    of the original directory in its bits, and all of its files except its weights (tokenizer, generation settings,
    chat template)."""
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
    save_torch_state_dict(published | _constants(model_path, published), directory, metadata={"format": "pt"})


def _constants(model_path: Path, published: Mapping[str, Tensor]) -> Tensors:
    """Return the stored tensors that are not trained, such as the expert bias of DeepSeek-V3. A head that shares the
    weight of the embedding is not among them."""
    tied = read_model_config(model_path).get("tie_word_embeddings")
    constants: Tensors = {}
    for name, stored in stored_tensors(model_path).items():
        if name not in published and not (tied and name.endswith("lm_head.weight")):
            with safe_open(stored.file, framework="pt") as file:
                constants[name] = file.get_tensor(name)
    return constants


def save_shards(files: Iterable[Path], directory: Path, largest: str) -> None:
    """Write the tensors of safetensors ``files`` to new files of at most ``largest``, such as 2GB, with their index.
    Raises ``ValueError`` where ``largest`` is not a size."""
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    save_torch_state_dict(tensors, directory, max_shard_size=largest, metadata={"format": "pt"})


# ---- tensors -------------------------------------------------------------------------------------


def _tensors(
    weights: PublishedWeights, masters_L: Tensor, moments: Mapping[str, Tensor], extra: Mapping[str, Tensor]
) -> Tensors:
    """Views of all tensors that a checkpoint has: loading writes into them."""
    flat_vectors = {"master": masters_L, **moments}
    tensors = {
        f"{kind}.{name}": tensor
        for kind, vector_L in flat_vectors.items()
        for name, tensor in weights.as_tensors(vector_L).items()
    }
    return tensors | {f"extra.{name}": tensor.detach() for name, tensor in extra.items()}


def _write_tensors(directory: Path, tensors: Tensors) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
            _save(tensors, storage_writer=writer, no_dist=_is_single_rank())
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise StreamRLError(f"cannot write checkpoint files in {str(directory)!r}: {causes}") from error


def _refuse_full_disk(directory: Path, tensors: list[Tensor], min_free_bytes: int) -> None:
    # The numel of a distributed tensor counts the elements of all ranks.
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    make_directory(directory.parent)
    free = shutil.disk_usage(directory.parent).free
    if free - size < min_free_bytes:
        raise DiskFull(
            f"checkpoint {str(directory)!r} takes {size / GIB:.2f} GiB and {free / GIB:.2f} GiB are free there: less "
            f"than {min_free_bytes / GIB:.2f} GiB (checkpoint.advanced.min_free_gib) would be left; make room, keep "
            "fewer (checkpoint.keep, keep_best, keep_every), or lower min_free_gib"
        )


# ---- checks --------------------------------------------------------------------------------------


def _verify_together(directory: Path) -> None:
    """Verify the files, a part of them on each rank. Every rank raises the faults of all ranks."""

    def faults_of_part() -> list[str]:
        digests = durable_files.read_digests(directory)
        names = sorted(digests)[get_rank() :: get_world_size()]
        return durable_files.faults(directory, {name: digests[name] for name in names})

    faults = [fault for rank_faults in _on_every_rank(faults_of_part) for fault in rank_faults]
    durable_files.refuse_faults(directory, faults)


def _read_scalars(directory: Path) -> _Scalars:
    try:
        encoded = (directory / SCALARS).read_bytes()
        file_format = msgpack.decode(encoded, type=_Format).format
        if file_format != FORMAT:
            raise StreamRLError(f"checkpoint {str(directory)!r} has format {file_format}; this version reads {FORMAT}")
        return msgpack.decode(encoded, type=_Scalars)
    except (OSError, *UNDECODABLE) as error:
        raise StreamRLError(f"{str(directory)!r} is not a checkpoint of streamrl: {error}") from error


def _refuse_missing(directory: Path, kind: str, tensors: Mapping[str, Tensor], saved_names: Texts, remedy: str) -> None:
    missing = sorted(set(tensors) - set(saved_names))
    if missing:
        raise StreamRLError(
            f"checkpoint {str(directory)!r} has no {kind} {', '.join(missing)}, which this recipe needs "
            f"(it has {', '.join(saved_names) or 'none'}): {remedy}"
        )


def _refuse_other_adapters(directory: Path, weights: PublishedWeights) -> None:
    file = directory / ADAPTER / ADAPTER_TENSORS
    if not file.exists():
        return
    with safe_open(file, "pt") as tensors:
        before = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors.keys()}  # noqa: SIM118
    now = {shard.name.rpartition(".lora_")[0] for shard in weights.master_shards}
    for modules, text in ((before - now, "lacks the adapters on"), (now - before, "has adapters of its own on")):
        if modules:
            names = ", ".join(sorted(modules)[:3])
            raise StreamRLError(
                f"lora.targets: this run {text} {len(modules)} modules beside checkpoint {str(directory)!r}, such as "
                f"{names}: keep lora.targets as it was"
            )


def _base(weights: PublishedWeights) -> int | None:
    """The sum over the bits of the base, of all ranks; None without adapters. Collective."""
    if weights.base_part is None:
        return None
    return sum(_on_every_rank(lambda: weights.base_part or 0)) % (1 << 64)


# ---- ranks ---------------------------------------------------------------------------------------


def _is_single_rank() -> bool:
    """Whether there is one rank, which plans without other ranks. The plans of several ranks travel as torch's pickles
    (SECURITY.md, ranks)."""
    return get_world_size() == 1


def _on_every_rank(work: Callable[[], T]) -> list[T]:
    """Run ``work`` on each rank, and return the results of all ranks (results of other ranks are msgpack's own types).
    Raises ``StreamRLError`` on every rank when ``work`` fails on one of them."""
    outcome: tuple[T | None, str]
    cause: Exception | None = None
    try:
        outcome = (work(), "")
    except (OSError, RuntimeError, SafetensorError, StreamRLError) as error:
        outcome = (None, str(error))
        cause = error
    payloads = all_gather_bytes(msgpack.encode(outcome))
    outcomes: list[tuple[T, str]] = [msgpack.decode(payload, type=tuple[Any, str]) for payload in payloads]
    for _, failure in outcomes:
        if failure:
            raise StreamRLError(failure) from cause
    return [result for result, _ in outcomes]


def _on_first_rank(work: Callable[[], None]) -> None:
    """Run ``work`` on rank 0 while the other ranks wait. Raises ``StreamRLError`` on every rank when it fails."""
    _on_every_rank(work if get_rank() == 0 else lambda: None)
