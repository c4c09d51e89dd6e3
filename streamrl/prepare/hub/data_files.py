"""Choice of files of a repository: those that a model needs, and those of one configuration and split of a data set, by
the configurations that its README declares, or else by the names of its files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from streamrl.base.errors import RecipeError

WEIGHTS = ".safetensors"
DEFAULT = "default"
_OF_MODELS = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken", "README.md")
_OF_OTHER_FORMATS = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")
_READABLE = (".parquet", ".jsonl", ".ndjson")
_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+(-[0-9a-f]+)?$|[-_.]\d+$|^\d+$")
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

Splits = dict[str, dict[str, str]]
"""Patterns of files, with ``|`` between them, by configuration and split."""


def model_files(names: Iterable[str]) -> list[str]:
    """The files of a model that are read: safetensors, configuration, tokenizer, chat templates. No pickles, no other
    formats of the same weights, no code."""
    places = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    chosen = [name for name in places if name.endswith(_OF_MODELS) and not name.endswith(_OF_OTHER_FORMATS)]
    second = [name for name in chosen if name.endswith(WEIGHTS) and name.startswith("consolidated")]
    only = len(second) == sum(name.endswith(WEIGHTS) for name in chosen)
    return chosen if only else [name for name in chosen if name not in second]


def declared_splits(card: Mapping[str, Any], names: Sequence[str]) -> tuple[Splits, str]:
    """Splits that the metadata of a README declares, and the name of its default configuration; empty: none."""
    found: Splits = {}
    default = ""
    for entry in card.get("configs") or ():
        config = str(entry.get("config_name", DEFAULT))
        files = entry.get("data_files")
        below = str(entry.get("data_dir") or "").strip("/")
        default = config if entry.get("default") or config == DEFAULT else default
        if files is None:
            inside = [name for name in names if name.startswith(f"{below}/" if below else "")]
            found[config] = {split: paths for one in splits_by_name(inside).values() for split, paths in one.items()}
            continue
        listed = files if isinstance(files, list) and files and isinstance(files[0], dict) else [{"path": files}]
        for one in listed:
            paths = [one["path"]] if isinstance(one["path"], str) else one["path"]
            patterns = "|".join(str(PurePosixPath(below, path)) for path in paths)
            found.setdefault(config, {})[str(one.get("split", "train"))] = patterns
    return found, default


def splits_by_name(names: Iterable[str]) -> Splits:
    """Configurations and splits by where files lie: ``CONFIG/SPLIT-00000-of-00002.parquet``, ``data/SPLIT.jsonl``,
    ``CONFIG/SPLIT/0000.parquet``."""
    found: Splits = {}
    for path in map(PurePosixPath, sorted(names)):
        if path.suffix in _READABLE and not any(part.startswith(".") for part in path.parts):
            stem = _SHARD.sub("", path.stem)
            *above, split = (*path.parts[:-1], stem) if stem else path.parts[:-1] or ("train",)
            config = "/".join(part for part in above if part != "data") or DEFAULT
            there = found.setdefault(config, {})
            split = split.removeprefix("partial-")
            there[split] = f"{there[split]}|{path}" if split in there else str(path)
    return found


def chosen_split(splits: Splits, default: str, config: str, split: str) -> str:
    """The patterns of one split. Raises ``RecipeError`` with what there is where that has to be chosen."""
    config = config or (next(iter(splits)) if len(splits) == 1 else default)
    if config not in splits:
        problem = f'has no configuration "{config}"' if config else "has several configurations"
        raise RecipeError(f"{problem}: set ?config=NAME, with one of {', '.join(splits)}")
    there = splits[config]
    split = split or (next(iter(there)) if len(there) == 1 else "")
    if split not in there:
        problem = f'has no split "{split}"' if split else "has several splits"
        inside = f" in its configuration {config}" if len(splits) > 1 else ""
        raise RecipeError(f"{problem}{inside}: set split=NAME, with one of {', '.join(there) or '(none)'}")
    return there[split]


def matching(patterns: str, names: Iterable[str]) -> list[str]:
    """Names that one of the patterns means, of those that can be read; of JSONL only a single file."""
    parts = [re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./")) for pattern in patterns.split("|")]
    wanted = re.compile("|".join("".join(_WILD.get(part, re.escape(part)) for part in one) for one in parts))
    found = sorted(name for name in names if name.endswith(_READABLE) and wanted.fullmatch(name))
    return found if len(found) == 1 else [name for name in found if name.endswith(".parquet")]


def compact(files: Sequence[str], names: Iterable[str]) -> str:
    """Patterns that mean ``files`` among ``names``: one for the shards of a split."""
    pattern = re.sub(r"\d+([-_]of[-_])", r"*\1", files[0])
    return pattern if matching(pattern, names) == list(files) else "|".join(files)
