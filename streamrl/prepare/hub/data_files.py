"""Choice of files of a repository: the files that a model needs, or the files of one configuration and split of a data
set, by the configurations that its README declares, or else by the names of its files. Pure; ``fetch`` calls it."""

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
    model_names = [name for name in places if name.endswith(_OF_MODELS) and not name.endswith(_OF_OTHER_FORMATS)]
    consolidated = [name for name in model_names if name.endswith(WEIGHTS) and name.startswith("consolidated")]
    only = len(consolidated) == sum(name.endswith(WEIGHTS) for name in model_names)
    return model_names if only else [name for name in model_names if name not in consolidated]


def declared_splits(card: Mapping[str, Any], names: Sequence[str]) -> tuple[Splits, str]:
    """Splits that the metadata of a README declares (empty: none), and the name of its default configuration."""
    splits: Splits = {}
    default = ""
    for entry in card.get("configs") or ():
        config = str(entry.get("config_name", DEFAULT))
        files = entry.get("data_files")
        folder = str(entry.get("data_dir") or "").strip("/")
        default = config if entry.get("default") or config == DEFAULT else default
        if files is None:
            inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
            splits[config] = {}
            for patterns_by_split in splits_by_name(inside).values():
                splits[config].update(patterns_by_split)
            continue
        by_split = isinstance(files, list) and files and isinstance(files[0], dict)
        listed = files if by_split else [{"path": files}]
        for entry_files in listed:
            paths = [entry_files["path"]] if isinstance(entry_files["path"], str) else entry_files["path"]
            patterns = "|".join(str(PurePosixPath(folder, path)) for path in paths)
            splits.setdefault(config, {})[str(entry_files.get("split", "train"))] = patterns
    return splits, default


def splits_by_name(names: Iterable[str]) -> Splits:
    """Configurations and splits by the places of files: ``CONFIG/SPLIT-00000-of-00002.parquet``, ``data/SPLIT.jsonl``,
    ``CONFIG/SPLIT/0000.parquet``."""
    splits: Splits = {}
    for path in map(PurePosixPath, sorted(names)):
        if path.suffix in _READABLE and not any(part.startswith(".") for part in path.parts):
            stem = _SHARD.sub("", path.stem)
            *above, split = (*path.parts[:-1], stem) if stem else path.parts[:-1] or ("train",)
            config = "/".join(part for part in above if part != "data") or DEFAULT
            of_config = splits.setdefault(config, {})
            split = split.removeprefix("partial-")
            of_config[split] = f"{of_config[split]}|{path}" if split in of_config else str(path)
    return splits


def chosen_split(splits: Splits, default: str, config: str, split: str) -> str:
    """The patterns of one split. Raises ``RecipeError`` with the names of all where the recipe must choose one."""
    config = config or (next(iter(splits)) if len(splits) == 1 else default)
    if config not in splits:
        problem = f'has no configuration "{config}"' if config else "has several configurations"
        raise RecipeError(f"{problem}: set ?config=NAME, with one of {', '.join(splits)}")
    of_config = splits[config]
    if not split and len(of_config) == 1:
        split = next(iter(of_config))
    if split not in of_config:
        problem = f'has no split "{split}"' if split else "has several splits"
        if len(splits) > 1:
            problem += f" in its configuration {config}"
        raise RecipeError(f"{problem}: set split=NAME, with one of {', '.join(of_config) or '(none)'}")
    return of_config[split]


def matching(patterns: str, names: Iterable[str]) -> list[str]:
    """Readable files among ``names`` that one of the patterns matches. A match of several files has only the parquet
    files: JSONL is read as a single file."""
    expressions = []
    for pattern in patterns.split("|"):
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./"))
        expressions.append("".join(_WILD.get(part, re.escape(part)) for part in parts))
    expression = re.compile("|".join(expressions))
    matches = sorted(name for name in names if name.endswith(_READABLE) and expression.fullmatch(name))
    return matches if len(matches) == 1 else [name for name in matches if name.endswith(".parquet")]


def compact(files: Sequence[str], names: Iterable[str]) -> str:
    """Patterns that match exactly ``files`` among ``names``: a single pattern for the shards of a split."""
    pattern = re.sub(r"\d+([-_]of[-_])", r"*\1", files[0])
    return pattern if matching(pattern, names) == list(files) else "|".join(files)
