"""A stretch of a run as a picture, from its trace: bars of trajectories on engine slots, bands of training."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.launch.comparison.run_figures import WARM_UP_STEPS, RunFigures, samples_of
from streamrl.observe.dashboard.timeline_columns import TimelineColumns
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.report.trajectory_trace import TRAINED
from streamrl.observe.terminal.curve import round_ticks

WIDTH, LEFT, TOP, BOTTOM = 1100, 8, 20, 24
LANE_HEIGHT, MOST_HEIGHT = 6.0, 170.0


class Bar(NamedTuple):
    """A trajectory in slot ``lane``: sampled from ``begin`` to ``end``, its reward known at ``scored``, in seconds of
    the stretch. ``trained``: not dropped, nor under way when the run ended."""

    lane: int
    begin: float
    end: float
    scored: float
    trained: bool


def typical_step(run: RunFigures) -> int:
    """The place, among all steps of the run, of the measured one whose seconds a sample are the median."""
    places = range(WARM_UP_STEPS, WARM_UP_STEPS + len(run.measured))
    each = sorted(places, key=lambda at: run.steps[at]["time/step_s"] / samples_of(run.steps[at]))
    return each[(len(each) - 1) // 2]


def bars_of(trace: TimelineColumns, begin: float, seconds: float) -> list[Bar]:
    """The trajectories of ``seconds`` of the run from ``begin`` on; slots that worked longest in them come first."""
    names = ("begun", "rollout_end", "reward_end")
    since, until, scored = (trace.column(name) - begin for name in names)
    slot, trained = trace.column("slot"), trace.column("outcome") == trace.number_of_outcome(TRAINED)
    (seen,) = np.nonzero((since < seconds) & (scored > 0) & (until > since))
    worked = np.clip(until, 0, seconds) - np.clip(since, 0, seconds)
    lanes = np.argsort(-np.bincount(slot[seen], weights=worked[seen]), kind="stable").tolist()
    rank = {one: place for place, one in enumerate(lanes)}
    columns = (slot, since, until, scored, trained)
    return [
        Bar(rank[lane], *times) for lane, *times in zip(*(column[seen].tolist() for column in columns), strict=True)
    ]


def timeline_svg(run: Path, place: int, seconds: float, title: str) -> str:
    """An SVG element of the ``seconds`` of the run in a directory that begin with its step at ``place``: a bar for each
    trajectory, a band from a full batch until its version is live."""
    trace = TimelineColumns(RunFiles(run))
    trace.refresh()
    if place >= len(trace.steps):
        return "<p>its trace is gone</p>"
    begin = trace.steps[place].time_s - trace.steps[place].step_s
    bars = bars_of(trace, begin, seconds)
    lanes = max((bar.lane + 1 for bar in bars), default=1)
    height = min(LANE_HEIGHT, MOST_HEIGHT / lanes)
    bottom = TOP + height * lanes

    def x(moment: float) -> float:
        return LEFT + min(max(moment / seconds, 0.0), 1.0) * (WIDTH - 2 * LEFT)

    def shapes() -> Iterator[str]:
        for step in trace.steps:
            live = step.time_s - begin
            full = live - step.step_s + step.rollout_s
            if live > 0 and full < seconds:
                yield _rect("train", x(full), x(live), TOP, bottom - TOP)
                text = f"step {step.policy_version}: {step.samples} samples, live at {live:.1f} s"
                yield f'<circle class="live" cx="{x(live):.1f}" cy="{TOP - 7}" r="4"><title>{text}</title></circle>'
        for bar in bars:
            y, thick = TOP + bar.lane * height, max(height * 0.9, 0.8)
            yield _rect("trained" if bar.trained else "dropped", x(bar.begin), x(bar.end), y, thick)
            yield _rect("reward", x(bar.end), x(bar.scored), y, thick)
        for tick in round_ticks(0.0, seconds, 8):
            yield f'<text x="{x(tick):.1f}" y="{bottom + 16:.1f}">{tick:g} s</text>'

    head = f'<svg viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(shapes())}</svg>"


def _rect(kind: str, left: float, right: float, top: float, height: float) -> str:
    if right - left < 0.05:
        return ""
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.2f}" height="{height:.1f}"/>'
