"""The page, reports, lists and trackers of runs whose directories came from somebody else, or others read: S23."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from streamrl.base import line_file
from streamrl.observe.dashboard.report_page import report_page
from streamrl.observe.dashboard.run_view import RunView, RunViews
from streamrl.observe.dashboard.server import DashboardServer
from streamrl.observe.run_files import followed_lines
from streamrl.observe.run_files.redaction import run_redaction
from streamrl.observe.run_files.run_reader import RunFiles

STEP = {"kind": "step", "step": 1, "time": 1.0, "reward/mean": 0.5}
GOOD = '[run]\nname = "x"\nsteps = 3\n[model]\npath = "m"\n'
ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[1A"
OWN_TEXT = "OF-THE-READER-ALONE"
ODD_RECIPES = {
    "steps is a text": '[run]\nsteps = "x"\n',
    "steps is inf": "[run]\nsteps = inf\n",
    "steps has 400 digits": f"[run]\nsteps = {'9' * 400}\n",
    "tags is a number": "[run]\ntags = 3\n",
    "name is a date": "[run]\nname = 2026-01-01\n",
    "nesting": "x = " + "[" * 20_000 + "]" * 20_000,
    "a dotted key": ".".join("a" * 3_000) + " = 1\n",
    "a number of many digits": f"x = {'1' * 200_000}\n",
    "not UTF-8": "x = '\udcff'\n",
    "empty": "",
}
ODD_METRICS = {
    "a step of 400 digits": {**STEP, "step": int("9" * 400)},
    "a step below 0": {**STEP, "step": -1},
    "a value of 400 digits": {**STEP, "loss": int("9" * 400)},
    "a time of 400 digits": {**STEP, "time": int("9" * 400)},
    "a step that is a text": {**STEP, "step": "x"},
    "run/steps is huge": {**STEP, "run/steps": 1e308},
}


def run_folder(runs: Path, name: str, recipe: str = GOOD, line: object = STEP) -> Path:
    directory = runs / f"{name}-20260101-000000"
    (directory / "logs").mkdir(parents=True)
    (directory / "evaluations").mkdir()
    (directory / "recipe.toml").write_bytes(recipe.encode(errors="surrogateescape"))
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return directory


@pytest.mark.parametrize("name", [*ODD_RECIPES, *ODD_METRICS])
def test_one_odd_run_leaves_the_others_on_the_page(name: str, tmp_path: Path) -> None:
    """The page, the list and the report show all runs, and of an odd one what can be read."""
    run_folder(tmp_path, "good")
    odd = run_folder(tmp_path, "odd", ODD_RECIPES.get(name, GOOD), ODD_METRICS.get(name, STEP))
    page = TestClient(DashboardServer([tmp_path]).app(), base_url="http://127.0.0.1")
    answers = page.get("/api/runs")
    assert answers.status_code == 200
    assert [row["run_id"] for row in answers.json()] == [f"{run}-20260101-000000" for run in ("good", "odd")]
    for path in ("metrics", "waits", "lengths", "words", "details", "samples", "timeline"):
        assert page.get(f"/api/runs/1/{path}").status_code == 200, path
    assert report_page([odd])


def test_links_out_of_a_run_are_not_read(tmp_path: Path) -> None:
    """Files of the reader do not appear on the page through links of a run, and the page names the links."""
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"text": OWN_TEXT, "prompt": OWN_TEXT, "reward": 1.0}) + f"\n{OWN_TEXT}\n")
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "step-3.jsonl").write_text(own.read_text())
    (folder / "engine-1.log").write_text(own.read_text())
    links = {
        "logs/engine-0.log": own,
        "samples.jsonl": own,
        "evaluations/step-2.jsonl": own,
        "recipe.toml": own,
        "logs": folder,
        "evaluations": folder,
    }
    for name, target in links.items():
        run = run_folder(tmp_path / "runs" / name.replace("/", "-"), "theirs")
        place = run / name
        if place.is_dir():
            place.rmdir()
        place.unlink(missing_ok=True)
        place.symlink_to(target)
        view = RunView(0, RunFiles(run))
        assert OWN_TEXT not in report_page([run]).decode(), name
        assert name in "".join(view.details()["notes"]), name


def test_a_pipe_in_a_run_does_not_block_its_readers(tmp_path: Path) -> None:
    """A named pipe in place of a file counts as a missing file: opening it would wait for a writer."""
    run = run_folder(tmp_path, "piped")
    for name in ("metrics.jsonl", "samples.jsonl", "trace.jsonl", "logs/engine-0.log", "evaluations/step-1.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert report_page([run])


def test_a_sparse_file_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (line_file, followed_lines):
        monkeypatch.setattr(module, "LONGEST_LINE", 1 << 20)
    run = run_folder(tmp_path, "sparse")
    report_page([run])
    for name in ("metrics.jsonl", "samples.jsonl", "trace.jsonl", "evaluations/step-1.jsonl"):
        (run / name).touch()
        os.truncate(run / name, 20 << 20)
    tracemalloc.start()
    try:
        assert report_page([run])
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_secrets_of_a_run_stay_out_of_page_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What crash bundles remove is removed on the page, in reports and in the configuration of trackers, too."""
    monkeypatch.setenv("WANDB_API_KEY", "w0123456789" * 3)
    options = 'options = { api_key = "sk-0123456789abcdefghijklmn", depth = 3 }'
    run = run_folder(tmp_path, "one", f'{GOOD}[[rewards]]\nfunction = "reward.py:judged"\n{options}\n')
    token = "hf_0123456789abcdefgh0123"
    log = f"Authorization: Bearer abcdefgh0123456789\nhttps://user:passphrase@host/x\n{token}\n{'w0123456789' * 3}\n"
    (run / "logs" / "reward.log").write_text(log)
    sample = {"step": 1, "prompt_id": "p", "prompt": f"say {token}", "text": token, "reward": 1.0}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (run / "trace.jsonl").write_text(
        json.dumps({"kind": "event", "time_s": 1.0, "event": "alarm", "text": f"failed with {token}"}) + "\n"
    )
    secrets = ("sk-0123456789abcdefghijklmn", "abcdefgh0123456789", "user:passphrase", token, "w0123456789" * 3)
    other = run_folder(tmp_path, "two")
    page = report_page([run, other]).decode()
    assert [secret for secret in secrets if secret in page] == []
    assert "rewards.0.options.api_key removed" in page and "hf_" not in page
    config = run_redaction(os.environ, RunFiles(run).recipe_text()).public(RunFiles(run).recipe())
    assert config["rewards.0.options.depth"] == 3 and "sk-" not in str(config)
    views = RunViews([tmp_path]).views()
    assert "sk-" not in str([view.recipe for view in views])


