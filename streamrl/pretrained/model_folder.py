"""Check of a model folder: its author must not get code to run here. Read without torch. Weights come as safetensors,
which are numbers only; a pickle runs code when it is loaded, and a module of the folder when its configuration names
it. Nothing here reads either, but other code that is given the folder might."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import UNDECODABLE

CODE = frozenset({".py", ".pyc", ".pyd", ".so"})
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill"})
CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
"""Keys of a configuration that ask for code of the folder."""

LARGEST_CONFIGURATION = 64 << 20
MOST_FILES = 10_000


def unsafe_content(directory: Path) -> str:
    """Return which file in ``directory`` is refused, and the remedy; empty: none. A folder that is not there holds
    nothing."""
    for path in _files(directory, own_folder(directory)):
        if isinstance(path, str):
            return path
        if path.suffix.lower() in CODE:
            return f"holds code ({path.name}), which this program never runs: copy the folder without it"
        # Other programs put all of a commit into the cache: what loads a model there reads its safetensors alone.
        if path.suffix.lower() in PICKLES and own_folder(directory) == directory.resolve():
            return (
                f"holds a pickle ({path.name}), which runs code when it is loaded: copy the folder without it, or save "
                "the model again with safe_serialization=True"
            )
        if path.suffix == ".json" and path.parent == directory and (key := _asks_for_code(path)):
            return f"asks for code of its own ({key} in {path.name}): take the key out, or another model"
    return ""


def read_bounded(path: Path, most: int = LARGEST_CONFIGURATION) -> bytes:
    """The content of a file that is no weights. Raises ``ValueError`` where it is larger than any is, and
    ``OSError``."""
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path.name} has {size} bytes, and at most {most} are read")
    return path.read_bytes()


def own_folder(directory: Path) -> Path:
    """The folder that links of a model may lead into: its own, or that of the model in the Hugging Face cache, where
    ``snapshots/<commit>`` links to ``blobs``."""
    real = directory.resolve()
    in_cache = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return real.parent.parent if in_cache else real


def _files(directory: Path, own: Path) -> Iterator[Path | str]:
    """Files below ``directory``, or a complaint."""
    count = 0
    for parent, folders, names in os.walk(directory):  # follows no links
        for name in [*folders, *names]:
            path = Path(parent, name)
            count += 1
            if count > MOST_FILES:
                yield f"has more than {MOST_FILES} files: give the directory of one model"
                return
            if path.is_symlink() and not path.resolve().is_relative_to(own):
                yield f"has a link that leads out of it ({path.name} to {path.resolve()}): copy the file instead"
            elif name in names:
                yield path


def _asks_for_code(path: Path) -> str:
    """The key in a configuration file that asks for code; empty: none, or it is none that can be read."""
    try:
        content: dict[str, Any] = msgspec.json.decode(read_bounded(path), type=dict[str, Any])
    except (OSError, *UNDECODABLE):
        return ""
    parts = [content, *(part for part in content.values() if isinstance(part, dict))]
    return next((key for part in parts for key in CODE_KEYS if part.get(key)), "")
