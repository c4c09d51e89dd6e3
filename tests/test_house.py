"""lint/house.py finds what it is for: each violation planted into a small house that has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders.files import ROOT

PLANTS = {
    "against the order": (
        "base/a.py",
        "def f():\n    from streamrl.comm import stream\n",
        "base stands before comm",
        1,
    ),
    "for types only": ("base/a.py", "if TYPE_CHECKING:\n    import streamrl.run.parts\n", "base stands before run", 1),
    "no room of the order": ("attic/a.py", "from streamrl.base import b\n", "attic is not in lint/rooms.py:ORDER", 1),
    "a wing": ("run/b.py", "from streamrl.run.journal.journal_file import x\n", "a file imports no wing", 1),
    "a wing unlisted": (
        "run/prompts/a.py",
        "from streamrl.run.journal.journal_file import x\n",
        "does not let run/prompts import run/journal",
        1,
    ),
    "a circle": ("base/b.py", "def f():\n    import streamrl.base.c\n", "streamrl.base.b <-> streamrl.base.c", 1),
    "a name twice": ("base/a.py", "class Stream:\n    pass\n", "Stream: streamrl/base/a.py:1, streamrl/comm", 1),
    "an opening": ("base/a.py", '"""How it is."""\n', "streamrl/base/a.py:1: How it is.", 1),
    "a word": ("base/a.py", "# The s" + "helf of a run.\n", "prompt store", 1),
    "a word in a name": ("base/a.py", "def begin_anew(): ...\n", "begin_anew: 'anew': restart", 1),
    "a long class": ("base/a.py", "class A:\n" + "    x = 1\n" * 201, "A has 201 statements", 1),
    "a long function": ("base/a.py", "def f():\n" + "    x = 1\n" * 46, "f has 46 statements", 1),
    "a tuple": ("base/a.py", "a, b = 1, 2\n", "streamrl/base/a.py:1: a, b = (1, 2)", 1),
    "an unpacked call": ("base/a.py", "a, b = f()\n", "assignments of tuples to tuples: 0", 0),
    "a value or empty": ("base/a.py", "a = b if c else ()\n", "streamrl/base/a.py:1: b if c else ()", 0),
    "a participle": ("base/a.py", "def f(_found): ...\n", "streamrl/base/a.py:1: _found", 0),
    "a preposition": ("base/a.py", '"""A. ``b``: of a."""\n', "streamrl/base/a.py:1: ``b``: of", 1),
    "a long name of a test": ("../tests/a.py", f"def test_{'a' * 60}(): ...\n", "tests/a.py:1: test_aaa", 1),
    "a circle of campaigns": ("../campaigns/a.py", "from campaigns import b\n", "circles of files in campaigns: 1", 1),
    "comments and blank lines": ("base/a.py", "\n# A comment.\n" * 99, "nodes of streamrl: 24", 0),
    "nothing": ("base/a.py", "class A:\n    pass\n", "imports against the order: 0", 0),
}


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small house in which nothing is wrong."""
    for name, text in {
        "streamrl/comm/stream.py": "class Stream:\n    pass\n",
        "streamrl/run/parts.py": "",
        "streamrl/run/journal/journal_file.py": "x = 1\n",
        "streamrl/base/c.py": "from streamrl.base import b\n",
        "streamrl/base/b.py": "",
        "streamrl/recipe/field_types.py": "def paths_in_view(recipe):\n    return []\n",
        "streamrl/recipe/sections.py": "class Recipe:\n    pass\n",
        "campaigns/b.py": "from campaigns import a\n",
        "README.md": "A house.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("plant", PLANTS)
def test_the_lint_finds_what_is_planted(house: Path, plant: str) -> None:
    name, text, says, code = PLANTS[plant]
    path = house / "streamrl" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "lint" / "house.py", "-v", house],
        env={"PYTHONPATH": str(house), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, says in done.stdout) == (code, True), done.stdout + done.stderr
