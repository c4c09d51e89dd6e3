"""The first line of a recorded trace, for tests that write one."""

from __future__ import annotations

from typing import Any

from streamrl.observe.report.trajectory_trace import TRACE_SCHEMA, TraceHeader


def trace_header(**changes: Any) -> TraceHeader:
    """The header of a small run, with ``changes``."""
    values: dict[str, Any] = {
        "schema": TRACE_SCHEMA,
        "run_id": "run-1",
        "seed": 0,
        "max_tokens": 99,
        "max_model_len": 200,
        "temperature": 1.0,
        "prompts_per_batch": 4,
        "group_size": 4,
        "rounds": "synchronous",
        "max_staleness": 0,
        "engines": 1,
        "capacity": 64,
    }
    return TraceHeader(**{**values, **changes})
