"""examples/notebook.ipynb, cell after cell: a recipe, rewards and rows that no file holds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders.files import ROOT, json_lines

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.long
def test_its_cells_train(tmp_path: Path) -> None:
    changes = {
        '"sort/model"': repr(str(ROOT / "examples" / "sort" / "model")),
        '{"dtype": "float32"}': '{"kind": "simulated"}',
        '"steps": 5': '"steps": 2',
    }
    result = "[str(directory), step.step, trial.reward.scored, sorted(trial.reward.parts), sorted(dir(streamrl))]"
    command = [sys.executable, str(Path(__file__).with_name("notebook_process.py")), str(NOTEBOOK), json.dumps(changes)]
    done = subprocess.run([*command, result], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    directory, steps, scored, parts, names = json.loads(done.stdout.splitlines()[-1])
    assert (steps, scored, parts) == (2, 16, ["in_order", "same_digits"])
    assert names == sorted(
        ["Observer", "Pipeline", "Recipe", "RoundPolicy", "Sink", "live_curve", "load_recipe", "try_recipe"]
    )
    lines = json_lines(Path(directory, "metrics.jsonl"))
    assert all(0 < line["reward/func/sorted_list.in_order/mean"] <= 1 for line in lines if line["kind"] == "step")
    (written,) = (tmp_path / "runs" / "cells").glob("sorted_list_*.py")
    assert "def in_order" in written.read_text() and written.name in Path(directory, "recipe.toml").read_text()


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("nbclient"), reason="needs nbclient and ipykernel")
def test_a_kernel_shows_its_curve(tmp_path: Path) -> None:
    nbformat, nbclient = importlib.import_module("nbformat"), importlib.import_module("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('{"dtype": "float32"}', '{"kind": "simulated"}').replace("5}", "2}")
        cell.source = cell.source.replace('"sort/model"', repr(str(ROOT / "examples" / "sort" / "model")))
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("reward/mean" in output["data"].get("text/plain", "") for output in shown)
