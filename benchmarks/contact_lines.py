"""Plugin of pytest for ``first_contact.py``: a line of JSON for each check, as soon as it has an outcome.

The file is named by FIRST_CONTACT_LINES. A check that has only begun has a line, too, so that one that takes its
process with it is known by name."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TRACE = 6000
"""Characters that are kept of the end of a trace, and of each stream that a failed check wrote to."""

_found: dict[str, dict[str, Any]] = {}


def _append(line: dict[str, Any]) -> None:
    with Path(os.environ["FIRST_CONTACT_LINES"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _name(node: str) -> str:
    return node.rpartition("/")[2]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say which checks there are."""
    _append({"checks": [_name(item.nodeid) for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or that says itself that it is not for this machine."""
    if report.failed or report.skipped:
        _append(_row(report, report.nodeid) | {"about": "the file is imported"})


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Say what begins."""
    test: Any = getattr(item, "function", None)
    about = inspect.getdoc(test) or inspect.getdoc(getattr(item, "module", None)) or ""
    _found[item.nodeid] = {"about": " ".join(about.partition("\n\n")[0].split())}
    _append({"begun": _name(item.nodeid), **_found[item.nodeid]})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Give a check that failed the ends of the logs that its processes wrote."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.rglob("*.log")):
            report.sections.append((str(log.relative_to(folder)), log.read_text(errors="replace")))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Join the three parts of a check; the first that did not pass says what became of it."""
    found = _found.setdefault(report.nodeid, {"about": ""})
    found["seconds"] = round(found.get("seconds", 0.0) + report.duration, 2)
    found.setdefault("figures", {}).update(dict(report.user_properties))
    if not report.passed and found.get("outcome", "passed") == "passed":
        found.update(_row(report, report.nodeid))
    if report.when == "teardown":
        _append({"name": _name(report.nodeid), "outcome": "passed", "reason": "", "trace": ""} | found)


def _row(report: Any, node: str) -> dict[str, Any]:
    outcome = "skipped" if report.skipped else "failed"
    text = report.longreprtext
    if report.skipped and isinstance(report.longrepr, tuple):
        return {"name": _name(node), "outcome": outcome, "reason": report.longrepr[2].removeprefix("Skipped: ")}
    reason = next((line[1:].strip() for line in text.splitlines() if line.startswith("E ")), text.strip()[-200:])
    said = [text[-TRACE:], *(f"{name}:\n{part[-TRACE:]}" for name, part in report.sections)]
    return {"name": _name(node), "outcome": outcome, "reason": reason, "trace": "\n".join(said)}
