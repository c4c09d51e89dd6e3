"""Files of a model folder that contradict each other: one model is taken, and all else is refused in words."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.weight_files import ModelDirectoryError, stored_tensors, weight_files

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 2, "vocab_size": 8}


def write_weights(
    file: Path, *names: str, shape: tuple[int, ...] = (2,), more: bytes = b"", dtype: str = "F32"
) -> None:
    size = 4 * math.prod(shape)
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [place * size, (place + 1) * size]}
        for place, name in enumerate(names)
    }
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(size * len(names)) + more)


def folder_of(directory: Path, files: dict[str, str], index: dict[str, str] | None) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for file, names in files.items():
        write_weights(directory / file, *names.split())
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


SHARDS = {FIRST: "a", SECOND: "b"}
OF_SHARDS = {"a": FIRST, "b": SECOND}
TAKEN: dict[str, tuple[dict[str, str], dict[str, str] | None, int]] = {
    "one file": ({"model.safetensors": "a b"}, None, 1),
    "one file of another name": ({"pytorch_model.safetensors": "a"}, None, 1),
    "one file that the index names": ({"model.safetensors": "a"}, {"a": "model.safetensors"}, 1),
    "shards and their index": (SHARDS, OF_SHARDS, 2),
    "shards of one save without their index": (SHARDS, None, 2),
    "shards beside the original format": ({**SHARDS, "consolidated.safetensors": "x"}, OF_SHARDS, 2),
    "shards beside those of an older save": ({**SHARDS, "model-00001-of-00003.safetensors": "a"}, OF_SHARDS, 2),
}
REFUSED: dict[str, tuple[dict[str, str], dict[str, str] | None, str]] = {
    "an index left behind": ({"model.safetensors": "a"}, OF_SHARDS, f"no {FIRST}, .*remove {INDEX} if model.safe"),
    "an index of other shards that are there": (
        {"model.safetensors": "a", **SHARDS},
        OF_SHARDS,
        "one of the two saves",
    ),
    "a shard that is missing": ({FIRST: "a"}, OF_SHARDS, f"has no {SECOND}, which {INDEX} names: copy or save"),
    "a shard that is missing, without an index": ({FIRST: "a"}, None, f"has no {SECOND}, a part of the same save"),
    "an index into another folder": ({FIRST: "a"}, {"a": f"other/{FIRST}"}, "has no other/"),
    "two saves": ({"model.safetensors": "a", "adapter_model.safetensors": "b"}, None, r"more than one save \(adapter"),
    "shards of two saves": ({**SHARDS, "model-00001-of-00003.safetensors": "c"}, None, "more than one save"),
    "the original format": ({"model.safetensors": "a", "consolidated.safetensors": "x"}, None, "more than one save"),
    "a tensor in two shards": ({FIRST: "a", SECOND: "a b"}, OF_SHARDS, f"'a' in two files .{FIRST} and {SECOND}"),
    "an index of another save": (SHARDS, OF_SHARDS | {"c": SECOND}, f"has no 'c' in {SECOND}, where {INDEX} says"),
    "an index without a tensor": (SHARDS, {}, f"a broken {INDEX}"),
    "nothing": ({}, None, r"no \*\.safetensors weights"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_files_that_are_one_model_are_taken(tmp_path: Path, name: str) -> None:
    files, index, count = TAKEN[name]
    folder = folder_of(tmp_path, files, index)
    assert len(weight_files(folder)) == count
    assert len(stored_tensors(folder)) == len(
        (set(index or {})) or {n for names in files.values() for n in names.split()}
    )


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_not_one_model_are_refused_by_name(tmp_path: Path, name: str) -> None:
    files, index, said = REFUSED[name]
    with pytest.raises(ModelDirectoryError, match=said):
        read_model_facts(folder_of(tmp_path, files, index))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "it is cut"),
    "with a tail": (lambda file: write_weights(file, "a", more=b"tail"), "it is too long: .* copy or save it again"),
    "with too few bytes": (lambda file: write_weights(file, "a", dtype="F64"), r"'a' .F64, \[2\]. cannot lie in"),
    "with no bytes": (lambda file: file.write_bytes(b""), "broken model.safetensors"),
    "a pointer of git": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "broken model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_no_library_opens_is_refused(tmp_path: Path, name: str) -> None:
    spoil, said = BROKEN[name]
    folder = folder_of(tmp_path, {"model.safetensors": "a"}, None)
    spoil(folder / "model.safetensors")
    with pytest.raises(ModelDirectoryError, match=said):
        read_model_facts(folder)
