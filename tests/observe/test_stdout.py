"""What the user sees: golden lines, plain and on a terminal; the summary and the curve."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.base import SetClock
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.printable import log_to
from streamrl.base.run_events import (
    CompletionSampled,
    EvaluationFinished,
    RunDecided,
    RunFinished,
    RunProgress,
    RunResumed,
    RunStarted,
    RunWarning,
    StartProgress,
    StepFinished,
)
from streamrl.observe.terminal.curve import Curve, terminal_plot
from streamrl.observe.terminal.run_history import MOST_POINTS, RunHistory
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.observe.terminal.step_line import (
    HELD_OUT,
    LEGEND,
    duration,
    evaluation_line,
    further_columns,
    short_count,
    step_line,
    table_header,
    table_row,
)

METRICS = {
    "reward/mean": 0.4312,
    "reward/zero_std_ratio": 0.125,
    "completion/length_mean": 143.2,
    "completion/truncated_ratio": 0.031,
    "policy/kl_rollout": 4.39e-10,
    "policy/reference_kl": 0.0123,
    "policy/mismatch_abs_mean": 5.1e-06,
    "policy/entropy": 1.834,
    "optim/grad_norm": 0.7123,
    "async/staleness_mean": 0.0,
    "perf/gen_tok_s": 10_212.0,
    "perf/train_tok_s": 9_812.0,
    "util/free_slot_ratio": 0.71,
    "util/engine_idle_ratio": 0.041,
    "util/trainer_idle_ratio": 0.62,
}


ALL = further_columns(frozenset({"round", "kl", "stale"}), 100, None)
SHORT = METRICS | {"round/short/group_size": 8.0, "round/short/total": 4.0, "round/long/total": 1.0}
LONG = METRICS | {"round/long/group_size": 12.4, "round/short/total": 4.0, "round/long/total": 2.0}


def test_the_step_line() -> None:
    assert step_line(12, 100, METRICS | {HELD_OUT: 0.5}, 2.13, 187.4) == (
        "step  12/100  reward 0.431  held-out 0.500  len 143  cut 3%  no-signal 12%  entropy 1.83  2.1 s  3m07s left"
    )
    assert step_line(100, 100, {"reward/mean": float("nan")}, 12.0, 0.0, ALL) == (
        "step 100/100  reward -  held-out -  len -  cut -  no-signal -  entropy -  round -  kl -  stale -  tok/s -  "
        "grad -  free-slots -  engine-idle -  trainer-idle -  mismatch -  12 s  done"
    )
    assert "  round short 8  kl 0.012  stale 0.0  tok/s 9.8k  " in step_line(12, 100, SHORT, 2.1, 187.4, ALL)


def test_the_kl_column_is_the_one_to_the_reference_and_needs_one() -> None:
    """The mismatch of engine and trainer (1e-10 on one machine) stood there, whatever the coefficient."""
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=2, parameters=1))
        without = {name: value for name, value in METRICS.items() if name != "policy/reference_kl"}
        report(StepFinished(step=1, policy_version=1, metrics=without))
        report(StepFinished(step=2, policy_version=2, metrics=METRICS))
    first, second = [line for line in stream.getvalue().splitlines() if line.startswith("step ")]
    assert " kl " not in first and "  kl 0.012  " in second
    assert "  mismatch 5e-06  " in first


@pytest.mark.parametrize("steps", [9, 1000, 100_000])
def test_the_table_fits_on_79_columns_whatever_moves(steps: int) -> None:
    """Nine columns always; further ones as far as there is room, those that the recipe moves first."""
    extreme = METRICS | {
        "reward/mean": -1234.5678, HELD_OUT: -12.3456, "completion/length_mean": 31_999.6, "policy/entropy": 11.93,
        "completion/truncated_ratio": 1.0, "reward/zero_std_ratio": 1.0, "policy/reference_kl": 1.23e-05,
    }  # fmt: skip
    for moving in (frozenset(), frozenset({"kl"}), frozenset({"round", "kl", "stale"})):
        further = further_columns(moving, steps, 79)
        header = table_header(steps, further)
        rows = [table_row(steps, steps, m | SHORT | extreme, 2e9, 2e9, further) for m in (METRICS, LONG)]
        rows.append(table_row(1, steps, METRICS, 3599.0, 86_399.0, further))
        assert {len(header), *map(len, rows)} == {len(header)} and len(header) <= 79
        words = header.split()
        assert words[:7] == ["step", "reward", "held-out", "len", "cut", "no-signal", "entropy"]
        assert words[-2:] == ["time", "left"] and len(words) == 9 + len(further), "one word over each column"
        assert len(rows[0].split()) == len(words) + ("round" in words)
    assert [column.label for column in further_columns(frozenset({"kl"}), 9, 79)] == ["kl", "tok/s"]
    assert further_columns(frozenset(), 100_000, 79) == ()
    assert [column.label for column in further_columns(frozenset(), 100, 120)] == [
        *("tok/s", "grad", "free-slots", "engine-idle", "trainer-idle")
    ]


def test_a_column_is_shown_from_where_it_moves_on() -> None:
    for terminal in (False, True):
        stream = io.StringIO()
        with StdoutReporter(stream, terminal=terminal, clock=SetClock(0.0)) as report:
            report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=5, parameters=1))
            for step, metrics in enumerate((SHORT, SHORT, LONG, SHORT), start=1):
                report(StepFinished(step=step, policy_version=step, metrics=metrics))
        text = without_escapes(stream.getvalue()).partition("equal rewards")[2]
        shown = [re.findall(r"(short 8|long 12)", line) for line in text.splitlines() if "0.431" in line]
        assert shown == [[], [], ["long 12"], ["short 8"]]
        assert text.count("no-signal") == (2 if terminal else 4), "the head of the table comes again with the column"


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


SAMPLE = CompletionSampled(
    step=10,
    chosen="random",
    prompt_id="p",
    prompt="sort 3 1 2",
    text="1 2 3\n\x1b[2J" + "x" * 999,
    reward=0.73,
    rewards={"exact": 1.0, "brief": -0.27},
    tokens=22,
    finish_reason="stop",
)


def test_everything_fits_on_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal breaks what is longer in the middle of a word; a path alone may be longer, to be copied."""
    monkeypatch.setenv("COLUMNS", "80")
    clock, stream = SetClock(0.0), Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    handlers, logging.root.handlers = logging.root.handlers, []
    try:
        log_to(stream, logging.WARNING, "%(levelname)s %(message)s")
        with StdoutReporter(stream, clock=clock) as report:
            report(StartProgress(process=", ".join(f"engine-{i}" for i in range(40)), state="starting", seconds=1))
            for event in run_of(clock, Path("/d"), steps=25):
                report(event)  # type: ignore[arg-type]
                if isinstance(event, RunProgress):
                    logging.getLogger("x").warning("somebody asked %s", "for what " * 20)
            report(RunWarning(step=3, message="reward/zero_std_ratio is 1, above 0.95: " + "look there " * 20))
            report(SAMPLE)
    finally:
        logging.root.handlers = handlers
    text = without_escapes(stream.getvalue())
    lines = [line for part in text.split("\n") for line in part.split("\r")]
    assert max(map(len, lines)) <= 80
    assert "waiting for engine-0, engine-1" in text and "step 3/25 rollout ━" in text
    warned = [line for line in lines if "WARNING" in line]
    assert len(warned) == 50 and all(line.startswith("WARNING somebody asked for what") for line in warned)


