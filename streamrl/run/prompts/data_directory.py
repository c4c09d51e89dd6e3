"""Finds the files of a data set in a local directory: a clone or snapshot of the Hub, or the output of ``save_to_disk``
of ``datasets``. ``open_prompts`` calls it in the process that draws or checks prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, field, json

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.run.prompts.data_files import DEFAULT, choose_files, files_of_split

_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


class _SavedFile(Struct):
    """A file of a ``_SavedState``."""

    filename: str


class _SavedState(Struct):
    """``state.json`` of ``Dataset.save_to_disk``."""

    files: list[_SavedFile] = field(name="_data_files")


class _SavedSplits(Struct):
    """``dataset_dict.json`` of ``DatasetDict.save_to_disk``."""

    splits: list[str]


def find_files(path: Path, config: str = "", split: str = "") -> list[Path]:
    """Return ``path`` itself, or the files of one split of a dataset directory, in order. Raises ``RecipeError``, whose
    sentence begins with the verb, with the names of the splits when there are several and ``split`` is none of them."""
    if not path.is_dir():
        if split:
            raise RecipeError(f'is a file and has no split "{split}": remove the option')
        return [path]
    if (path / _SAVED_SPLITS).is_file():
        splits = _decode(path / _SAVED_SPLITS, _SavedSplits).splits
        [name] = files_of_split({DEFAULT: {name: [name] for name in splits}}, split=split)
        return find_files(_inside(path, name))
    if (path / _SAVED).is_file():
        if split:
            raise RecipeError(f'has no splits, so no "{split}": remove the option')
        return [_inside(path, file.filename) for file in _decode(path / _SAVED, _SavedState).files]
    card = {}
    names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    if "README.md" in names:
        from huggingface_hub.repocard import metadata_load  # takes a third of a second

        card = metadata_load(path / "README.md") or {}
    data = choose_files(names, card, config, split)
    if not data.names:
        raise RecipeError(
            "is no dataset directory (no .parquet, .jsonl, .json, .csv or .arrow files): correct the "
            "path, or convert it"
        )
    if data.unread:
        raise RecipeError(f"has {data.names[0]}, a format that is not read: convert it to parquet")
    return [path / name for name in data.names]


def _inside(path: Path, name: str) -> Path:
    """Return the path of a file in a dataset directory. Raises ``RecipeError`` for a name that leads outside."""
    if name in ("", "..") or Path(name).name != name or "\0" in name:
        raise RecipeError(f"names {name!r:.80}, which is no file of that directory: save the dataset again")
    return path / name


def _decode(path: Path, kind: type[Any]) -> Any:
    try:
        return json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE) as error:
        raise RecipeError(f"cannot be read ({error}): save the dataset again") from error