@pytest.mark.parametrize("on_terminal", [False, True])
def test_commands_show_text_and_do_not_command_the_terminal(on_terminal: bool, tmp_path: Path) -> None:
    """Names of models, tags and folders reach neither a terminal nor a pipe as escape sequences or as markup."""
    shown = json.dumps(ESCAPES)[1:-1]
    recipe = f'[run]\nname = "x"\nsteps = 3\ntags = ["[link=x]t{shown}"]\n[model]\npath = "m{shown}"\n'
    run_folder(tmp_path, "one", recipe)
    run_folder(tmp_path, f"two{ESCAPES}")
    output = _output(["runs", str(tmp_path)], on_terminal)
    assert "\\x1b]0;title\\x07" in output and "[link=x]t" in output
    rest = re.sub(r"\x1b\[[0-9;]*m", "", output)  # rich's own styles
    assert "\x1b" not in rest and "\x07" not in rest
    rows = json.loads(_output(["runs", str(tmp_path), "--json"], False))
    assert rows[0]["tags"] == [f"[link=x]t{ESCAPES}"]


def _output(words: list[str], on_terminal: bool) -> str:
    command = [sys.executable, "-m", "streamrl", *words]
    if not on_terminal:
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        variables = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
        subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, check=True, timeout=60, env=variables)
        os.close(theirs)
        output = b""
        try:
            while block := terminal.read(1 << 16):
                output += block
        except OSError:  # the other end of the terminal is closed
            pass
    return output.decode()
