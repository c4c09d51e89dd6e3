"""Caches of the Hub as other programs, copies and users leave them, with no network. What huggingface_hub loads from a
cache, the product loads; a part of a model or data set is refused by a sentence that names it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from campaigns.front_door.folders import demo_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = COMMIT[::-1]
OURS = """
import sys
from streamrl.base.errors import RecipeError
from streamrl.prepare.hub.resolution import recipe_around, with_hub_folders
try:
    made = with_hub_folders(recipe_around(**{sys.argv[1]: sys.argv[2]}))
    print(made.model.path if sys.argv[1] == "model" else made.prompts.train)
except RecipeError as error:
    print("REFUSED", *error.problems)
"""
THEIRS = (
    "import sys; from huggingface_hub import snapshot_download as get; print(get(sys.argv[1], local_files_only=True))"
)


def _said(home: Path, code: str, *words: str, **variables: str) -> str:
    places = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home / "hub"), **variables}
    environment = {name: value for name, value in {**os.environ, **places}.items() if value}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()[-200:]


def _storage(path: Path, *, links: bool = True) -> Path:
    """The folder of org/tiny in a cache: blobs, a snapshot of links to them, and the ref of its main branch."""
    storage = path / "hub" / "models--org--tiny"
    (storage / "blobs").mkdir(parents=True)
    snapshot = storage / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(demo_model(path).iterdir())):
        blob = storage / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        if links:
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        else:
            shutil.copyfile(file, snapshot / file.name)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    return storage


def _cache(change: Callable[[Path], object], path: Path, *, name: str = "org/tiny", links: bool = True) -> str:
    """'' where the product takes the snapshot that huggingface_hub takes."""
    storage = _storage(path, links=links)
    change(storage)
    ours = _said(path, OURS, "model", name)
    theirs = _said(path, THEIRS, "org/tiny")
    if ours != str(storage / "snapshots" / COMMIT):
        return f"{ours} in place of {storage / 'snapshots' / COMMIT} (huggingface_hub: {theirs[-120:]})"
    return ""


def _refused(change: Callable[[Path], object], words: str, path: Path, *, name: str = "org/tiny") -> str:
    change(_storage(path))
    said = _said(path, OURS, "model", name)
    return "" if said.startswith("REFUSED model.path") and words in said and "\n" not in said else said


def _rows(files: dict[str, str], words: str, path: Path, *, name: str = "hf:org/rows?split=train") -> str:
    storage = path / "hub" / "datasets--org--rows"
    for file, text in files.items():
        target = storage / "snapshots" / COMMIT / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    said = _said(path, OURS, "prompts", name)
    return "" if words in said and "\n" not in said else said


def _nothing(storage: Path) -> None:
    assert storage.is_dir()


def _dangling(storage: Path) -> None:
    weights = storage / "snapshots" / COMMIT / "model.safetensors"
    weights.resolve().unlink()


def _in_variable(variable: str, path: Path) -> str:
    """The place of the cache in another variable of huggingface_hub."""
    storage = _storage(path)
    others = {"HF_HUB_CACHE": "", "HF_HOME": "", variable: str(path / "hub" if "CACHE" in variable else path)}
    ours = _said(path, OURS, "model", "org/tiny", **others)
    return "" if ours == str(storage / "snapshots" / COMMIT) else ours


def _read_only(path: Path) -> str:
    """A cache that this user may not write, as shared ones are."""
    storage = _storage(path)
    for folder in (storage / "refs", storage / "snapshots", storage, path / "hub"):
        folder.chmod(0o555)
    ours = _said(path, OURS, "model", "org/tiny")
    for folder in (path / "hub", storage, storage / "snapshots", storage / "refs"):
        folder.chmod(0o755)
    return "" if ours == str(storage / "snapshots" / COMMIT) else ours


def _snapshot_file(storage: Path, name: str) -> Path:
    return storage / "snapshots" / COMMIT / name


def _without_refs(storage: Path) -> None:
    shutil.rmtree(storage / "refs")


def _two_snapshots(storage: Path) -> None:
    _without_refs(storage)
    (storage / "snapshots" / OTHER).mkdir()


ROW = '{"prompt": "1"}\n'
VARIANTS: dict[str, Callable[[Path], str]] = {
    "links, no list of files": partial(_cache, _nothing),
    "copies in place of links": partial(_cache, _nothing, links=False),
    "a commit in the name": partial(_cache, _nothing, name=f"org/tiny@{COMMIT}"),
    "hf: before the name": partial(_cache, _nothing, name="hf:org/tiny"),
    "CRLF in refs/main": partial(_cache, lambda storage: (storage / "refs/main").write_bytes(f"{COMMIT}\r\n".encode())),
    "no refs, one snapshot": partial(_cache, _without_refs),
    "no README": partial(
        _cache, lambda storage: (storage / "snapshots" / COMMIT / "README.md").unlink(missing_ok=True)
    ),
    "a .no_exist folder": partial(_cache, lambda storage: (storage / ".no_exist" / COMMIT).mkdir(parents=True)),
    "a lock that was left": partial(_cache, lambda storage: (storage.parent / ".locks").mkdir()),
    "HF_HOME": partial(_in_variable, "HF_HOME"),
    "HUGGINGFACE_HUB_CACHE": partial(_in_variable, "HUGGINGFACE_HUB_CACHE"),
    "read only": _read_only,
    "weights whose blob is gone": partial(_refused, _dangling, "lacks .safetensors weights"),
    "no refs, two snapshots": partial(_refused, _two_snapshots, "HF_HUB_OFFLINE is set"),
    "another revision": partial(_refused, _nothing, "HF_HUB_OFFLINE is set", name="org/tiny@v2"),
    "rows": partial(_rows, {"train.jsonl": ROW, "test.jsonl": ROW}, "?files=train.jsonl"),
    "rows in CSV": partial(_rows, {"train.csv": "prompt\n1\n"}, "?files=train.csv"),
    "one of two shards": partial(_rows, {"train-00001-of-00002.jsonl": ROW}, "has 1 of the 2 files"),
    "only the other split": partial(_rows, {"test.jsonl": ROW}, 'has no split "train"'),
    "rows that are packed": partial(_rows, {"train.jsonl.gz": "x"}, "no parquet, JSON or CSV files"),
}
