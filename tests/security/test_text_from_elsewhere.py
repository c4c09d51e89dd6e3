"""S18, S19, S20: text of models, rewards and peers on terminals, in logs, in metric names and in paths."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders.recipe import small_recipe
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import Message
from streamrl.base.printable import LONGEST_RECORD, PrintableFormatter, one_line, printable
from streamrl.base.run_events import StepFinished
from streamrl.cli.main import report_error
from streamrl.learning.state.durable_files import DIGESTS, read_digests
from streamrl.observe.sinks import LONGEST_NAME, MOST_NAMES, Reporter
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import Run

COMMANDS = {
    "clears the screen": "\x1b[2J",
    "moves up and writes over": "\x1b[1A\x1b[2Kstep 1/2 reward 1.000",
    "sets the title": "\x1b]0;evil\x07",
    "writes to the clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "a link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "one-byte CSI": "\x9b2J",
    "goes back": "12\b\b\b",
    "goes to the start of the line": "harmless\rERROR",
    "turns the direction": "\u202egnp.exe",
    "separates lines": "a\u2028b\u2029c",
    "ends": "a\x00b\x04",
    "a lone surrogate": "\ud800",
}
DANGEROUS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_is_shown_and_not_commanded(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"reward failed: {COMMANDS[name]} end"
    for terminal in (False, True):
        stream = io.StringIO()
        with StdoutReporter(stream, terminal=terminal) as report:
            report.line(text)
        # What rich itself writes for its progress line is not from elsewhere.
        assert not DANGEROUS.search(stream.getvalue().replace("\x1b[?25h", "")), terminal
        assert "reward failed" in stream.getvalue() and "end" in stream.getvalue()
    report_error(StreamRLError(text))
    assert not DANGEROUS.search(capsys.readouterr().err)


@given(st.text())
def test_any_text_is_harmless_and_plain_text_unchanged(text: str) -> None:
    """Any text from elsewhere is printed harmless, and plain text is unchanged."""
    shown = printable(text)
    assert not DANGEROUS.search(shown)
    if not DANGEROUS.search(text) and not re.search("[\u061c\u200e\u200f]", text):
        assert shown == text
    assert "\n" not in one_line(text)


def test_plain_text_of_all_languages_is_as_it_was() -> None:
    text = "naïve 漢字 кириллица العربية עברית 👩‍💻\n\ttabs and lines"
    assert printable(text) == text


def test_no_text_forges_a_line_of_a_log() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("streamrl")
    log.addHandler(handler)
    log.warning("a reward said %s", "no\nCRITICAL streamrl.launch.pipeline: all is well\r\x1b[2K")
    lines = stream.getvalue().splitlines()
    assert lines == [
        "WARNING streamrl: a reward said no",
        "  CRITICAL streamrl.launch.pipeline: all is well\\r\\x1b[2K",
    ]
    log.warning("x" * (10 * LONGEST_RECORD))
    assert len(stream.getvalue()) < 2 * LONGEST_RECORD
    assert f"({9 * LONGEST_RECORD + len('WARNING streamrl: ')} more characters)" in stream.getvalue()


class Kept:
    """A sink that keeps steps."""

    def __init__(self) -> None:
        self.steps: list[StepFinished] = []

    def record(self, event: Message) -> None:
        assert isinstance(event, StepFinished)
        self.steps.append(event)

    def close(self) -> None: ...


def test_metric_names_are_bounded() -> None:
    """A reward that names its parts anew for every sample does not fill memory and files."""
    kept = Kept()
    reporter = Reporter([kept])
    for step in range(1, 4):
        parts: Mapping[str, Any] = {f"reward/part/{step}-{n}/mean": 1.0 for n in range(MOST_NAMES)}
        reporter.record(StepFinished(step=step, policy_version=step, metrics={"reward/mean": 1.0, **parts}))
    names = {name for record in kept.steps for name in record.metrics}
    assert len(names) == MOST_NAMES + 1
    assert all(record.metrics["reward/mean"] == 1.0 for record in kept.steps), "what was there first stays"
    assert kept.steps[-1].metrics["health/metrics_refused_total"] == 2 * MOST_NAMES + 1
    reporter = Reporter([kept := Kept()])
    metrics = {"x" * (LONGEST_NAME + 1): 1.0, "y" * LONGEST_NAME: 2.0}
    reporter.record(StepFinished(step=1, policy_version=1, metrics=metrics))
    assert set(kept.steps[0].metrics) == {"y" * LONGEST_NAME, "health/metrics_refused_total"}


ESCAPES = [
    "../x",
    "/x",
    "a/../../x",
    "..",
    ".",
    "~",
    "a/b",
    "a\\b",
    "-x",
    ".hidden",
    "a\nb",
    "a\x00b",
    "$(x)",
    "a b",
    "",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_the_name_of_a_run_stays_in_its_directory(name: str) -> None:
    assert "run.name" in {path for path, _ in broken_rules(small_recipe(run=Run(name=name)))}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "hf/../../x", "..", ""])
def test_a_checkpoint_lists_its_own_files_only(tmp_path: Path, name: str) -> None:
    (tmp_path / DIGESTS).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(StreamRLError, match="leads out of it"):
        read_digests(tmp_path)
