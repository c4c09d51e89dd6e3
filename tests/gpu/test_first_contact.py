"""The command that runs the checks: all of them, in the time that it promises, whatever becomes of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import first_contact
import pytest
from first_contact import TIERS, Line

PLANTED = """
import time, pytest
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_good(device, record_property):
    record_property("rate", 12.34567)
def test_bad(): assert 1 == 2, "planted"
def test_absent(): pytest.skip("no device")
"""


def test_every_file_of_checks_is_run_once_in_twenty_minutes() -> None:
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert sorted(line.file for line in TIERS) == sorted(files)
    assert sum(line.minutes for line in TIERS) <= 20
    assert [line.tier for line in TIERS] == sorted(line.tier for line in TIERS)


@pytest.mark.long
def test_without_a_device_it_says_so_in_one_sentence() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, first_contact.__file__], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("no CUDA device: torch sees none") and done.stderr.count("\n") == 1


@pytest.mark.long
def test_each_check_has_an_outcome_and_figures(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    checks = first_contact.run(Line(0, str(tmp_path / "test_planted.py"), 1), rehearse=True)
    assert [(one.name.partition("::")[2], one.outcome) for one in checks] == [
        ("test_good[cpu]", "passed"),
        ("test_bad", "failed"),
        ("test_absent", "skipped"),
    ]
    assert checks[0].figures == {"rate": "12.34567"} and first_contact.shown("12.34567") == "12.35"
    assert "planted" in checks[1].reason and checks[2].reason == "no device"
    first_contact.write(tmp_path / "out", checks)
    assert len(json.loads((tmp_path / "out/first_contact.json").read_text())["checks"]) == 3


@pytest.mark.parametrize(
    ("planted", "minutes", "reason"),
    [("import os; os.abort()", 5, "exit code -6: "), ("import time; time.sleep(60)", 0.03, "not done in 0.03 minutes")],
)
def test_a_crash_and_a_hang_cost_one_line(tmp_path: Path, planted: str, minutes: float, reason: str) -> None:
    (tmp_path / "test_planted.py").write_text(planted)
    (check,) = first_contact.run(Line(0, str(tmp_path / "test_planted.py"), minutes), rehearse=True)
    assert (check.outcome, check.reason[: len(reason)]) == ("failed", reason)
