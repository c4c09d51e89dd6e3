"""``streamrl objective test``: what it prints of a loss of one's own, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.files import ROOT

from streamrl.cli.main import main

pytestmark = pytest.mark.torch
PAGE = ROOT / "examples" / "custom_loss.py"


@pytest.mark.seconds(8)
@pytest.mark.started
def test_a_loss_that_keeps_its_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["objective", "test", f"{PAGE}:gmpo", "--option", "clip=0.2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{PAGE}:gmpo: a loss that reads whole trajectories"
    assert [line.split("  ")[1] for line in lines[:3]] == [
        "gradient of float64",
        "denominators",
        "streaming = whole batch",
    ]
    assert all(" holds " in line for line in lines[:6])


@pytest.mark.seconds(8)
def test_a_loss_that_breaks_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(ratio, advantages): return -ratio * advantages / len(ratio)")
    assert main(["objective", "test", f"{file}:loss", "--json"]) == 1
    promises = {promise["name"]: promise for promise in json.loads(capsys.readouterr().out)["promises"]}
    assert not promises["packing = single rows"]["holds"] and promises["resume"]["holds"]
    file.write_text("def loss(ratio, advantages): return ratio * advantages")
    assert main(["objective", "test", f"{file}:loss"]) == 1
    assert "refused: " in capsys.readouterr().out
