"""Calibration recovers the constants of a cluster from what a run on it would record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds import control_settings, with_part

from streamrl.control.trajectory_trace import (
    EnginesLine,
    RecordedRun,
    StepLine,
    TraceHeader,
    TrajectoryLine,
    TrajectoryTrace,
)
from streamrl.errors import StreamRLError
from streamrl.simulate.calibrate import calibrate, non_negative_least_squares
from streamrl.simulate.cluster import DEMO, ClusterModel
from streamrl.simulate.engines import Request
from streamrl.simulate.lengths import ModelledLengths, RecordedLengths
from streamrl.simulate.recording import life_times, load_recording
from streamrl.simulate.report import StepRow
from streamrl.simulate.simulation import Simulation, simulate

TRUTH = with_part(
    with_part(DEMO, "engine", admission_s=1e-3, admission_per_running_s=0.0),
    "reward",
    median_s=0.004,
    sigma=0.5,
)


class Recorder(Simulation):
    """A simulated run that records what a real one records."""

    def __init__(self, model: ClusterModel, steps: int, *, samples: bool) -> None:
        super().__init__(
            control_settings(batch_groups=16, group_size=8, steps=steps),
            model,
            ModelledLengths(model.lengths, 4),
            seed=4,
        )
        self.samples = samples
        self.trajectories: list[TrajectoryLine] = []
        self.steps: list[StepLine] = []
        self.engine_lines: list[EnginesLine] = []
        self._told_s = 0.0

    def _sampled(self, request: Request) -> None:
        now = self.agenda.now
        super()._sampled(request)
        if self.samples and now - self._told_s >= 0.05:
            self._told_s = now
            seen = self.rollout.measure()
            self.engine_lines.append(
                EnginesLine(
                    time_s=now, running=int(seen.running), waiting=0, kv_usage=0.0, token_s=seen.token_s,
                    mean_running=seen.running,
                )
            )  # fmt: skip
        self.trajectories.append(
            TrajectoryLine(
                prompt_id=request.id.prompt_id, group=request.id.group_id, sample=request.id.sample, attempt=0,
                prompt_tokens=request.prompt_tokens, tokens=request.length,
                finish_reason="length" if request.length >= self.model.lengths.cap else "stop", outcome="trained",
                round_kind="synchronous", launched_s=request.launched_s, ended_s=now,
                rollout_s=now - request.launched_s, reward_s=0.004, reward=1.0,
                oldest_version=request.first_version, newest_version=request.first_version,
            )
        )  # fmt: skip

    def recorded(self) -> RecordedRun:
        rows: tuple[StepRow, ...] = self.run().recent
        worked = self.model.trainer.token_s
        steps = tuple(
            StepLine(
                time_s=0.0, policy_version=row.policy_version, round_kind=row.round_kind, group_size=8.0,
                samples=row.samples, trained_tokens=row.trained_tokens, generated_tokens=int(row.generated_tokens),
                step_s=row.step_s, rollout_s=row.rollout_s, training_s=row.training_s, push_s=row.push_s, paused_s=0.01,
                forward_backward_s=worked * row.trained_tokens,
            )
            for row in rows
        )  # fmt: skip
        header = TraceHeader(
            schema=1, run_id="simulated", started_at=0.0, seed=0, max_tokens=self.model.lengths.cap, max_context=500,
            temperature=1.0, prompts_per_batch=16, group_size=8, rounds="synchronous", max_staleness=0, engines=1,
            capacity=128,
        )  # fmt: skip
        return RecordedRun(
            header=header, trajectories=tuple(self.trajectories), steps=steps, engines=tuple(self.engine_lines)
        )


def test_least_squares_never_go_below_zero() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    falling = non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0]))
    assert falling == pytest.approx([2.0, 0.0]), "a slope below zero is none at all"


def test_a_recorded_run_gives_its_constants_back() -> None:
    fit = calibrate(Recorder(TRUTH, 10, samples=True).recorded())
    engine, truth = fit.model.engine, TRUTH.engine
    assert fit.step_error < 1e-6 and fit.life_error < 0.1
    assert engine.base_s == pytest.approx(truth.base_s, rel=1e-3)
    assert engine.per_running_s == pytest.approx(truth.per_running_s, rel=1e-3)
    assert engine.arrival_s == pytest.approx(truth.arrival_s, rel=0.2)
    assert fit.model.trainer.token_s == pytest.approx(TRUTH.trainer.token_s, rel=1e-6)
    assert fit.model.trainer.streaming_speed == 1.0
    assert fit.model.push.seconds == pytest.approx(TRUTH.push.seconds, rel=0.05)
    assert fit.model.lengths.cap_share == pytest.approx(0.041, abs=0.02)
    assert fit.model.lengths.correlation == pytest.approx(0.65, abs=0.12)


def test_the_fitted_cluster_predicts_the_step_of_another_shape() -> None:
    fit = calibrate(Recorder(TRUTH, 10, samples=True).recorded())
    chosen = control_settings(batch_groups=8, group_size=8)
    lengths = ModelledLengths(TRUTH.lengths, 9)
    predicted, real = (simulate(chosen, model, 12, lengths=lengths) for model in (fit.model, TRUTH))
    assert predicted.step_s_mean == pytest.approx(real.step_s_mean, rel=0.1)


def test_a_recorded_run_is_read_back_and_replayed(tmp_path: Path) -> None:
    run = Recorder(TRUTH, 3, samples=True).recorded()
    trace = TrajectoryTrace(tmp_path / "trace.jsonl", run.header)
    for line in (*run.trajectories, *run.steps, *run.engines):
        trace.append(line)
    trace.close()
    assert load_recording(tmp_path) == run == load_recording(tmp_path / "trace.jsonl")
    lives = life_times(run)
    assert len(lives.seconds) == len(run.trajectories) == 3 * 128
    assert (lives.running >= 1).all() and (lives.running <= 128).all()
    replayed = simulate(
        control_settings(batch_groups=16, group_size=8), TRUTH, 3, lengths=RecordedLengths(run, resample=False)
    )
    assert replayed.trained_tokens == sum(line.tokens for line in run.trajectories)


def test_a_run_too_short_to_fit_and_a_missing_trace_are_named(tmp_path: Path) -> None:
    run = Recorder(TRUTH, 2, samples=True).recorded()
    with pytest.raises(StreamRLError, match=r"run simulated recorded 256 whole completions and 2 steps"):
        calibrate(run)
    with pytest.raises(StreamRLError, match=r"run simulated has 0 samples of decode steps"):
        calibrate(Recorder(TRUTH, 4, samples=False).recorded())
    with pytest.raises(StreamRLError, match=r"has no trace\.jsonl"):
        load_recording(tmp_path)
