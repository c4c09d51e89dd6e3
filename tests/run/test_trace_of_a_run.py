"""The trace of whole runs, on simulated engines: every trajectory once, with the end that control gave it."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from oracle.trace_header import trace_header

from streamrl.observe.report.run_report import RunReport
from streamrl.observe.report.trajectory_trace import TRAINED, TrajectoryTrace, read_trace
from streamrl.recipe.scheduling import LengthSorted, RoundKind, TailBatching
from tests.run import scripted_parts

POLICIES: list[dict[str, Any]] = [
    {"rounds": RoundKind.SYNCHRONOUS},
    {"rounds": RoundKind.CONTINUOUS, "max_staleness": 2},
    {
        "rounds": RoundKind.TAIL_BATCHING,
        "tail_batching": TailBatching(prompt_oversampling=1.5, response_oversampling=1.5),
    },
    {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=3)},
    {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True),
        "max_staleness": 2,
    },
]


@pytest.mark.parametrize("policy", POLICIES)
async def test_the_trace_of_a_run_agrees_with_its_accounting(
    policy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controller, stages and simulated engines: each trajectory is in the trace once, with the end control gave it."""
    trace = TrajectoryTrace(tmp_path / "trace.jsonl", trace_header())
    monkeypatch.setattr(scripted_parts, "RunReport", partial(RunReport, trace=trace))
    settings = scripted_parts.run_settings(**{"dynamic_sampling": True, "max_failed_share": 0.9} | policy)
    run = scripted_parts.SimulatedRun(settings, tmp_path, failing=13)
    with closing(trace):
        assert await run.run() == "finished"
    recorded = read_trace(tmp_path / "trace.jsonl")
    ids = [(line.group, line.sample, line.attempt) for line in recorded.trajectories]
    assert len(ids) == len(set(ids))
    outcomes = Counter(line.outcome for line in recorded.trajectories)
    accounting = run.controller.state.accounting()
    assert outcomes.pop(TRAINED) == accounting.trained
    assert outcomes == accounting.dropped
    assert [line.policy_version for line in recorded.steps] == [1, 2, 3, 4, 5, 6]
    assert sum(line.samples for line in recorded.steps) == accounting.trained
    assert sum(line.tokens for line in recorded.trajectories if line.outcome == TRAINED) == sum(
        line.trained_tokens for line in recorded.steps
    )
