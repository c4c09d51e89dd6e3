"""A controller that is killed at any event, and its successor: the journal has everything, nothing is done twice."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from oracle.trace_header import trace_header
from tiers import quick_only

from streamrl.base.run_events import EvaluationFinished, RunResumed, RunWarning, StepFinished
from streamrl.control.settings import ControlSettings
from streamrl.observe.report.run_report import RunReport
from streamrl.observe.report.trajectory_trace import TrajectoryTrace
from streamrl.recipe.scheduling import RoundKind, TailBatching
from tests.run import scripted_parts
from tests.run.scripted_parts import CountingRank, Killed, SimulatedRun, run_settings

STEPS = 4


def control_settings(**changes: object) -> ControlSettings:
    return run_settings(**{"steps": STEPS, "batch_groups": 3, "group_size": 2} | changes)


SYNCHRONOUS = control_settings(checkpoint_every=2)
RACING = control_settings(
    checkpoint_every=2, rounds=RoundKind.TAIL_BATCHING, tail_batching=TailBatching(prompt_oversampling=1.5)
)
SUBMITTED = control_settings(checkpoint_every=2, presubmit=True)
STALE = control_settings(checkpoint_every=1, rounds=RoundKind.CONTINUOUS, max_staleness=1)


async def one_life(run: SimulatedRun, events: int) -> str:
    """Run until it has handled ``events`` events; the result is empty if it was killed then."""
    run.events_to_live = events
    try:
        return await run.run()
    except BaseExceptionGroup as group:
        if group.subgroup(Killed) is None:
            raise
        return ""


def resumed(run: SimulatedRun, directory: Path, **options: int) -> SimulatedRun:
    """The next life of ``run``: its rank begins with the newest checkpoint."""
    again = SimulatedRun(run.settings, directory, kept=True, **options)  # type: ignore[arg-type]
    again.ranks[0].version = max([0, *(int(path.removeprefix("step-")) for path in run.ranks[0].saved)])
    return again


def batches_of(rank: CountingRank) -> list[Counter[str]]:
    return [Counter(f"{sample.id} {sample.reward}" for sample in batch) for batch in rank.batches]


@pytest.mark.parametrize("damaged", [False, True], ids=["newest checkpoint", "the one before"])
@pytest.mark.parametrize(
    "settings",
    quick_only([SYNCHRONOUS, SUBMITTED, RACING, STALE], [RACING]),
    ids=["synchronous", "submitted", "racing", "continuous"],
)
async def test_lives_of_a_controller_make_one_run(settings: ControlSettings, damaged: bool, tmp_path: Path) -> None:
    for events in range(1, 38, 4):
        directory = tmp_path / str(events)
        directory.mkdir()
        lineage: list[Counter[str]] = []
        saved, lives, reason = [0], 0, ""
        while not reason:
            lives += 1
            run = SimulatedRun(settings, directory, kept=True)
            [rank] = run.ranks
            # The newest checkpoint that is not damaged is what they begin with.
            rank.version = begins = saved[-2] if damaged and len(saved) > 1 else saved[-1]
            reason = await one_life(run, events if lives < 6 else 10**9)
            made = batches_of(rank)
            for version, batch in enumerate(made, start=begins):
                # What is trained again is what was trained before, sample by sample.
                assert version >= len(lineage) or lineage[version] == batch
            lineage[begins : begins + len(made)] = made
            saved = sorted({*saved, *(int(path.removeprefix("step-")) for path in rank.saved)})
            for sample in (s for b in rank.batches for s in b):
                returned = run.scorer.returned.get(str(sample.id))
                assert returned is None or returned == sample.reward
            if lives > 1 and begins + len(made):
                assert any(isinstance(event, RunResumed) for event in run.events)
        trained = Counter(trajectory for batch in lineage for trajectory in batch)
        assert len(lineage) == STEPS and set(trained.values()) == {1}
        assert sum(trained.values()) == STEPS * settings.batch_trajectories
        assert lives > 1
        ended = run.summary()
        assert ended.finished and not ended.violations and not ended.accounting.in_flight
        assert ended.accounting.trained == STEPS * settings.batch_trajectories


@pytest.mark.long
async def test_steps_of_another_life_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is reported for a step that began in another life."""
    untimed = 0
    for events in range(10, 34):
        directory = tmp_path / str(events)
        directory.mkdir()
        with closing(TrajectoryTrace(directory / "trace.jsonl", trace_header())) as trace:
            monkeypatch.setattr(scripted_parts, "RunReport", partial(RunReport, trace=trace))
            run = SimulatedRun(SYNCHRONOUS, directory, kept=True)
            assert not await one_life(run, events)
            again = resumed(run, directory)
            assert await one_life(again, 10**9) == "finished"
        for step in (event for event in again.events if isinstance(event, StepFinished)):
            assert not [name for name in step.metrics if "//" in name]
            assert ("time/step_s" in step.metrics) == ("perf/samples_s" in step.metrics)
            untimed += "time/step_s" not in step.metrics
    assert untimed


