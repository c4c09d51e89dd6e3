"""The command that runs the checks: all of them, in the time that it promises, whatever becomes of one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contact_machine
import first_contact
import pytest
from contact_machine import nameless
from first_contact import LINES, Line, Mode

from streamrl.recipe.rules.load_recipe import check_recipe

PLANTED = """
import os, sys, pytest
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_good(device, record_property):
    '''A rate is measured.'''
    assert os.environ.get("STREAMRL_TESTS_SPAWN") == "1", "tests/tiers.py limits the processor time of a check"
    record_property("rate", 12.34567)
    record_property("curve", [1, 2])
def test_bad(tmp_path):
    (tmp_path / "engine-0.log").write_text("the engine met somebody")
    print("said by user somebody on machine-7.cluster at /home/somebody/secret-project/data.json")
    raise ValueError("no file /scratch/somebody/secret-project/model.bin for somebody@machine-7.cluster")
def test_absent(): pytest.skip("no device")
"""
REHEARSAL = Mode(rehearse=True)


def test_every_file_of_checks_is_run_once_in_twenty_minutes() -> None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert sorted(line.file for line in LINES) == sorted(files)
    assert sum(line.minutes for line in LINES if line.tier < 3) <= 20, "on one GPU"
    assert [line.tier for line in LINES] == sorted(line.tier for line in LINES)


@pytest.mark.parametrize(
    ("file", "recipe"),
    [
        ("test_demo", "side_by_side"),
        ("test_demo", "in_turns"),
        ("test_smollm2", "short_recipe"),
        ("test_two_gpus", "apart"),
    ],
)
def test_recipes_of_whole_runs_have_no_problem(
    file: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a GPU would end before its first step, and this machine does not make it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # forked workers have not run this folder's conftest
    check_recipe(getattr(importlib.import_module(f"tests.gpu.{file}"), recipe)("cuda", tmp_path))


@pytest.mark.long
def test_without_a_device_it_says_so_in_one_sentence() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, first_contact.__file__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no CUDA device: torch sees none") and done.stderr.count("\n") == 1


@pytest.fixture
def names_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(contact_machine.platform, "node", lambda: "machine-7.cluster")
    monkeypatch.setenv("USER", "somebody")
    contact_machine._names.cache_clear()
    yield
    contact_machine._names.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("names_of_the_machine")
def test_each_check_has_an_outcome_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written before the first check and after each, has traces, and no name of host, user and folder."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    monkeypatch.setattr(first_contact, "LINES", (Line(0, str(tmp_path / "test_planted.py"), 5),))
    monkeypatch.setattr(sys, "argv", ["first_contact.py", "--rehearse", "--out", str(tmp_path / "out")])
    states: list[dict[str, Any]] = []
    write = first_contact.Report.write

    def written(report: first_contact.Report, left: list[str]) -> None:
        write(report, left)
        states.append(json.loads(report.file.read_text()))

    monkeypatch.setattr(first_contact.Report, "write", written)
    assert first_contact.main() == 1
    assert [len(state["checks"]) for state in states] == [0, 1, 2, 3, 3]
    assert states[1]["not run"] == ["test_planted.py::test_bad", "test_planted.py::test_absent"]
    report = states[-1]
    good, bad, absent = report["checks"]
    assert (report["state"], report["passed"], report["failed"], report["skipped"]) == ("complete", 1, 1, 1)
    assert good["name"] == "test_planted.py::test_good[cpu]" and good["about"] == "A rate is measured."
    assert good["figures"] == {"rate": 12.34567, "curve": [1, 2]}
    assert absent["reason"] == "no device"
    assert report["what failed"] == [f"test_planted.py::test_bad: {bad['reason']}"]
    assert bad["reason"] == "ValueError: no file FOLDER/model.bin for USER@HOST"
    assert "raise ValueError" in bad["trace"] and "said by user USER on HOST at FOLDER/data.json" in bad["trace"]
    assert "engine-0.log:\nthe engine met USER" in bad["trace"], "logs of processes"
    assert {"commit", "gpus", "packages", "streamrl check"} <= report["machine"].keys()
    text = (tmp_path / "out/first_contact.json").read_text()
    for name in ("somebody", "machine-7", "secret-project", str(Path.home()) + "/", str(contact_machine.ROOT)):
        assert name not in text, f"the report has {name}"


@pytest.mark.usefixtures("names_of_the_machine")
def test_a_path_keeps_what_says_something() -> None:
    root, home = contact_machine.ROOT, Path.home()
    assert nameless(f'File "{root}/streamrl/base/types.py", line 3') == 'File "streamrl/base/types.py", line 3'
    assert nameless(f"{home}/x/lib/python3.11/site-packages/torch/_ops.py") == "site-packages/torch/_ops.py"
    assert nameless(f"{home}/models/secret/config.json") == "FOLDER/config.json"
    assert nameless(f"{root} and {home}/my-project") == ". and FOLDER"
    assert nameless("/usr/lib/libcuda.so.1, 3/4, and/or, https://example.org/a/b") == (
        "/usr/lib/libcuda.so.1, 3/4, and/or, https://example.org/a/b"
    )
    assert nameless("GPU-6ad32e9c-1d3a-4c1d-9c53-1d0b2c1f1a11") == "GPU-UUID"


@pytest.mark.parametrize(
    ("planted", "minutes", "reason"),
    [("os.abort()", 5, "exit code -6: "), ("time.sleep(600)", 0.1, "not done in 0.4 minutes")],
)
def test_a_crash_and_a_hang_cost_one_check(tmp_path: Path, planted: str, minutes: float, reason: str) -> None:
    """The one that was running has a name, those before it have their outcomes, and those after it are named."""
    checks = f"import os, time\ndef test_a(): pass\ndef test_b(): {planted}\ndef test_c(): pass\n"
    (tmp_path / "test_planted.py").write_text(checks)
    found = [check for check, _ in first_contact.run(Line(0, str(tmp_path / "test_planted.py"), minutes), REHEARSAL)]
    if len(found) == 1 and "sleep" in planted:
        pytest.skip("the machine is too slow for this limit")
    first, second = found
    assert (first.name, first.outcome) == ("test_planted.py::test_a", "passed")
    assert (second.name, second.outcome) == ("test_planted.py::test_b", "failed")
    assert second.reason.startswith(reason) and second.reason.endswith("not run: test_planted.py::test_c")


@pytest.mark.parametrize(
    ("planted", "outcome", "reason"),
    [
        ("import no_such_module", "failed", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import pytest; pytest.importorskip('no_such_module')", "skipped", "could not import 'no_such_module'"),
    ],
)
def test_a_file_that_is_not_imported_has_a_reason(tmp_path: Path, planted: str, outcome: str, reason: str) -> None:
    (tmp_path / "test_planted.py").write_text(planted)
    ((check, left),) = first_contact.run(Line(0, str(tmp_path / "test_planted.py"), 5), REHEARSAL)
    assert (check.outcome, left) == (outcome, []) and check.reason.startswith(reason)