def test_a_terminal_of_one_column_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    clock, stream = SetClock(0.0), Terminal()
    with StdoutReporter(stream, clock=clock) as report:
        report(StartProgress(process="engine-0", state="starting", seconds=1))
        for event in run_of(clock, Path("/d"), steps=2):
            report(event)  # type: ignore[arg-type]
    assert "engine-0" in without_escapes(stream.getvalue())


def test_a_completion_is_one_line_without_control_characters() -> None:
    """A completion is shown on one line without control characters."""
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(SAMPLE)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(
        "sample at step 10: reward 0.730 (exact 1.000, brief -0.270), 22 tokens, stop: "
        '"sort 3 1 2" -> "1 2 3\\n\\x1b[2Jxxx'
    )
    assert len(line) < 320 and "[... 849 characters ...]" in line
    dimmed = io.StringIO()
    with StdoutReporter(dimmed, terminal=True, clock=SetClock(0.0)) as report:
        report(SAMPLE)
    assert "sample at step 10" in without_escapes(dimmed.getvalue())


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
    each = metrics | {"eval/held_out/func/exact/mean": 0.5312, "eval/held_out/func/brief/mean": -0.27}
    assert evaluation_line(20, each).endswith("held_out 0.531 (2048 prompts); exact 0.531, brief -0.270")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_of(clock: SetClock, directory: Path, steps: int = 4) -> Iterator[object]:
    both = "engine-0, trainer-0"
    yield StartProgress(process=both, state="starting", seconds=3.0)
    yield StartProgress(process="trainer-0", state="ready", seconds=3.0)
    clock.now += 31
    yield StartProgress(process=both, state="starting", seconds=34.0, phases={"engine-0": "imports vLLM"})
    yield StartProgress(process="engine-0", state="ready", seconds=34.0)
    yield StartProgress(process="engine-0", state="ready", seconds=34.5)
    yield StartProgress(process=both, state="starting", seconds=99.0)
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
    clock, stream = SetClock(0.0), io.StringIO()
    with StdoutReporter(stream, clock=clock) as report:
        for event in run_of(clock, tmp_path):
            report(event)  # type: ignore[arg-type]
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    rest = "reward {}  held-out 0.100  len 143  cut 3%  no-signal 12%  entropy 1.83  kl 0.012  tok/s 9.8k  grad 0.71  "
    rest += "free-slots 71%  engine-idle 4%  trainer-idle 62%  mismatch 5e-06  {}"
    assert lines[:17] == [
        "trainer-0 ready after 3.0 s",
        "waiting for engine-0: imports vLLM (34 s)",
        "engine-0 ready after 34 s",
        "run sort-1: 4 steps, 299,136 parameters",
        f"  files    {tmp_path}",
        "  metrics  streamrl watch ipc:///tmp/m",
        *LEGEND,
        "eval at step 0: held_out 0.100",
        "step 1/4  " + rest.format("0.100", "10 s  30 s left"),
        "step 2/4  " + rest.format("0.150", "10 s  20 s left"),
        "step 3/4 rollout 255/256",  # nothing was printed for half a minute
        "step 3/4  " + rest.format("0.200", "40 s  20 s left"),
        "step 4/4  " + rest.format("0.250", "10 s  done"),
        "eval at step 4: held_out 0.500",
        "",
        "finished: 4 of 4 steps in 1m10s, 18 s a step",
    ]
    assert lines[17:19] == [
        "  reward/mean  0.150 -> 0.350  (means of the first and the last 2 steps)",
        "  eval/held_out/avg@1  0.100 -> 0.500  (best 0.500 at step 4)",
    ]
    assert lines[-1] == f"  page  streamrl dashboard {tmp_path}"
    assert not any("┤" in line for line in lines), "no plot of four steps, which stand there"


