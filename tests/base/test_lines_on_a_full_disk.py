"""Files of lines that a run appends to, where the disk gets full in the middle of a line and has room again later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.observe.report.trajectory_trace import read_trace

# In a process of its own: what ends a file at so many bytes would do so for pytest's files, too.
WRITER = """
import resource, sys
from collections.abc import Callable
from pathlib import Path

from streamrl.observe.report.trajectory_trace import TRACE_SCHEMA, EnginesLine, TraceHeader, TrajectoryTrace
from streamrl.base.run_events import StepFinished
from streamrl.observe.sinks import JsonlSink

kind, path = sys.argv[1], Path(sys.argv[2])
sizes = dict(max_tokens=8, max_model_len=8, prompts_per_batch=1, group_size=2, max_staleness=0, engines=1, capacity=1)
header = TraceHeader(
    schema=TRACE_SCHEMA, run_id="r", seed=0, temperature=1.0, rounds="synchronous", **sizes
)
match kind:
    case "trace":
        trace = TrajectoryTrace(path, header)
        append = lambda n: trace.append(EnginesLine(time_s=float(n), running=n, waiting=0, kv_usage=0.0))
    case "metrics":
        sink = JsonlSink(path)
        append = lambda n: sink.record(StepFinished(step=n, policy_version=n, metrics={}))

def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

append(0)
whole = path.read_bytes()
room(len(whole) + 20)
for _ in range(2):
    try:
        append(1)
    except OSError as error:
        print(error.strerror)
assert path.read_bytes() == whole, path.read_bytes()[len(whole):]
room(resource.RLIM_INFINITY)
append(2)
"""


def lines_of(kind: str, path: Path) -> list[int]:
    """The numbers of the lines, as a reader of the file gets them."""
    match kind:
        case "trace":
            return [line.running for line in read_trace(path).engines]
        case _:
            return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["trace", "metrics"])
def test_half_a_line_is_refused_and_does_not_spoil_the_next(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, kind, str(tmp_path / kind)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("File too large\n" * 2, "", 0)
    assert lines_of(kind, tmp_path / kind) == [0, 2]
