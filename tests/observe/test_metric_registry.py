"""One place says what a metric means: the page, the step line and the names in use agree with it."""

from __future__ import annotations

from builders.files import ROOT
from builders.observe import unregistered

from lint.metrics_page import METRICS, find_metric, metrics_page
from streamrl.observe.terminal.step_line import COLUMNS, FURTHER


def test_the_page_is_made_from_the_registry() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == metrics_page(), "run: python lint/metrics_page.py > docs/metrics.md"


def test_names_are_unique_and_fully_described() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.meaning.endswith(".") and metric.unit for metric in METRICS)


def test_the_step_line_shows_registered_metrics() -> None:
    assert {column.metric for column in (*COLUMNS, *FURTHER)} <= {metric.name for metric in METRICS}


def test_filled_in_names_are_found() -> None:
    found = find_metric("reward/func/sorted_trace/timed_out_total")
    assert found is not None
    assert found[0].name == "reward/func/<function>/<kind>_total" and found[1]["kind"] == "timed_out"
    assert find_metric("eval/held_out/avg@1") is not None
    assert unregistered(["reward/mean", "reward/meen", "eval/a/b/avg@1"]) == ["reward/meen", "eval/a/b/avg@1"]