def test_a_whole_run_on_a_terminal(tmp_path: Path) -> None:
    clock, stream = SetClock(0.0), io.StringIO()
    with StdoutReporter(stream, terminal=True, clock=clock) as report:
        for event in run_of(clock, tmp_path, steps=25):
            report(event)  # type: ignore[arg-type]
    text = without_escapes(stream.getvalue())
    assert text.count("no-signal") == 3, "the head comes again after 20 rows; one more in the legend"
    shown = METRICS | {"reward/mean": 2.05, HELD_OUT: 0.1}  # the mean of 1.6 to 2.5
    assert table_row(25, 25, shown, 10.0, 0.0, further_columns(frozenset({"kl"}), 25, 79)) in text
    assert any("┤" in line for line in text.splitlines())


def test_a_watcher_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clock = SetClock(0.0)
    with StdoutReporter(io.StringIO(), clock=clock) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=2, parameters=1))
        report(StepFinished(step=1, policy_version=1, metrics=METRICS))
        report(RunFinished(reason="drained", step=1))
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_with_an_alarm() -> None:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=9, parameters=1, policy_version=8))
        report(RunWarning(step=8, message="policy/x is 1, above 0.5: look there"))
        report(RunDecided(step=9, subject="group_size", reason="16 straggles less", figures={"risk": 0.1}))
        report(RunFinished(reason="drained", step=8))
    assert stream.getvalue().splitlines() == [
        "run r: 9 steps, 1 parameters, from step 8",
        *LEGEND,
        "warning at step 8: policy/x is 1, above 0.5: look there",
        "group_size from step 9 on: 16 straggles less",
        "",
        "drained: 8 of 9 steps; 0 since it was resumed, in 0.0 s",
    ]