async def test_only_what_was_not_scored_is_scored_again(tmp_path: Path) -> None:
    run = SimulatedRun(SYNCHRONOUS, tmp_path, kept=True)
    assert not await one_life(run, 5)
    before = run.scorer.seen
    again = resumed(run, tmp_path)
    assert await one_life(again, 10**9) == "finished"
    told = [event for event in again.events if isinstance(event, RunResumed)]
    assert told[0].restored["scored"] > 0 and told[0].same_weights is not False
    # A score that was on its way to control when it died may be asked for again.
    assert STEPS * 6 <= before + again.scorer.seen <= STEPS * 6 + 2


async def test_what_was_whole_and_not_scored_is_not_sampled_again(tmp_path: Path) -> None:
    run = SimulatedRun(SYNCHRONOUS, tmp_path, kept=True)
    run.outcomes_to_live, run.scorer.mute = 4, True
    assert not await one_life(run, 10**9)
    again = resumed(run, tmp_path)
    assert await one_life(again, 10**9) == "finished"
    (told,) = [event for event in again.events if isinstance(event, RunResumed)]
    assert told.restored["unscored"] == 4
    trained = sum(sample.trained_tokens for batch in again.ranks[0].batches for sample in batch)
    first = sorted(again.ranks[0].batches[0], key=lambda sample: sample.trained_tokens)
    sampled = again.engines[0].load().generated_tokens
    # The engine finishes the shortest first; those that were whole come from the journal.
    assert sampled == trained - sum(sample.trained_tokens for sample in first[:4])


@pytest.mark.long
async def test_an_evaluation_that_died_is_repeated_or_given_up(tmp_path: Path) -> None:
    """An evaluation that died with its controller is repeated, or given up with a message."""
    settings, given_up = control_settings(evaluate_every=1, evaluate_at_end=True), 0
    for life, events in enumerate([*range(6, 40, 2), *range(7, 40, 2), *range(6, 40)]):
        if life >= 17 and given_up:  # where a life ends in an evaluation hangs on how fast files are written
            break
        (directory := tmp_path / str(life)).mkdir()
        run = SimulatedRun(settings, directory, kept=True, held_out=120, evaluation_in_flight=2)
        assert not await one_life(run, events)
        again = resumed(run, directory, held_out=120, evaluation_in_flight=2)
        assert await one_life(again, 10**9) == "finished"
        told = [*run.events, *again.events]
        finished = {event.step for event in told if isinstance(event, EvaluationFinished)}
        warnings = [event for event in told if isinstance(event, RunWarning)]
        assert finished | {warning.step for warning in warnings} == {1, 2, 3, 4}
        for warning in warnings:
            died = f"the run was resumed with version {warning.step + 1}"
            assert warning.message == f"evaluation of version {warning.step} given up: {died}"
        given_up += len(warnings)
    assert given_up
