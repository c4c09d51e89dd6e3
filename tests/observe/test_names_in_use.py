"""Every metric name that the code writes is in the registry: what a number means is fixed in one place."""

from __future__ import annotations

import ast
import re
from functools import cache

from builders.files import ROOT
from builders.observe import unregistered

from lint.metrics_page import METRICS, find_metric

PACKAGE = ROOT / "streamrl"
SECTIONS = sorted({metric.name.partition("/")[0] for metric in METRICS})
NAME = re.compile(rf"^({'|'.join(SECTIONS)})/[a-z0-9_@/]*[a-z0-9]$")
# Parts from which a sum is made, which leave the metrics before anybody sees them, and names filled in with known ones.
NOT_EMITTED = {"perf/trained_tokens", "perf/trained_samples", "time/x_s", "eval/x/x", "prompts/x", "prompts/x/x"}


@cache
def written_names() -> dict[str, str]:
    """Metric names in string literals and f-strings (a filled-in part stands as ``x``), and where."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        in_room = path.relative_to(PACKAGE).parts
        # Other files of ``observe`` read metrics that are written elsewhere.
        if in_room[0] == "observe" and in_room[1] not in ("report", "user_calls.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if NAME.match(text):
                found[text] = f"{path.relative_to(PACKAGE)}:{node.lineno}"
    return found


def test_every_name_in_the_code_is_registered() -> None:
    names = written_names()
    assert len(names) > 20, "the search finds nothing any more"
    unknown = [f"{names[name]}: {name}" for name in unregistered(sorted(names.keys() - NOT_EMITTED))]
    assert not unknown, "add to streamrl/observe/run_files/metrics.txt:\n" + "\n".join(unknown)


def test_every_registered_name_is_written_somewhere() -> None:
    written = {found[0].name for name in written_names() if (found := find_metric(name))}
    filled_in = ("eval/", "length/", "prompts/", "judge/", "teacher/")
    put_together = {metric.name for metric in METRICS if metric.name.startswith(filled_in)}
    by_the_socket = {"health/telemetry_dropped_total", "health/metrics_refused_total"}
    promised = {metric.name for metric in METRICS} - written - put_together - by_the_socket
    assert not promised, "the registry describes what nobody reports"
