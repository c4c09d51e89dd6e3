"""What the user sees: golden lines, plain and on a terminal; the summary and the curve."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.observe.curve import Curve, round_ticks, smoothed, sparkline, svg_plot, terminal_plot
from streamrl.observe.run_history import MOST_POINTS, ThinnedCurve
from streamrl.observe.stdout import StdoutReporter
from streamrl.observe.step_line import duration, evaluation_line, short_count, step_line, table_header, table_row
from streamrl.run_events import (
    EvaluationFinished,
    RunDecided,
    RunFinished,
    RunProgress,
    RunStarted,
    RunWarning,
    StartProgress,
    StepFinished,
)

METRICS = {
    "reward/mean": 0.4312,
    "reward/zero_std_ratio": 0.125,
    "completion/length_mean": 143.2,
    "completion/truncated_ratio": 0.031,
    "policy/kl_rollout": 0.00123,
    "policy/entropy": 1.834,
    "optim/grad_norm": 0.7123,
    "async/staleness_mean": 0.0,
    "perf/gen_tok_s": 10_212.0,
    "perf/train_tok_s": 9_812.0,
    "util/bubble_ratio": 0.41,
    "util/trainer_idle_ratio": 0.62,
}


def test_the_step_line() -> None:
    assert step_line(12, 100, METRICS, 2.13, 187.4) == (
        "step  12/100  reward 0.431  no-signal 12%  len 143  cut 3%  kl 0.00123  entropy 1.83  grad 0.712  stale 0.0  "
        "tok/s gen/train 10k/9.8k  idle engine/trainer 41%/62%  2.1 s  3m07s left"
    )
    assert step_line(100, 100, {"reward/mean": float("nan")}, 12.0, 0.0) == (
        "step 100/100  reward -  no-signal -  len -  cut -  kl -  entropy -  grad -  stale -  "
        "tok/s gen/train -/-  idle engine/trainer -/-  12 s  done"
    )


def test_the_table_lines_up_and_fits_on_a_terminal() -> None:
    header, row = table_header(100), table_row(12, 100, METRICS, 2.13, 187.4)
    assert len(header) == len(row) <= 120
    assert header.split() == [
        *("step", "reward", "no-signal", "len", "cut", "kl", "entropy", "grad", "stale"),
        *("tok/s", "gen/train", "idle", "engine/trainer", "time", "left"),
    ]
    assert row.split() == [
        *("12/100", "0.431", "12%", "143", "3%", "0.00123", "1.83", "0.712", "0.0"),
        *("10k/9.8k", "41%/62%", "2.1", "s", "3m07s"),
    ]


SHORT = METRICS | {"round/short/group_size": 8.0, "round/short/total": 4.0, "round/long/total": 1.0}
LONG = METRICS | {"round/long/group_size": 12.4, "round/short/total": 4.0, "round/long/total": 2.0}


def test_the_kind_of_round_and_the_group_size() -> None:
    assert step_line(12, 100, SHORT, 2.1, 187.4, show_round=True).startswith(
        "step  12/100  round short 8  reward 0.431"
    )
    assert step_line(12, 100, LONG, 2.1, 187.4, show_round=True).startswith("step  12/100  round long 12  reward")
    header = table_header(100, show_round=True)
    rows = [table_row(12, 100, metrics, 2.13, 187.4, show_round=True) for metrics in (SHORT, LONG, METRICS)]
    assert {len(header), *map(len, rows)} == {len(table_header(100))}, "as wide as without"
    assert header.split()[:2] == ["step", "round"]
    assert [row.split()[1:3] for row in rows[:2]] == [["short", "8"], ["long", "12"]]
    assert rows[2].split()[1:3] == ["-", "0.431"]
    synchronous = table_row(12, 100, METRICS | {"round/synchronous/group_size": 16.0}, 2.13, 187.4, show_round=True)
    assert synchronous.split()[1:3] == ["synch", "16"]
    assert len(synchronous) == len(header)


def test_the_round_is_shown_from_where_it_varies_on() -> None:
    for terminal in (False, True):
        stream = io.StringIO()
        with StdoutReporter(stream, terminal=terminal, clock=Clock()) as report:
            report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=5, parameters=1))
            for step, metrics in enumerate((SHORT, SHORT, LONG, SHORT), start=1):
                report(StepFinished(step=step, policy_version=step, metrics=metrics))
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
        shown = [re.findall(r"(short 8|long 12)", line) for line in text.splitlines() if "0.431" in line]
        assert shown == [[], [], ["long 12"], ["short 8"]]
        assert text.count("no-signal") == (2 if terminal else 4), "the head of the table comes again with the column"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1m00s"),
        (3599.7, "1h00m"),
        (86_399.9, "1d00h"),
        (-1, "0.0 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999.4, "999"), (999.6, "1.0k"), (9_960, "10k"), (2.13e6, "2.1M")]
)
def test_short_counts(value: float, text: str) -> None:
    assert short_count(value) == text


def test_the_evaluation_line() -> None:
    metrics = {"eval/held_out/avg@1": 0.5312, "eval/held_out/prompts": 2048.0, "eval/held_out/truncated_ratio": 0.1}
    assert evaluation_line(20, metrics) == "eval at step 20: held_out 0.531 (2048 prompts)"
    several = {"eval/held_out/avg@4": 0.5, "eval/held_out/pass@1": 0.5, "eval/held_out/pass@4": 0.8125}
    assert evaluation_line(20, several) == "eval at step 20: held_out 0.500 pass@4 0.812"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_of(clock: Clock, directory: Path, steps: int = 4) -> Iterator[object]:
    yield StartProgress(process="engine-0", state="loading", seconds=3.0)
    clock.now += 31
    yield StartProgress(process="engine-0", state="loading", seconds=34.0)
    yield StartProgress(process="engine-0", state="ready", seconds=34.0)
    yield StartProgress(process="engine-0", state="ready", seconds=34.5)
    yield RunStarted(
        run_id="sort-1", directory=str(directory), metrics_endpoint="ipc:///tmp/m", steps=steps, parameters=299_136
    )
    yield EvaluationFinished(step=0, policy_version=0, metrics={"eval/held_out/avg@1": 0.1})
    for step in range(1, steps + 1):
        yield RunProgress(step=step, phase="rollout", finished=3, wanted=256)
        clock.now += 10 if step != 3 else 40
        yield RunProgress(step=step, phase="rollout", finished=255, wanted=256)
        yield StepFinished(step=step, policy_version=step, metrics=METRICS | {"reward/mean": step / 10})
    yield EvaluationFinished(step=steps, policy_version=steps, metrics={"eval/held_out/avg@1": 0.5})
    yield RunFinished(reason="finished", step=steps)


def test_a_whole_run_on_a_pipe(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    with StdoutReporter(stream, clock=clock) as report:
        for event in run_of(clock, tmp_path):
            report(event)  # type: ignore[arg-type]
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    rest = "reward {}  no-signal 12%  len 143  cut 3%  kl 0.00123  entropy 1.83  grad 0.712  stale 0.0  "
    rest += "tok/s gen/train 10k/9.8k  idle engine/trainer 41%/62%  {}"
    assert lines[:14] == [
        "engine-0 loading (34 s)",
        "engine-0 ready after 34 s",
        "run sort-1: 4 steps, 299,136 parameters",
        f"  files    {tmp_path}",
        "  metrics  streamrl watch ipc:///tmp/m",
        "eval at step 0: held_out 0.100",
        "step 1/4  " + rest.format("0.100", "10 s  30 s left"),
        "step 2/4  " + rest.format("0.200", "10 s  20 s left"),
        "step 3/4 rollout 255/256",  # nothing was printed for half a minute
        "step 3/4  " + rest.format("0.300", "40 s  20 s left"),
        "step 4/4  " + rest.format("0.400", "10 s  done"),
        "eval at step 4: held_out 0.500",
        "",
        "finished: 4 of 4 steps in 1m10s, 18 s a step",
    ]
    assert lines[14:16] == [
        "  reward/mean  0.150 -> 0.350  (means of the first and the last 2 steps)",
        "  eval/held_out/avg@1  0.100 -> 0.500  (best 0.500 at step 4)",
    ]
    assert lines[-1] == f"  curve  {tmp_path / 'curve.svg'}"
    assert any("┤" in line for line in lines[16:])
    ElementTree.fromstring((tmp_path / "curve.svg").read_text())


def test_a_whole_run_on_a_terminal(tmp_path: Path) -> None:
    clock, stream = Clock(), io.StringIO()
    with StdoutReporter(stream, terminal=True, clock=clock) as report:
        for event in run_of(clock, tmp_path, steps=25):
            report(event)  # type: ignore[arg-type]
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert text.count("no-signal") == 2, "the head comes again after 20 rows"
    assert table_row(25, 25, METRICS | {"reward/mean": 2.5}, 10.0, 0.0) in text


def test_a_watcher_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clock = Clock()
    with StdoutReporter(io.StringIO(), clock=clock) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=2, parameters=1))
        report(StepFinished(step=1, policy_version=1, metrics=METRICS))
        report(RunFinished(reason="drained", step=1))
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_with_an_alarm() -> None:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=Clock()) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=9, parameters=1, policy_version=8))
        report(RunWarning(step=8, message="policy/x is 1, above 0.5: look there"))
        report(RunDecided(step=9, subject="group_size", reason="16 straggles less", figures={"risk": 0.1}))
        report(RunFinished(reason="drained", step=8))
    assert stream.getvalue().splitlines() == [
        "run r: 9 steps, 1 parameters, from step 8",
        "warning at step 8: policy/x is 1, above 0.5: look there",
        "group_size from step 9 on: 16 straggles less",
        "",
        "drained: 8 of 9 steps in 0.0 s",
    ]


def test_a_run_that_made_no_step_ends_without_a_curve(tmp_path: Path) -> None:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=Clock()) as report:
        report(RunStarted(run_id="r", directory=str(tmp_path), metrics_endpoint="", steps=2, parameters=1))
        report(RunFinished(reason="drained", step=0))
    assert stream.getvalue().splitlines()[-1] == "drained: 0 of 2 steps in 0.0 s"
    assert not (tmp_path / "curve.svg").exists()


# ---- curves --------------------------------------------------------------------------------------

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60)
bounded = st.lists(st.floats(-1e12, 1e12) | st.just(float("nan")), max_size=60)


@given(values)
def test_a_sparkline_has_at_most_its_width(numbers: list[float]) -> None:
    assert len(sparkline([n for n in numbers if abs(n) < 1e300], 40)) <= 40


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


@given(bounded)
def test_plots_of_anything_are_whole(numbers: list[float]) -> None:
    curve = Curve('a<b & "c"', tuple(enumerate(numbers)))
    lines = terminal_plot([curve, Curve("empty", ())], width=30, height=5)
    assert len(lines) in (0, 7)
    document = ElementTree.fromstring(svg_plot([curve], title="x < y"))
    assert document.tag.endswith("svg")
    assert "nan" not in svg_plot([curve], title="t")


def test_the_plot_draws_where_the_points_are() -> None:
    lines = terminal_plot([Curve("up", ((0, 0.0), (10, 1.0)))], width=10, height=4)
    assert [line[:5].strip() for line in lines[:4]] == ["1.05", "", "", "-0.05"] or lines[0].startswith(" 1.05")
    first, last = lines[0].partition("┤")[2], lines[3].partition("┤")[2]
    assert first.strip("\u2800"), "the top row holds the end of the line"
    assert len(first) == 10
    assert len(last) <= 3, "the bottom row holds only its beginning"


def test_ticks_are_round_numbers() -> None:
    assert round_ticks(0.17, 0.73) == [0.2, 0.4, 0.6]
    assert round_ticks(0, 100) == [0, 20, 40, 60, 80, 100]


def test_the_moving_average_starts_at_the_first_value_and_follows() -> None:
    curve = smoothed(Curve("c", tuple((i, 0.0 if i < 50 else 1.0) for i in range(100))))
    assert curve.points[0][1] == 0.0
    assert curve.points[-1][1] > 0.99
    assert smoothed(Curve("c", ((0, 5.0), (1, 5.0)))).points[1][1] == pytest.approx(5.0)


@pytest.mark.parametrize("steps", [3, MOST_POINTS - 1, 5 * MOST_POINTS + 1])
def test_a_curve_of_many_steps_has_not_many_points(steps: int) -> None:
    curve = ThinnedCurve()
    for step in range(steps):
        curve.add(step, 2.0 * step)
    assert len(curve.points) <= MOST_POINTS and len(curve.points) > min(steps - 1, MOST_POINTS // 4)
    assert all(value == 2 * step for step, value in curve.points)
    moments = [step for step, _ in curve.points]
    assert moments == sorted(moments) and moments[-1] > 0.99 * (steps - 1) - 1
    assert (curve.count, curve.first[:3], list(curve.last)[-1]) == (steps, [0.0, 2.0, 4.0], 2.0 * (steps - 1))
    assert len(curve.first) == len(curve.last) <= 10
