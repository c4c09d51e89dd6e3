"""Files of data sets by their names, and the splits that the library ``datasets`` makes of them. Where it is installed
(it is no dependency), the campaign asks it again; else the table below, made with datasets 5.2.0, is the yardstick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from streamrl.base.errors import RecipeError
from streamrl.run.prompts.data_files import choose_files

SPLITS = ("train", "validation", "test")
Layout = tuple[Sequence[str], Mapping[str, Sequence[str]]]
LAYOUTS: dict[str, Layout] = {
    "one file without a split": (["data/questions-17k.parquet"], {"train": ["data/questions-17k.parquet"]}),
    "dev": (["train.parquet", "dev.parquet"], {"train": ["train.parquet"], "validation": ["dev.parquet"]}),
    "words in the middle": (
        ["sums_train.parquet", "sums_test.parquet", "sums_val_2.parquet"],
        {"train": ["sums_train.parquet"], "validation": ["sums_val_2.parquet"], "test": ["sums_test.parquet"]},
    ),
    "a word inside of another": (["trainer.csv", "latest.csv"], {"train": ["latest.csv", "trainer.csv"]}),
    "capitals": (["Train.parquet", "Test.parquet"], {"train": ["Test.parquet", "Train.parquet"]}),
    "folders": (
        ["training/a.jsonl", "training/b.jsonl", "testing/a.jsonl"],
        {"train": ["training/a.jsonl", "training/b.jsonl"], "test": ["testing/a.jsonl"]},
    ),
    "folders before files": (
        ["train/test.parquet", "eval.parquet", "x/eval/1.parquet"],
        {"train": ["train/test.parquet"], "test": ["x/eval/1.parquet"]},
    ),
    "sharded before all": (
        ["data/rl-00000-of-00002.parquet", "data/rl-00001-of-00002.parquet", "test.parquet"],
        {"rl": ["data/rl-00000-of-00002.parquet", "data/rl-00001-of-00002.parquet"]},
    ),
    "shards of JSON lines": (
        ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
        {"train": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]},
    ),
    "files of metadata": (["train.json", "metadata.jsonl"], {"train": ["train.json"]}),
    "metadata beside a file without a split": (["rows.csv", "metadata.jsonl"], {"train": ["rows.csv"]}),
    "a log": (
        ["train.csv", "test.csv", "logs/debug.jsonl"],
        {"train": ["train.csv"], "test": ["test.csv"]},
    ),
    "hidden": ([".cache/train.parquet", "__old/train.parquet", "rows.parquet"], {"train": ["rows.parquet"]}),
    "files that are none": (["README.md", "config.json", "dataset_infos.json", "a.jsonl"], {"train": ["a.jsonl"]}),
    "several forms, parquet wins": (["train.csv", "train.parquet"], {"train": ["train.parquet"]}),
    "several forms, the most wins": (
        ["train_1.csv", "train_2.csv", "train.parquet"],
        {"train": ["train_1.csv", "train_2.csv"]},
    ),
    "numbers": (["train2.parquet", "test6.parquet"], {"train": ["train2.parquet"], "test": ["test6.parquet"]}),
    "a space": (["my train file.jsonl", "my dev file.jsonl"],
                {"train": ["my train file.jsonl"], "validation": ["my dev file.jsonl"]}),
    "evaluation": (["evaluation.jsonl", "training.jsonl"], {"train": ["training.jsonl"], "test": ["evaluation.jsonl"]}),
    "several without a split": (["easy.parquet", "hard.parquet"], {"train": ["easy.parquet", "hard.parquet"]}),
}  # fmt: skip


def of_datasets(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The files by split that ``datasets`` would read."""
    from datasets.data_files import DataFilesDict, get_data_patterns
    from datasets.load import infer_module_for_data_files
    from datasets.packaged_modules import _MODULE_TO_EXTENSIONS, _MODULE_TO_METADATA_FILE_NAMES

    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    module, _ = infer_module_for_data_files(found, path=str(folder))
    kept = found.filter(extensions=_MODULE_TO_EXTENSIONS[module], file_names=_MODULE_TO_METADATA_FILE_NAMES.get(module))
    return {str(split): sorted(str(Path(file).relative_to(folder)) for file in files) for split, files in kept.items()}


def _layout(names: Sequence[str], splits: Mapping[str, Sequence[str]], folder: Path) -> str:
    if find_spec("datasets"):
        found = of_datasets(folder, names)
        if found != {split: sorted(files) for split, files in splits.items()}:
            return f"datasets itself makes {found} of it"
    for split in {*SPLITS, *splits}:
        try:
            ours = sorted(choose_files(names, {}, split=split).names)
        except RecipeError as error:
            ours = []
            if f'no split "{split}"' not in str(error) and "configuration" not in str(error):
                return str(error)
        if ours != sorted(splits.get(split, ())):
            return f"{split}: {ours}"
    return ""


VARIANTS: dict[str, Callable[[Path], str]] = {name: partial(_layout, *layout) for name, layout in LAYOUTS.items()}
