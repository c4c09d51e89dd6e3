"""Lines of files that are appended to, rotated, torn, copied and removed, read from a cursor on by another process's
reader; and what is said of run directories in every state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile, read_lines
from streamrl.observe.run_files.followed_lines import Cursor, FollowedLines
from streamrl.observe.run_files.run_reader import MetricLine, RunFiles, run_files


@pytest.fixture(autouse=True)
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that are written stay open, as those of a run do, until the test ends."""
    opened: list[LineFile] = []
    init = LineFile.__init__

    def noted(self: LineFile, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        opened.append(self)

    monkeypatch.setattr(LineFile, "__init__", noted)
    yield
    for file in opened:
        file.close()


def numbers(lines: list[bytes]) -> list[int]:
    return [json.loads(line)["n"] for line in lines]


def rest_of(followed: FollowedLines) -> list[int]:
    found: list[int] = []
    while lines := followed.read(500):
        found += numbers(lines)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["append", "append", "append", "read", "resume", "restart", "copy"]), min_size=20, max_size=60
    )
)
def test_every_line_is_read_once_and_in_order(tmp_path_factory: pytest.TempPathFactory, moves: list[str]) -> None:
    """Three lines fill a file, so that no two rotations lie between two reads. ``restart``: of the reader, with its
    cursor as
    it was stored; ``resume``: of the writer, behind half a line; ``copy``: the directory is copied elsewhere."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    writer, followed = LineFile(path, most_bytes=1200), FollowedLines(path)
    written, read, since = 0, [], 0
    for move in moves:
        match move:
            case "append":
                if since == 3:
                    read += rest_of(followed)
                    since = 0
                writer.append({"n": written, "filler": "x" * 380})
                written, since = written + 1, since + 1
            case "read":
                read += numbers(followed.read(900))
            case "restart":
                stored = msgspec.json.encode(followed.cursor)
                followed = FollowedLines(path, msgspec.json.decode(stored, type=Cursor))
            case "resume":
                writer.close()
                with path.open("ab") as file:
                    file.write(b'{"n": 12')
                read += rest_of(followed)
                writer, since = LineFile(path, most_bytes=1200), 0
            case "copy" if followed.cursor.offset > 1024:
                copied = path.parent.with_name(f"{path.parent.name}-copy")
                shutil.copytree(path.parent, copied)
                writer.close()
                path = copied / path.name
                writer, followed = LineFile(path, most_bytes=1200), FollowedLines(path, followed.cursor)
    assert read + rest_of(followed) == [*range(written)] and not followed.gaps
    assert [line["n"] for line in read_lines(path)] == [*range(written)][-len([*read_lines(path)]) or written :]


def test_lost_lines_are_counted_and_a_reused_inode_is_no_cursor(tmp_path: Path) -> None:
    """ext4 gives the inode of the removed part to the next file at once."""
    path = tmp_path / "trace.jsonl"
    writer, followed = LineFile(path, head={"n": -1}, most_bytes=10), FollowedLines(path)
    writer.append({"n": 0})
    assert rest_of(followed) == [-1, 0]
    for n in (1, 2, 3):
        writer.append({"n": n})
    forged = msgspec.structs.replace(followed.cursor, inode=path.stat().st_ino)
    for cursor in (followed.cursor, forged):
        late = FollowedLines(path, cursor)
        assert rest_of(late) == [-1, 2, -1, 3] and late.gaps == 1


def test_a_long_line_is_whole_and_a_missing_file_is_waited_for(tmp_path: Path) -> None:
    followed = FollowedLines(tmp_path / "samples.jsonl")
    assert followed.read() == []
    LineFile(tmp_path / "samples.jsonl").append({"n": 1, "text": "x" * 5000}, {"n": 2})
    assert numbers(followed.read(100)) == [1] and numbers(followed.read(100)) == [2]
    shutil.rmtree(tmp_path)
    assert followed.read() == [] and not followed.gaps


def test_a_run_directory_is_read_whatever_is_left_of_it(tmp_path: Path) -> None:
    run = tmp_path / "sort-20261101-101500"
    (run / "evaluations").mkdir(parents=True)
    (run / "evaluations" / "step-000010.jsonl").touch()
    (run / "recipe.toml").write_text('of_another_version = 1\n[run]\nsteps = 2\n[model]\npath = "m"\n')
    (run / "metrics.jsonl").write_text('{"kind":"step","step":2,"time":5.0}\n{"kind":"step","st')
    found = run_files(run)
    (last,) = found.metric_lines()
    assert (last.step, found.state(last), [*found.evaluations()]) == (2, "finished", [10])
    assert found.recipe() == {"of_another_version": 1, "run.steps": 2, "model.path": "m"} and found.started()
    assert found.state(MetricLine("step", 2, 5.0, {"run/steps": 5.0})) == "stopped", "`streamrl set` gave it more"
    (run / "recipe.toml").write_text("half a reci")
    assert (run_files(run).recipe(), found.state(last)) == ({}, "stopped")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(StreamRLError, match=r"sort-20261101-101500 is not the directory of a run: .*runs/latest"):
        run_files(run)
    assert RunFiles(tmp_path / "exp-12345678-123456").started() is None
    assert [*RunFiles(run / "gone").metric_lines()] == [] and RunFiles(run / "gone").logs() == {}