def test_what_trains_beside_adapters_is_not_counted_as_trained() -> None:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(
            RunStarted(
                run_id="r", directory="", metrics_endpoint="", steps=9, parameters=1_243_360, trained_parameters=24_576
            )
        )
    assert stream.getvalue().startswith("run r: 9 steps, 1,243,360 parameters (24,576 of them trained)\n")


# ---- curves --------------------------------------------------------------------------------------

bounded = st.lists(st.floats(-1e12, 1e12) | st.just(float("nan")), max_size=60)


@given(bounded)
def test_plots_of_anything_are_whole(numbers: list[float]) -> None:
    curve = Curve('a<b & "c"', tuple(enumerate(numbers)))
    lines = terminal_plot([curve, Curve("empty", ())], width=30, height=5)
    assert len(lines) in (0, 7)
    assert "nan" not in "".join(lines)


def test_the_plot_draws_where_the_points_are() -> None:
    lines = terminal_plot([Curve("up", ((0, 0.0), (10, 1.0)))], width=10, height=4)
    assert [line[:5].strip() for line in lines[:4]] == ["1.05", "", "", "-0.05"] or lines[0].startswith(" 1.05")
    first, last = lines[0].partition("┤")[2], lines[3].partition("┤")[2]
    assert first.strip("\u2800"), "the top row holds the end of the line"
    assert len(first) == 10
    assert len(last) <= 3, "the bottom row holds only its beginning"


def test_a_first_reward_that_is_not_finite_is_shown_as_it_is() -> None:
    history = RunHistory(SetClock(0.0))
    history.stepped(StepFinished(step=1, policy_version=1, metrics={"reward/mean": math.nan}))
    assert math.isnan(history.line_metrics({"reward/mean": math.nan})["reward/mean"])


