"""Small files that a power cut leaves whole: what is on the disk when a writer returns, and in which order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.files import SORT_RECIPE as DEMO

from streamrl.base.atomic_files import make_directory, write_durable, write_sidecar
from streamrl.launch.pipeline import _make_run_directory
from streamrl.recipe.rules.load_recipe import load_recipe


class Disk:
    """What was flushed, as (inode, what it held then: bytes of a file, names of a directory)."""

    def __init__(self) -> None:
        self.flushed: dict[int, object] = {}
        self.fsync = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.fsync(descriptor)
        self.flushed[os.fstat(descriptor).st_ino] = self._content(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def holds(self, path: Path) -> bool:
        """Whether ``path`` as it is now, and its name, would outlive a power cut."""
        there = self.flushed.get(path.parent.stat().st_ino)
        named = isinstance(there, dict) and there.get(path.name) == path.lstat().st_ino
        return named and (path.is_dir() or path.is_symlink() or self.flushed.get(path.stat().st_ino) == _bytes(path))

    @staticmethod
    def _content(path: Path) -> object:
        return {child.name: child.lstat().st_ino for child in path.iterdir()} if path.is_dir() else _bytes(path)


def _bytes(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk)
    return disk


def test_a_small_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, before = Path.replace, []

    def replaced(path: Path, target: Path) -> Path:
        before.append(disk.flushed.get(path.stat().st_ino))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replaced)
    write_durable(tmp_path / "scores.json", b"{}")
    assert before == [b"{}"]
    assert disk.holds(tmp_path / "scores.json")


def test_new_directories_and_sidecars_are_on_the_disk(tmp_path: Path, disk: Disk) -> None:
    """New directories, and the files staged beside a checkpoint, are on the disk when the call returns."""
    make_directory(tmp_path / "runs" / "run" / "checkpoints")
    made = [tmp_path / "runs", tmp_path / "runs" / "run", tmp_path / "runs" / "run" / "checkpoints"]
    assert [path for path in made if not disk.holds(path)] == []
    write_sidecar(made[-1] / "step-000001", {"control.msgpack": b"kept"})
    folder = made[-1] / ".step-000001.beside.partial"
    assert disk.holds(folder)
    assert disk.holds(folder / "control.msgpack")


def test_a_new_run_is_on_the_disk_before_anything_is_journalled(tmp_path: Path, disk: Disk) -> None:
    recipe = load_recipe(DEMO, [f"run.directory={tmp_path / 'somewhere' / 'runs'}"])
    run = _make_run_directory(recipe, None)
    expected = [run.parent.parent, run.parent, run, run / "inputs.json", run / "recipe.toml", run.parent / "latest"]
    assert [path for path in expected if not disk.holds(path)] == []
    assert sorted(path.name for path in run.iterdir()) == ["inputs.json", "recipe.toml"]


@pytest.mark.parametrize(("last", "code", "left"), [("pass", 0, ["new"]), ("os.kill(os.getpid(), 15)", 143, [])])
def test_a_new_directory_is_whole_or_absent(tmp_path: Path, last: str, code: int, left: list[str]) -> None:
    script = f"""
import os
from pathlib import Path
from streamrl.base.atomic_files import new_directory
with new_directory(Path("new")) as partial:
    (partial / "file").write_text("")
    {last}
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False).returncode == code
    assert os.listdir(tmp_path) == left
