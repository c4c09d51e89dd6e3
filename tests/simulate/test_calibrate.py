"""Calibration recovers the constants of a fleet from what a run on it would record."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from streamrl.base.errors import StreamRLError
from streamrl.observe.report.trajectory_trace import TrajectoryTrace
from streamrl.recipe.scheduling import RoundKind, TailBatching
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.engine_fit import StepSamples, fit_step, non_negative_least_squares, unbiased_fit
from streamrl.simulate.fleet import DEMO, HEAVY
from streamrl.simulate.lengths import ModelledLengths, RecordedLengths
from streamrl.simulate.recording import life_times, load_recording
from streamrl.simulate.simulation import simulate
from streamrl.simulate.stages import TrainerClock, TrainerModel
from tests.simulate.recorder import Recorder
from tests.simulate.worlds import control_settings, with_part

TRUTH = with_part(
    with_part(DEMO, "engine", admission_s=1e-3, admission_per_running_s=0.0), "reward", median_s=0.004, sigma=0.5
)


def test_least_squares_never_go_below_zero() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    falling = non_negative_least_squares(columns, np.array([3.0, 2.0, 1.0]))
    assert falling == pytest.approx([2.0, 0.0]), "a slope below zero is none at all"


def test_a_noisy_time_does_not_pull_the_fit_below_its_mean() -> None:
    source = np.random.default_rng(0)
    running = source.uniform(1, 128, 4000)
    expected = 2e-3 + 5e-5 * running
    seconds = expected * source.lognormal(-0.32, 0.8, 4000)  # of mean 1
    columns = np.stack([np.ones(4000), running], axis=1)
    base, per_running = unbiased_fit(columns, seconds, np.ones(4000))
    assert base == pytest.approx(2e-3, rel=0.15) and per_running == pytest.approx(5e-5, rel=0.15)
    assert (base + per_running * running).sum() == pytest.approx(seconds.sum(), rel=0.01)


def samples_of(slowdown: float, noise: float, seed: int = 3) -> StepSamples:
    source = np.random.default_rng(seed)
    running, training = source.uniform(1, 128, 600), source.choice([0.0, 0.5, 1.0], 600)
    seconds = (2e-3 + 1e-5 * running + 8e-4 * np.sqrt(running)) * (1 + slowdown * training)
    seconds *= source.lognormal(0, noise, 600)
    return StepSamples(seconds=seconds, weights=np.full(600, 40.0), running=running, training=training)


def test_root_growth_and_parallel_training_are_fitted() -> None:
    """A step that grows with the root of the load, and training beside it, are found."""
    fit = fit_step(samples_of(slowdown=0.3, noise=0.0))
    assert (fit.cost.base_s, fit.cost.per_running_s, fit.cost.per_root_running_s) == pytest.approx(
        (2e-3, 1e-5, 8e-4), rel=0.02
    )
    assert fit.slowdown == pytest.approx(1.3, rel=0.01) and fit.error < 0.01
    assert fit_step(samples_of(slowdown=0.3, noise=0.3)).slowdown == pytest.approx(1.3, rel=0.05)
    found = [fit_step(samples_of(slowdown=0.0, noise=0.3, seed=seed)).slowdown for seed in range(12)]
    assert sum(slowdown > 1 for slowdown in found) <= 2, "what may be chance is none"


def test_a_recorded_run_gives_its_constants_back() -> None:
    fit = calibrate(Recorder(TRUTH, 10).recorded())
    engine, truth = fit.model.engine, TRUTH.engine
    assert fit.step_error < 1e-3 and fit.life_error < 0.1
    assert engine.base_s == pytest.approx(truth.base_s, rel=1e-3)
    assert engine.per_running_s == pytest.approx(truth.per_running_s, rel=1e-3)
    assert engine.arrival_s == pytest.approx(truth.arrival_s, rel=0.2)
    assert fit.model.trainer.token_s == pytest.approx(TRUTH.trainer.token_s, rel=1e-6)
    assert fit.model.trainer.streaming_speed == 1.0
    assert fit.model.engines.capacity == 0, "that of the run was of its own batch"
    assert fit.model.push.seconds == pytest.approx(TRUTH.push.seconds, rel=0.05)
    assert fit.model.lengths.cap_share == pytest.approx(0.041, abs=0.02)
    assert fit.model.lengths.correlation == pytest.approx(0.65, abs=0.12)


def test_turns_are_recorded_with_their_switches() -> None:
    """Switches are no part of training or push, so that a run in turns tells the time of one side by side."""
    truth = with_part(TRUTH, "push", seconds=0.03, pause_s=0.01, to_ranks_s=0.3, to_engines_s=0.7)
    fit = calibrate(Recorder(truth, 16, in_turns=True).recorded())
    push = fit.model.push
    assert (push.seconds, push.to_ranks_s, push.to_engines_s) == pytest.approx((0.03, 0.3, 0.7), rel=1e-3)
    assert fit.model.trainer.optimizer_s < 0.1 and "push.to_engines_s" not in fit.assumed
    assert "push.to_engines_s" in calibrate(Recorder(TRUTH, 16).recorded()).assumed


def test_the_fitted_cluster_predicts_the_step_of_another_shape() -> None:
    fit = calibrate(Recorder(TRUTH, 10).recorded())
    chosen = control_settings(batch_groups=8, group_size=8)
    lengths = ModelledLengths(TRUTH.lengths, 9)
    predicted, real = (simulate(chosen, model, 12, lengths=lengths) for model in (fit.model, TRUTH))
    assert predicted.step_s_mean == pytest.approx(real.step_s_mean, rel=0.1)


def test_a_recorded_run_is_read_back_and_replayed(tmp_path: Path) -> None:
    run = Recorder(TRUTH, 3).recorded()
    trace = TrajectoryTrace(tmp_path / "trace.jsonl", run.header)
    for line in (*run.trajectories, *run.steps, *run.engines):
        trace.append(line)
    trace.close()
    assert load_recording(tmp_path) == run == load_recording(tmp_path / "trace.jsonl")
    lives = life_times(run)
    assert len(lives.seconds) == len(run.trajectories) == 3 * 128
    replayed = simulate(
        control_settings(batch_groups=16, group_size=8), TRUTH, 3, lengths=RecordedLengths(run, resample=False)
    )
    assert replayed.trained_tokens == sum(line.tokens for line in run.trajectories)


def test_a_run_too_short_to_fit_and_a_missing_trace_are_named(tmp_path: Path) -> None:
    run = Recorder(TRUTH, 2).recorded()
    with pytest.raises(StreamRLError, match=r"run run-1 recorded 256 whole completions and 2 steps"):
        calibrate(run)
    with pytest.raises(StreamRLError, match=r"run run-1 has 0 samples of decode steps"):
        calibrate(Recorder(TRUTH, 4, samples=False).recorded())
    with pytest.raises(StreamRLError, match=r"has no trace\.jsonl"):
        load_recording(tmp_path)


RACE = {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(prompt_oversampling=1.25), "presubmit": True}


def test_a_race_with_advance_rounds_gives_its_constants() -> None:
    """A race that submits in advance leads to the constants that produced it."""
    # Closing a batch takes long enough for all requests to arrive before the engine goes on.
    truth = with_part(with_part(TRUTH, "engine", presubmitted_s=0.3e-3), "trainer", optimizer_s=0.3)
    run = Recorder(truth, 15, **RACE).recorded()
    lives = life_times(run)
    assert lives.presubmitted.mean() > 0.9, "all but the first round waited in the paused engine"
    assert any(line.outcome == "lost_race" and not line.finish_reason for line in run.trajectories)
    engine = calibrate(run).model.engine
    assert engine.presubmitted_s == pytest.approx(0.3e-3, rel=0.2)
    for running in (8, 64, 128):
        assert engine.step_s(running) == pytest.approx(truth.engine.step_s(running), rel=0.02)


def test_the_trainer_begins_when_enough_tokens_wait() -> None:
    trainer = TrainerClock(TrainerModel(token_s=1e-3, streaming_speed=1.0, streaming_tokens=100))
    trainer.take(0.0, 1, 60)
    assert trainer.idle_at == 0.0, "it waits for more"
    trainer.take(1.0, 1, 60)
    assert trainer.idle_at == pytest.approx(1.12)
    trainer.take(1.1, 1, 90)  # is left: too little to begin with
    trainer.advance(2.0)
    assert trainer.worked_s == pytest.approx(0.12)
    assert trainer.close(2.0, engines_idle=True) == pytest.approx(2.09)
    trainer.take(3.0, 1, 500)
    trainer.take(3.1, 1, 500)  # is taken when the first is done
    assert trainer.idle_at == pytest.approx(4.0)
    trainer.advance(3.6)
    assert trainer.close(3.7, engines_idle=True) == pytest.approx(4.0)


@pytest.mark.long
def test_the_fitted_cluster_predicts_the_gain_of_a_race() -> None:
    """The fitted cluster predicts how much a race gains on another seed. The line of the acceptance, against a world
    whose truth is known."""
    heavy = msgspec.structs.replace(TRUTH, lengths=HEAVY.lengths)
    truth = with_part(
        with_part(heavy, "engine", base_s=2e-3, per_running_s=1e-5, per_root_running_s=8e-4),
        "trainer",
        token_s=3e-5,
        sequence_s=1e-3,
        streaming_tokens=256,
    )
    fitted = calibrate(Recorder(truth, 10, seed=4).recorded()).model
    for running in (1, 16, 128):
        assert fitted.engine.step_s(running) == pytest.approx(truth.engine.step_s(running), rel=0.03)
    run = Recorder(truth, 15, seed=5).recorded()
    synchronous, race = (
        control_settings(batch_groups=16, group_size=8),
        control_settings(batch_groups=16, group_size=8, **RACE),
    )
    ratios = []
    for model in (fitted, truth):
        slow, fast = (
            simulate(settings, model, 15, lengths=RecordedLengths(run, resample=False)).groups_s
            for settings in (synchronous, race)
        )
        ratios.append(fast / slow)
    assert ratios[1] > 1.2
    assert ratios[0] == pytest.approx(ratios[1], rel=0.05)