@pytest.mark.parametrize("steps", [3, MOST_POINTS - 1, 5 * MOST_POINTS + 1])
def test_a_curve_of_many_steps_has_not_many_points(steps: int) -> None:
    history = RunHistory(SetClock(0.0))
    for step in range(1, steps + 1):
        history.stepped(StepFinished(step=step, policy_version=step, metrics={"reward/mean": 2.0 * step}))
    ((*points, last),) = (curve.points for curve in history.curves())
    assert min(steps - 1, MOST_POINTS // 4) <= len(points) < MOST_POINTS
    assert all(value == 2 * step for step, value in points) and last == (steps, 2.0 * steps)
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_two_evaluations_are_not_joined_and_three_are() -> None:
    """Two points of an evaluation are not joined by a line, and three are. A straight line between start and end looks
    like a measurement."""
    two, three = (Curve("eval", tuple((10 * i, float(i)) for i in range(n)), marked=True) for n in (2, 3))
    dots = [sum(c > "\u2800" for line in terminal_plot([curve]) for c in line) for curve in (two, three)]
    assert dots[0] <= 2 + len(" ┤└─") * 0 + 70 and dots[1] > dots[0]


@pytest.mark.parametrize("rewards", [[], [0.0] * 30, [0.1, 0.9]], ids=["none", "constant", "two steps"])
def test_a_run_without_a_shape_gets_no_plot(tmp_path: Path, rewards: list[float]) -> None:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(RunStarted(run_id="r", directory=str(tmp_path), metrics_endpoint="", steps=30, parameters=1))
        for step, reward in enumerate(rewards, start=1):
            report(StepFinished(step=step, policy_version=step, metrics={"reward/mean": reward}))
        report(RunFinished(reason="drained", step=len(rewards)))
    assert "┤" not in stream.getvalue()


# ---- lives of a run ------------------------------------------------------------------------------


def lived(directory: Path, steps: int) -> None:
    """What a life left that was killed in step ``steps`` + 1, after it had been killed once before."""
    lines: list[dict[str, object]] = [
        {"kind": "evaluation", "step": 0, "eval/held_out/avg@1": 0.1, "eval/held_out/standard_error": 0.01}
    ]
    # Some stand there twice, and the last two were not in the journal.
    told = (*range(1, steps), *range(steps - 2, steps + 3))
    lines += [{"kind": "step", "step": step, "reward/mean": 0.01 * step, "policy/x": None} for step in told]
    text = "".join(json.dumps({"time": 1.0} | line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"kind": "step", "st')


def go_on(directory: Path, first: int, last: int, slope: float = 0.01, rate: float = 2e-4) -> str:
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        started = RunStarted(run_id="r", directory=str(directory), metrics_endpoint="", steps=42, parameters=1_200_000)
        report(started)
        if first > 1:
            report(RunResumed(policy_version=first - 1, restored=RESTORED, held_version=first - 1))
        for step in range(first, last + 1):
            metrics = {"reward/mean": slope * step, "optim/lr": rate}
            report(StepFinished(step=step, policy_version=step, metrics=metrics))
        report(RunFinished(reason="finished", step=last))
    return stream.getvalue()


RESTORED = dict.fromkeys(
    ("events", "replayed", "trained", "drawn", "scored", "unscored", "partial", "queued", "again"), 0
)


def test_curve_and_summary_cover_all_lives_of_a_run(tmp_path: Path) -> None:
    """The curve and the summary of a resumed run cover all of its lives."""
    lived(tmp_path, 40)
    text = go_on(tmp_path, 41, 42)
    assert "finished: 42 of 42 steps; 2 since it was resumed, in 0.0 s" in text
    assert "reward/mean  0.055 -> 0.375  (means of the first and the last 10 steps)" in text
    assert "eval/held_out/avg@1  0.100 -> 0.100  (best 0.100 at step 0)" in text
    plot = [line for line in text.splitlines() if line.lstrip().startswith("0 ") and line.endswith("42")]
    assert len(plot) == 1
    assert "reward 0.375  held-out 0.100" in text, "the mean of the last 10 steps goes on, too"


@pytest.mark.parametrize(
    ("slope", "rate", "change", "verdict"),
    [
        (0.01, 2e-4, "0.055 -> 0.165, +0.110 ± 0.014", "it learns"),
        (-0.01, 5e-5, "-0.055 -> -0.165, -0.110 ± 0.014", "it gets worse; look at samples"),
        (0.0, 2e-4, "0.000 -> 0.000, +0.000 ± 0.000", "no change beyond noise; training.learning_rate = 0.0002"),
        (0.0, 1e-6, "0.000 -> 0.000, +0.000 ± 0.000", "no change beyond noise; training.learning_rate = 1e-06"),
    ],
)
def test_the_run_says_after_20_steps_whether_it_learns(
    tmp_path: Path, slope: float, rate: float, change: str, verdict: str
) -> None:
    told = [line for line in go_on(tmp_path, 1, 30, slope, rate).splitlines() if "after 20 steps" in line]
    assert len(told) == 1
    assert told[0].startswith(f"after 20 steps: reward (mean of 10 steps) {change}: {verdict}")


def test_the_verdict_is_of_the_first_held_out_set() -> None:
    """The verdict is that of the first held-out set that was evaluated twice."""
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=40, parameters=1))
        for step in range(41):
            if step:
                report(StepFinished(step=step, policy_version=step, metrics={"reward/mean": -step}))
            if step % 20 == 0:
                figures = {"eval/z/avg@1": 0.25 + step / 200, "eval/z/standard_error": 0.02, "eval/b/avg@1": -step}
                report(EvaluationFinished(step=step, policy_version=step, metrics=figures))
    told = [line for line in stream.getvalue().splitlines() if line.startswith("after 20 steps")]
    assert told == ["after 20 steps: held-out 0.250 -> 0.350, +0.100 ± 0.028: it learns"]


def test_scores_of_different_sizes_are_not_compared() -> None:
    """Evaluations at the start and at the end are on all 25 prompts, those between on 12: each is compared with its
    own kind."""
    stream = io.StringIO()
    with StdoutReporter(stream, clock=SetClock(0.0)) as report:
        report(RunStarted(run_id="r", directory="", metrics_endpoint="", steps=30, parameters=1))
        for step in range(31):
            if step:
                report(StepFinished(step=step, policy_version=step, metrics={"reward/mean": 0.5}))
            if step % 10 == 0:
                score, size = (0.9, 25) if step in (0, 30) else (0.1 + step / 1000, 12)
                figures = {"eval/a/avg@1": score, "eval/a/standard_error": 0.001, "eval/a/size": size}
                report(EvaluationFinished(step=step, policy_version=step, metrics=figures))
        report(RunFinished(reason="finished", step=30))
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("after 20 steps")] == [
        "after 20 steps: held-out 0.110 -> 0.120, +0.010 ± 0.001: it learns"
    ]
    assert [line for line in lines if "eval/a/avg@1  " in line] == [
        "  eval/a/avg@1  0.900 -> 0.900  (best 0.900 at step 0)"
    ]
