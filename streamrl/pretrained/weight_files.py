"""Weight files of a model folder and the tensors in their headers, read without torch. The dry run, trainer ranks and
engine processes use them.

transformers loads ``model.safetensors``, or the files of the index where there is no such file; vLLM loads the files of
the index, or every ``*.safetensors`` where there is no index. A folder in which they would load different files is
refused."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, convert, json

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.base.types import JsonObject, Shape, TextMapping, TextsByName
from streamrl.pretrained.lfs_pointers import pointer_problem
from streamrl.pretrained.model_folder import read_bounded

LARGEST_SAFETENSORS_HEADER = 100_000_000
MOST_TENSORS = 100_000
LARGEST_SIZE = 1 << 40
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_BITS = {"F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16} | {
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64}  # fmt: skip
"""Bits of an element by the code of its type; codes that begin with F8 have eight."""

Side = Annotated[int, Meta(ge=0, le=LARGEST_SIZE)]


class ModelDirectoryError(StreamRLError):
    """The directory has no model that can be read or trained. The message is a sentence without its subject, the
    directory."""


class _TensorEntry(Struct, frozen=True):
    """The entry of one tensor in a safetensors header."""

    dtype: str
    shape: Annotated[tuple[Side, ...], Meta(max_length=16)]
    data_offsets: tuple[Side, Side]


class _Index(Struct, frozen=True):
    weight_map: TextsByName


class StoredTensor(Struct, frozen=True):
    """One tensor of a model. ``dtype``: code of its type; ``start``: offset of its first byte in ``file``."""

    file: Path
    dtype: str
    shape: Shape
    start: int


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of the model, by name. Raises ``ModelDirectoryError`` with the names of the files and the
    remedy where a file is missing, or where transformers and vLLM would load different files."""
    files = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    named = sorted(set(_weight_map(directory).values()))
    if named:
        missing = [name for name in named if name not in files]
        if missing:
            remedy = "copy or save the model again"
            if SINGLE_FILE in files:
                remedy = f"remove {INDEX_FILE} if {SINGLE_FILE} is the whole model, or {remedy}"
            raise ModelDirectoryError(f"has no {listed(missing)}, which {INDEX_FILE} names: {remedy}")
        if SINGLE_FILE in files and SINGLE_FILE not in named:
            raise ModelDirectoryError(
                f"has {SINGLE_FILE}, which transformers loads, and {INDEX_FILE}, which vLLM follows and which names "
                f"{listed(named)}: remove the files of one of the two saves"
            )
        return [files[name] for name in named]
    if not files:
        raise ModelDirectoryError(
            "has no *.safetensors weights: copy the whole folder, or save the model with safe_serialization=True"
        )
    _refuse_several_saves(list(files))
    return list(files.values())


def _refuse_several_saves(names: list[str]) -> None:
    """Raises ``ModelDirectoryError`` unless ``names`` are one file or the shards of one save."""
    parts = [_SHARD.fullmatch(name) for name in names]
    saves = {(part[1], part[3]) if part else name for name, part in zip(names, parts, strict=True)}
    if len(saves) > 1:
        raise ModelDirectoryError(
            f"has weight files of more than one save ({listed(names)}) and no {INDEX_FILE} that says which are the "
            "model: remove the others"
        )
    if parts[0] is None:
        return
    prefix = parts[0][1]
    count = parts[0][3]
    shards = [f"{prefix}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    missing = [name for name in shards if name not in names]
    if missing:
        raise ModelDirectoryError(f"has no {listed(missing)}, a part of the same save: copy or save the model again")


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the model by name, from the headers of ``weight_files``; values are not read. Raises
    ``ModelDirectoryError``, also for a tensor in two files and for an index that does not fit its files."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for name, tensor in read_safetensors_header(file).items():
            if name in tensors:
                names = f"{tensors[name].file.name} and {file.name}"
                raise ModelDirectoryError(f"has {name!r} in two files ({names}): remove the stale one")
            tensors[name] = tensor
    for name, file_name in _weight_map(directory).items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ModelDirectoryError(
                f"has no {name!r} in {file_name}, where {INDEX_FILE} says it is: the index is of another save; copy or "
                "save the model again"
            )
    return tensors


def _weight_map(directory: Path) -> TextMapping:
    """Return the file of each tensor by the index; empty: there is no index. Raises ``ModelDirectoryError``."""
    path = directory / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        weight_map = json.decode(read_bounded(path), type=_Index).weight_map
        if not weight_map:
            raise ValueError("it names no tensor")
        return weight_map
    except (OSError, *UNDECODABLE) as error:
        raise ModelDirectoryError(f"has a broken {INDEX_FILE} ({error}): save the model again") from error


def read_safetensors_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name; values are not read.

    Raises ``ModelDirectoryError``, also for a file that the safetensors library would refuse: it ends before or after
    its tensors, has a gap between two tensors, or the bytes of a tensor do not fit its shape."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(LARGEST_SAFETENSORS_HEADER, size - 8):
                raise ValueError(f"its header claims {length} bytes of {size}")
            header = json.decode(stream.read(length), type=JsonObject)
        header.pop("__metadata__", None)
        if len(header) > MOST_TENSORS:
            raise ValueError(f"{len(header)} tensors, at most {MOST_TENSORS}")
        entries = {name: convert(entry, _TensorEntry) for name, entry in header.items()}
        end = 8 + length + max((entry.data_offsets[1] for entry in entries.values()), default=0)
        if size != end:
            raise ValueError(f"it is {'cut' if size < end else 'too long'}: {size} bytes of {end}")
        _refuse_gaps(entries)
    except (OSError, struct.error, *UNDECODABLE) as error:
        reason = pointer_problem(file) or error
        raise ModelDirectoryError(f"has a broken {file.name}: {reason}; copy or save it again") from error
    data_start = 8 + length
    return {
        name: StoredTensor(file, entry.dtype, entry.shape, data_start + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _refuse_gaps(entries: Mapping[str, _TensorEntry]) -> None:
    """Raises ``ValueError`` unless the tensors follow each other without a gap, each with the bytes of its shape."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        bits = _BITS.get(entry.dtype, 8 if entry.dtype.startswith("F8") else 0)
        if start != end or stop < start or (bits and stop - start != math.prod(entry.shape) * bits // 8):
            raise ValueError(f"{name!r} ({entry.dtype}, {list(entry.shape)}) cannot lie in bytes {start} to {stop}")
        end = stop


def float32_tensors(tensors: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Return the names of tensors that a model stores in float32 beside 16-bit weights, such as the decays of Gated
    DeltaNet: they are trained, published and exported in float32. Empty where most elements are float32: such a model
    is published in bfloat16."""
    names = frozenset(name for name, tensor in tensors.items() if tensor.dtype == "F32")
    elements = sum(math.prod(tensors[name].shape) for name in names)
    return names if 2 * elements < sum(math.prod(tensor.shape) for tensor in tensors.values()) else frozenset()


def listed(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
