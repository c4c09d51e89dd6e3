"""Choice of the files of a data set, in a local directory or in a repository of the Hub: by the configurations that its
README declares, or else by the rules of the library ``datasets`` for the names of files. Pure; ``prompt_tables`` (the
process that opens prompts) and ``prepare.hub.fetch`` (the process that asks the Hub) call it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from fsspec.utils import glob_translate
from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping

DEFAULT = "default"
FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    ".parquet": "parquet",
    ".arrow": "Arrow",
}
"""Formats of files of rows that are read, by the ending of the name."""
_PREFERRED = (".parquet", ".jsonl", ".ndjson", ".json", ".csv")
"""Where a data set has as many files of one ending as of another, the earlier ending is its format (``datasets``)."""
_UNREAD = (
    ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".xml", ".h5", ".xlsx", ".pkl", ".png", ".jpg", ".jpeg", ".wav",
    ".mp3", ".flac", ".mp4",
)  # fmt: skip
_NO_DATA = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_SPLITS = {"train": "train|training", "validation": "validation|valid|dev|val", "test": "test|testing|eval|evaluation"}
"""Words in the names of folders and files that say which split a file is of (``datasets.data_files``)."""
_WORDS = {split: re.compile(rf"(?:.*[-._ 0-9])?(?:{words})(?:[-._ 0-9].*)?") for split, words in _SPLITS.items()}
_SHARDED = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_](\d+)(-[0-9a-f]+)?$|[-_.]\d+$|^\d+$")

_WITHOUT_SPLIT = 3
"""Rank of files whose names say no split."""

Splits = dict[str, list[str]]
"""Names of files by split."""


class _Place(NamedTuple):
    """Configuration and split that the name of a file says. ``rank``: files of a lower rank are the data set, where
    there are any."""

    config: str
    split: str
    rank: int


class DataFiles(Struct, frozen=True):
    """Files of one split, which all have one format. ``unread``: the format is not read here."""

    names: Sequence[str]
    unread: bool = False

    @property
    def read_as_they_are(self) -> bool:
        """Whether the types of all values are known: a CSV or a whole JSON document is read as its reader guesses."""
        return bool(self.names) and not self.unread and not self.names[0].endswith((".json", ".csv", ".tsv"))


def choose_files(names: Iterable[str], card: JsonMapping, config: str = "", split: str = "") -> DataFiles:
    """Return the files of one split among ``names``, without files where none has rows. ``card``: metadata of the
    README. Raises ``RecipeError``, whose sentence begins with the verb, where the recipe must choose a configuration or
    a split, and where files of the split are missing."""
    places = {name for name in names if not _is_hidden(name) and PurePosixPath(name).name not in _NO_DATA}
    data = sorted(name for name in places if PurePosixPath(name).suffix in (*FORMATS, *_UNREAD))
    declared, default = _declared_splits(card, data)
    configs = declared or _splits_by_name(data)
    if not any(configs.values()):
        return DataFiles(())
    if not config and split.rpartition("/")[0] in configs:
        config, _, split = split.rpartition("/")
    files = _of_one_format(files_of_split(configs, config, split, default=default))
    _refuse_missing_shards(files.names)
    return files


def choose_converted(names: Iterable[str], config: str, split: str) -> DataFiles:
    """Return the files of one split of the Hub's parquet copy (``CONFIG/SPLIT/0000.parquet``; ``partial-SPLIT`` is the
    first part of a large split), without files where there is no copy. Raises ``RecipeError`` as ``choose_files``."""
    configs: dict[str, Splits] = {}
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        folder_config, _, folder_split = folder.partition("/")
        if file.endswith(".parquet"):
            splits = configs.setdefault(folder_config, {})
            splits.setdefault(folder_split.removeprefix("partial-"), []).append(name)
    if not configs:
        return DataFiles(())
    return DataFiles(files_of_split(configs, config, split))


def matching(patterns: str, names: Iterable[str]) -> list[str]:
    """Return the names that one of the patterns matches, which have ``|`` between them."""
    expression = re.compile("|".join(glob_translate(pattern.removeprefix("./")) for pattern in patterns.split("|")))
    return sorted(name for name in names if expression.fullmatch(name))


def compact(files: Sequence[str], names: Iterable[str]) -> str:
    """Return patterns that match exactly ``files`` among ``names``: a single pattern for the shards of a split."""
    pattern = re.sub(r"\d+([-_]of[-_])", r"*\1", files[0])
    return pattern if matching(pattern, names) == list(files) else "|".join(files)


def _is_hidden(name: str) -> bool:
    *folders, file = PurePosixPath(name).parts
    return file.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)


def _declared_splits(card: JsonMapping, data: Sequence[str]) -> tuple[dict[str, Splits], str]:
    """Return the splits of each configuration that the README declares (empty: none), and the default one."""
    configs: dict[str, Splits] = {}
    default = DEFAULT
    for entry in card.get("configs") or ():
        config = str(entry.get("config_name", DEFAULT))
        folder = str(entry.get("data_dir") or "").strip("/")
        if entry.get("default"):
            default = config
        declared = entry.get("data_files")
        if declared is None:
            inside = [name for name in data if not folder or name.startswith(f"{folder}/")]
            for splits in _splits_by_name(inside).values():
                configs.setdefault(config, {}).update(splits)
            continue
        if isinstance(declared, list) and declared and isinstance(declared[0], dict):
            declared = {str(part.get("split", "train")): part["path"] for part in declared}
        by_split = declared if isinstance(declared, dict) else {"train": declared}
        for split, paths in by_split.items():
            all_paths = [paths] if isinstance(paths, str) else paths
            patterns = "|".join(str(PurePosixPath(folder, path)) for path in all_paths)
            configs.setdefault(config, {})[split] = matching(patterns, data)
    return configs, default


def _splits_by_name(data: Sequence[str]) -> dict[str, Splits]:
    """Return the splits of each configuration, which folders that say no split name, where no README declares any.
    Files without a split are ``train`` together; where there are several of them, each is a split of its own name,
    too."""
    places = {name: _place(name) for name in data}
    rank = min((place.rank for place in places.values()), default=0)
    configs: dict[str, Splits] = {}
    for name, place in places.items():
        if place.rank == rank:
            configs.setdefault(place.config, {}).setdefault(place.split or "train", []).append(name)
    for config, splits in configs.items():
        own_names = dict.fromkeys(filter(None, map(_own_name, splits.get("train", ()))))
        if rank == _WITHOUT_SPLIT and len(own_names) > 1:
            splits |= {stem: [name for name in splits["train"] if _own_name(name) == stem] for stem in own_names}
        configs[config] = {split: splits[split] for split in (*_SPLITS, *splits) if split in splits}
    return configs


def _place(name: str) -> _Place:
    *folders, file = PurePosixPath(name).parts
    config = "/".join(part for part in folders if part != "data" and not _split_of(part)) or DEFAULT
    in_folder = next(filter(None, map(_split_of, folders)), "")
    sharded = _SHARDED.fullmatch(name)
    if sharded:
        return _Place(config, sharded[1], 0)
    if in_folder:
        return _Place(config, in_folder, 1)
    split = _split_of(file)
    return _Place(config, split, 2 if split else _WITHOUT_SPLIT)


def _split_of(part: str) -> str:
    """Return the split that the name of a folder or file says; empty for none."""
    return next((split for split, words in _WORDS.items() if words.fullmatch(part)), "")


def _own_name(name: str) -> str:
    """Return the name of a file without its ending and the number of its shard."""
    return _SHARD.sub("", PurePosixPath(name).stem)


def files_of_split(
    configs: Mapping[str, Splits], config: str = "", split: str = "", *, default: str = DEFAULT
) -> list[str]:
    """Return the files of one split. Raises ``RecipeError`` with the names of all where the recipe must choose one."""
    having = [name for name, splits in configs.items() if split in splits]
    if not config:
        only = configs if len(configs) == 1 else having
        config = next(iter(only)) if len(only) == 1 else default
    if config not in configs:
        problem = f'has no configuration "{config}"' if config != DEFAULT else "has several configurations"
        raise RecipeError(f"{problem}: set ?config=NAME, with one of {', '.join(configs)}")
    of_config = configs[config]
    if not split and len(of_config) == 1:
        split = next(iter(of_config))
    if split not in of_config:
        all_files = dict.fromkeys(name for files in of_config.values() for name in files)
        if same_name := [name for name in all_files if split and _own_name(name) == split]:
            return same_name
        problem = f'has no split "{split}"' if split else "has several splits"
        if len(configs) > 1:
            problem += f" in its configuration {config}"
        raise RecipeError(f"{problem}: set split=NAME, with one of {', '.join(of_config) or '(none)'}")
    return of_config[split]


def _of_one_format(names: Sequence[str]) -> DataFiles:
    """Return the files of the most frequent format. Files of metadata count only where they are alone."""
    rows = [name for name in names if PurePosixPath(name).name not in _METADATA] or names
    counts = Counter(PurePosixPath(name).suffix for name in rows)
    preferred = [*(ending for ending in _PREFERRED if ending in counts), *counts]
    ending = max(preferred, key=counts.__getitem__, default="")
    same_format = [other for other in counts if FORMATS.get(other, other) == FORMATS.get(ending, ending)]
    return DataFiles([name for name in rows if name.endswith(tuple(same_format))], unread=ending in _UNREAD)


def _refuse_missing_shards(names: Sequence[str]) -> None:
    """Raise ``RecipeError`` where shards of ``NAME-00000-of-00002`` are not there."""
    shards = [shard for name in names if (shard := _SHARD.search(PurePosixPath(name).stem)) and shard[1]]
    counts = Counter((shard.string[: shard.start()], int(shard[1])) for shard in shards)
    for (stem, count), present in counts.items():
        if present < count:
            raise RecipeError(f"has {present} of the {count} files {stem}-*-of-{count:05}: download it again")
