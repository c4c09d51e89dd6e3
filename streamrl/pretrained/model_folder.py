"""Check that a model folder runs no code of its author, in the dry run and in each process that loads a model. The
check needs no torch. Safetensors files have numbers only; a pickle runs code when it is loaded, and a module of the
folder runs when its configuration names it. streamrl loads neither, but transformers and vLLM might."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import json

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import JsonObject
from streamrl.pretrained.lfs_pointers import FETCH, IS_POINTER, POINTER

CODE = frozenset({".py", ".pyc", ".pyd", ".so"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill"})
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Keys of a configuration that make transformers load code of the folder."""

LARGEST_CONFIGURATION = 64 << 20
MOST_FILES = 10_000


def unsafe_content(directory: Path) -> str:
    """Return a predicate about the first refused file in ``directory``, with the remedy, which the caller puts behind
    the name of the folder; empty: no file is refused, or the folder does not exist."""
    for path in _files(directory, own_folder(directory)):
        if isinstance(path, str):
            return path
        if path.suffix.lower() in CODE:
            return f"holds code ({path.name}), which this program never runs: copy the folder without it"
        # A folder of the Hugging Face cache may have all files of a commit, pickles too; its model is loaded from the
        # safetensors alone.
        if path.suffix.lower() in PICKLES and own_folder(directory) == directory.resolve():
            return (
                f"holds a pickle ({path.name}), which runs code when it is loaded: copy the folder without it, or save "
                "the model again with safe_serialization=True"
            )
        if path.suffix == ".json" and path.parent == directory and (key := _asks_for_code(path)):
            return f"asks for code of its own ({key} in {path.name}): take the key out, or another model"
    return ""


def read_bounded(path: Path, most_bytes: int = LARGEST_CONFIGURATION) -> bytes:
    """Read a file that is no weight file. Raises ``ValueError`` for more than ``most_bytes`` bytes and for a pointer of
    git-lfs, and ``OSError``."""
    size = path.stat().st_size
    if size > most_bytes:
        raise ValueError(f"{path.name} has {size} bytes, and at most {most_bytes} are read")
    content = path.read_bytes()
    if content.startswith(POINTER):
        raise ValueError(f"it {IS_POINTER}: {FETCH}")
    return content


def own_folder(directory: Path) -> Path:
    """Return the folder into which links of a model may lead: its own, or the model's folder in the Hugging Face cache,
    where ``snapshots/<commit>`` links to ``blobs``."""
    real = directory.resolve()
    in_cache = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if in_cache else real


def _files(directory: Path, allowed: Path) -> Iterator[Path | str]:
    """Yield the files below ``directory``, or a text about a refused one. ``allowed``: folder into which links may
    lead."""
    count = 0
    for parent, folders, names in os.walk(directory):  # follows no links
        for name in [*folders, *names]:
            path = Path(parent, name)
            count += 1
            if count > MOST_FILES:
                yield f"has more than {MOST_FILES} files: give the directory of one model"
                return
            if path.is_symlink() and not path.resolve().is_relative_to(allowed):
                yield f"has a link that leads out of it ({path.name} to {path.resolve()}): copy the file instead"
            elif name in names:
                yield path


def _asks_for_code(path: Path) -> str:
    """Return the key of a configuration file that makes transformers load code; empty: there is none, or the file
    cannot be read."""
    try:
        content: JsonObject = json.decode(read_bounded(path), type=JsonObject)
    except (OSError, *UNDECODABLE):
        return ""
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    return next((key for part in parts for key in CODE_KEYS if part.get(key)), "")
