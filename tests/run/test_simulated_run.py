"""Control, stages and publisher together, on simulated engines: accounting, staleness, replay, drain."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from builders.files import json_lines

from streamrl.base.errors import CannotContinue
from streamrl.base.run_events import EvaluationFinished, RunDecided, RunEvent, RunProgress, RunWarning, StepFinished
from streamrl.control.actions import ControlAction, LaunchGroup
from streamrl.control.events import RoundsAdvised
from streamrl.control.policies.auto import SYNCHRONOUS
from streamrl.engines.elastic.elastic_engines import ElasticEngines
from streamrl.observe.report import run_report
from streamrl.recipe.scheduling import InFlight, RoundKind, StalePolicy
from streamrl.recipe.sections import ReleaseKind
from streamrl.recipe.topology import PreparedSet
from streamrl.run.journal.journal_file import read_journal
from streamrl.run.journal.records import JournalCodec, JournalDecision
from tests.run.scripted_parts import SimulatedRun, run_settings

CONTINUOUS = {"rounds": RoundKind.CONTINUOUS, "max_staleness": 2}
TAIL = {"rounds": RoundKind.TAIL_BATCHING}


def records_of(run: SimulatedRun) -> list[object]:
    return [JournalCodec().decode(body) for body in read_journal(run.directory / "journal").records(0)]


@pytest.mark.parametrize("in_flight", list(InFlight))
@pytest.mark.parametrize("rounds", [{}, CONTINUOUS, CONTINUOUS | {"when_stale": StalePolicy.REGENERATE}])
async def test_every_trajectory_ends_once_and_no_token_is_too_old(
    rounds: dict[str, object], in_flight: InFlight, tmp_path: Path
) -> None:
    run = SimulatedRun(run_settings(**rounds), tmp_path, engines=2, ranks=2, failing=13, in_flight=in_flight)
    assert await run.run() == "finished"
    accounting = run.controller.state.accounting()
    trained = run.trained()
    assert len(trained) == accounting.trained and set(trained.values()) == {1}
    steps = [e for e in run.events if isinstance(e, StepFinished)]
    assert [s.step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert max(s.metrics["async/staleness_oldest_max"] for s in steps) <= run.settings.max_staleness
    assert all(engine.load().generated_tokens > 0 for engine in run.engines)
    for rank in run.ranks:
        assert any(rank.batches)
        for version, batch in enumerate(rank.batches):
            assert all(version - sample.oldest_version <= run.settings.max_staleness for sample in batch)
            assert all(run.scorer.returned[str(s.id)] == s.reward for s in batch), "a reward nobody returned"


async def test_progress_names_the_step_whose_line_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the weights of a step are pushed, the progress is that of this step, whose line is not printed yet."""
    monkeypatch.setattr(run_report, "PROGRESS_INTERVAL_S", 0.0)
    run = SimulatedRun(run_settings(), tmp_path)
    await run.run()
    printed = 0
    pushed = []
    for event in run.events:
        if isinstance(event, StepFinished):
            printed = event.step
        elif isinstance(event, RunProgress) and event.phase == "weights" and printed:
            assert event.step == min(printed + 1, 6)
            pushed.append(event.step)
    assert set(pushed) == {2, 3, 4, 5, 6}


async def test_the_journal_rebuilds_the_control_state(tmp_path: Path) -> None:
    run = SimulatedRun(run_settings(**CONTINUOUS), tmp_path, failing=9)
    await run.run()
    rebuilt, live = run.summary(), run.controller.state
    assert rebuilt.accounting == live.accounting() and rebuilt.finished
    assert (rebuilt.trainer_version, rebuilt.live_version) == (6, 6)
    assert [step.step for step in rebuilt.steps] == [1, 2, 3, 4, 5, 6]
    assert sum(step.samples for step in rebuilt.steps) == live.accounting().trained
    failed = sum(step.dropped.get("reward_failed", 0) for step in rebuilt.steps)
    assert 0 < failed <= live.accounting().dropped["reward_failed"]


async def test_continuous_rounds_change_weights_in_flight(tmp_path: Path) -> None:
    """Continuous rounds change weights while requests are in flight."""
    run = SimulatedRun(run_settings(**CONTINUOUS, steps=8), tmp_path)
    await run.run()
    versions = [(s.oldest_version, s.newest_version) for rank in run.ranks for batch in rank.batches for s in batch]
    assert any(newest > oldest for oldest, newest in versions), "no completion saw a weight update"


ROUNDS: dict[str, dict[str, object]] = {"synchronous": {}, "continuous": CONTINUOUS, "tail_batching": TAIL}
MOMENTS = [("group", 0), ("group", 2), ("close", 1), ("close", 3), ("live", 1), ("live", 4), ("evaluated", 2)]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: f"{moment[0]}-{moment[1]}")
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_drain_at_any_moment_ends_everything(rounds: str, moment: tuple[str, int], tmp_path: Path) -> None:
    chosen = run_settings(**ROUNDS[rounds], steps=50, checkpoint_every=2, checkpoint_at_end=True, evaluate_every=2)
    run = SimulatedRun(chosen, tmp_path, engines=2, ranks=2, failing=17, held_out=12)
    assert await run.run(stop_at=moment) == "drained"
    assert moment in run.history, "the drain was asked for"
    state = run.controller.state
    accounting = state.accounting()
    assert state.live_version == state.trainer_version < 50, "what was trained is live"
    assert [rank.saved[-1:] for rank in run.ranks] == [[f"step-{state.live_version}"]] * 2, "and saved"
    assert accounting.trained == sum(run.trained().values()), "nothing that was trained is missing, nothing twice"
    assert run.summary().accounting == run.controller.state.accounting()


async def test_a_drain_after_the_end_changes_nothing(tmp_path: Path) -> None:
    """A drain that is requested when the run has ended changes nothing."""
    run = SimulatedRun(run_settings(steps=3), tmp_path, ranks=2)
    assert await run.run(stop_at=("ended", 0)) == "finished"
    assert run.history[-1][0] == "ended", "the ranks end last, and it was asked for then"
    assert run.controller.state.live_version == 3


async def test_evaluation_sees_one_version_and_every_prompt(tmp_path: Path) -> None:
    chosen = run_settings(
        **CONTINUOUS, evaluate_every=2, evaluate_limit=3, evaluate_at_start=True, evaluate_at_end=True
    )
    run = SimulatedRun(chosen, tmp_path, held_out=10)
    await run.run()
    evaluations = [e for e in run.events if isinstance(e, EvaluationFinished)]
    assert [(e.step, e.metrics["eval/held_out/prompts"]) for e in evaluations] == [(0, 10), (2, 3), (4, 3), (6, 10)]


@pytest.mark.parametrize("rounds", [{}, CONTINUOUS])
async def test_the_next_batch_is_trained_while_an_evaluation_runs(rounds: dict[str, object], tmp_path: Path) -> None:
    chosen = run_settings(**rounds, evaluate_every=2, evaluate_at_start=True)
    run = SimulatedRun(chosen, tmp_path, held_out=120, samples=2, evaluation_in_flight=24, kept=False)
    assert await run.run() == "finished"
    for version in (0, 2, 4):
        began = run.history.index(("live", version)) if version else 0
        meanwhile = run.history[began : run.history.index(("evaluated", version))]
        # With continuous rounds the next batch may be complete already, and groups of the one after it arrive.
        assert sum(kind == "group" for kind, _ in meanwhile) >= chosen.batch_groups, "nothing was sampled beside it"
        assert ("close", version + 1) in meanwhile, "the next batch was not trained"
        assert ("live", version + 1) not in meanwhile, "the weights changed under the evaluation"
    assert len(run.scorer.held_out) == 4 * 240
    for trajectory in run.scorer.held_out:
        assert trajectory.oldest_version == trajectory.newest_version == trajectory.id.attempt
    steps = {e.step: e.metrics["time/wait_eval_s"] for e in run.events if isinstance(e, StepFinished)}
    assert min(steps[1], steps[3], steps[5]) > 0.3 > 0.1 > max(steps[2], steps[4], steps[6])


async def test_evaluation_samples_agree_with_the_figure(tmp_path: Path) -> None:
    """Evaluation samples are on disk, and agree with the figure."""
    chosen = run_settings(steps=2, evaluate_every=1, evaluate_limit=2, evaluate_at_end=True)
    run = SimulatedRun(chosen, tmp_path, held_out=5, samples=3)
    await run.run()
    assert sorted(p.name for p in (tmp_path / "evaluations").iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    lines = json_lines(tmp_path / "evaluations" / "step-000002.jsonl")
    assert [(line["number"], line["sample"]) for line in lines] == [(p, s) for p in range(5) for s in range(3)]
    assert all(line["step"] == 2 and line["reward"] == len(line["token_ids"]) % 2 for line in lines)
    assert len({tuple(line["token_ids"]) for line in lines}) == 15, "samples share a seed"
    assert run.scores.keys() == {1, 2}
    assert run.scored_on == {1: 2, 2: 0}  # on all at the end
    assert run.scores[2] == pytest.approx(sum(line["reward"] for line in lines) / 15)


async def test_a_drain_cancels_the_evaluation_that_runs(tmp_path: Path) -> None:
    chosen = run_settings(evaluate_every=2, evaluate_at_end=True, checkpoint_at_end=True)
    run = SimulatedRun(chosen, tmp_path, held_out=4000, evaluation_in_flight=24, kept=False)
    assert await run.run(stop_at=("close", 3)) == "drained"
    assert not any(isinstance(e, EvaluationFinished) for e in run.events)
    assert 0 < len(run.scorer.held_out) < 100
    assert run.scores == {} and not (tmp_path / "evaluations").exists()
    assert run.ranks[0].saved == [f"step-{run.controller.state.live_version}"]


async def test_an_evaluation_of_a_lost_version_is_given_up(tmp_path: Path) -> None:
    """An evaluation whose version is gone is given up, and the run goes on."""
    run = SimulatedRun(
        run_settings(steps=3, evaluate_every=2), tmp_path, held_out=4000, evaluation_in_flight=24, kept=False
    )
    noted = run.ranks[0].happened

    def happened(kind: str, version: int) -> None:
        noted(kind, version)
        if (kind, version) == ("close", 3):
            run.sync.on_version_left()

    run.ranks[0].happened = happened
    assert await run.run() == "finished"
    assert [e.step for e in run.events if isinstance(e, StepFinished)] == [1, 2, 3]
    [warning] = [e for e in run.events if isinstance(e, RunWarning)]
    assert warning.message == "evaluation of version 2 given up: no engine holds it any more"
    assert not any(isinstance(e, EvaluationFinished) for e in run.events)


async def test_a_resumed_run_begins_at_the_version_of_the_ranks(tmp_path: Path) -> None:
    chosen = run_settings(evaluate_at_start=True, checkpoint_every=5, **CONTINUOUS)
    run = SimulatedRun(chosen, tmp_path, held_out=2, ranks=2, start=4)
    assert await run.run() == "finished"
    assert [e.step for e in run.events if isinstance(e, StepFinished)] == [5, 6]
    assert [e.step for e in run.events if isinstance(e, EvaluationFinished)] == [4]
    assert run.ranks[1].saved == ["step-5"]
    assert [(await engine.start()).policy_version for engine in run.engines] == [6]
    assert run.summary().accounting == run.controller.state.accounting()


async def test_an_alarm_is_reported_and_logged(tmp_path: Path) -> None:
    run = SimulatedRun(run_settings(), tmp_path)
    run.ranks[0].mismatch = 0.125
    await run.run()
    [warning] = [e for e in run.events if isinstance(e, RunWarning)]
    assert warning.step == 1
    assert "policy/mismatch_abs_mean is 0.125, above 0.05" in warning.message


async def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    """A reward that always fails ends the run with its message."""
    run = SimulatedRun(run_settings(failure_window=16), tmp_path, failing=1)
    with pytest.raises(BaseExceptionGroup) as raised:
        await run.run()
    [cause] = raised.value.exceptions
    while isinstance(cause, BaseExceptionGroup):
        [cause] = cause.exceptions
    assert isinstance(cause, CannotContinue) and "parity raised: planted" in str(cause)


async def test_an_exhausted_source_ends_the_run(tmp_path: Path) -> None:
    run = SimulatedRun(run_settings(steps=100), tmp_path, prompts=10)
    assert await run.run() == "prompts exhausted"
    assert run.controller.state.accounting().trained == 40


class AdvisedEvents(list[RunEvent]):
    """Events of a run that is advised to race once its third step is printed."""

    def __init__(self, run: SimulatedRun) -> None:
        super().__init__()
        self._run = run

    def append(self, event: RunEvent) -> None:
        super().append(event)
        if isinstance(event, StepFinished) and event.step == 3:
            self._run.controller.notify(RoundsAdvised(goodput={SYNCHRONOUS: 1.0, "tail_batching 1.5": 2.0}))


@pytest.mark.parametrize("presubmit", [False, True])
async def test_a_decision_names_the_first_step_it_concerns(presubmit: bool, tmp_path: Path) -> None:
    """A round that is submitted in advance opens while the step before it is trained."""
    run = SimulatedRun(run_settings(rounds=RoundKind.AUTO, presubmit=presubmit, batch_groups=8), tmp_path)
    run.events = AdvisedEvents(run)
    assert await run.run() == "finished"
    [decision] = [event for event in run.events if isinstance(event, RunDecided) and event.subject == "rounds"]
    races = [e.step for e in run.events if isinstance(e, StepFinished) and "round/short/group_size" in e.metrics]
    assert decision.step == races[0]


# ---- engines that are freed late in a round -------------------------------------------------------------


@pytest.mark.parametrize("rounds", [{}, TAIL])
async def test_engines_are_freed_in_rounds_and_serve_in_the_next(rounds: dict[str, object], tmp_path: Path) -> None:
    chosen = run_settings(batch_groups=8, steps=8, **rounds)
    run = SimulatedRun(chosen, tmp_path, engines=3, ranks=2, release=ReleaseKind.DRAIN)
    assert await run.run() == "finished"
    accounting = run.controller.state.accounting()
    trained = run.trained()
    assert len(trained) == accounting.trained == 8 * 32 and set(trained.values()) == {1}
    assert len([e for e in run.events if isinstance(e, RunDecided) and e.subject == "engines_freed"]) == 1
    figures_of = [record.decision.figures for record in records_of(run) if isinstance(record, JournalDecision)]
    decisions = [figures for figures in figures_of if "moved" in figures]
    assert 3 <= len(decisions) <= 8, "at most once a round, and not before lengths are known"
    assert all(figures["peak_share"] <= 0.9 for figures in decisions)
    for rank in run.ranks:
        assert rank.freed == ([1, 0] * 8)[: len(rank.freed)] and len(rank.freed) >= 2 * len(decisions) - 1
        for version, batch in enumerate(rank.batches):
            assert all(sample.oldest_version == sample.newest_version == version for sample in batch)
    assert run.summary().accounting == accounting
    assert [(await engine.start()).policy_version for engine in run.engines] == [8, 8, 8]


# ---- sets of engines ------------------------------------------------------------------------------------

WIDE = PreparedSet(count=2, tensor_parallel_size=1, kv_tokens=4_000, rounds=("short",))
DEEP = PreparedSet(count=1, tensor_parallel_size=2, kv_tokens=9_000, rounds=("long",), first=2)
SETS = (WIDE, DEEP)


async def test_each_kind_of_round_has_its_engine_set(tmp_path: Path) -> None:
    """Each kind of round is served by its set, with the weights of its version."""
    chosen = run_settings(batch_groups=8, steps=11, evaluate_every=3, evaluate_at_start=True, **TAIL)
    run = SimulatedRun(chosen, tmp_path, engines=2, ranks=2, sets=SETS, held_out=60, evaluation_in_flight=24)
    assert await run.run() == "finished"
    accounting = run.controller.state.accounting()
    trained = run.trained()
    assert len(trained) == accounting.trained == 11 * 32 and set(trained.values()) == {1}
    for rank in run.ranks:
        for version, batch in enumerate(rank.batches):
            assert all(sample.oldest_version == sample.newest_version == version for sample in batch)
    steps = [event.metrics for event in run.events if isinstance(event, StepFinished)]
    long_rounds = [step for step, metrics in enumerate(steps) if metrics["engines/set"]]
    assert long_rounds == [4, 9], "four short rounds, one long one"
    assert [metrics["engines/serving"] for metrics in steps[3:6]] == [2, 1, 2]
    assert steps[-1]["engines/switches_total"] == 4
    assert [e for e in run.history if e[0] in ("stop", "start")][:6] == [
        *[("stop", 0), ("stop", 1), ("start", 2)],
        *[("stop", 2), ("start", 0), ("start", 1)],
    ]
    decided = [event for event in run.events if isinstance(event, RunDecided) and event.subject == "engine_set"]
    assert [(event.step, event.reason) for event in decided[:2]] == [
        (5, "long rounds belong to set 1x2 (engines.advanced.sets)"),
        (6, "short rounds belong to set 2x1 (engines.advanced.sets)"),
    ]
    assert run.summary().accounting == accounting
    assert len(run.scorer.held_out) == 4 * 60, "also what a change of engines cut"


async def test_sets_and_freed_engines_work_with_advance_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets, freed engines and the next round in advance work together in one run. Freed engines return before the next
    round is submitted, and it goes to the set that was chosen for it alone."""
    chosen = run_settings(batch_groups=8, steps=11, presubmit=True, **TAIL)
    wide = msgspec.structs.replace(WIDE, count=3)
    deep = msgspec.structs.replace(DEEP, first=3, count=2)
    run = SimulatedRun(chosen, tmp_path, engines=3, ranks=2, sets=(wide, deep), release=ReleaseKind.DRAIN)
    on_action, submitted_to = ElasticEngines.on_action, set()

    async def noting(elastic: ElasticEngines, action: ControlAction) -> None:
        await on_action(elastic, action)
        if isinstance(action, LaunchGroup):
            submitted_to.add(elastic._pool.serving)

    monkeypatch.setattr(ElasticEngines, "on_action", noting)
    assert await run.run() == "finished"
    assert submitted_to == {wide.engines, ()}, "to the whole set, or to the one that joins: they wait for it"
    accounting = run.controller.state.accounting()
    trained = run.trained()
    assert len(trained) == accounting.trained == 11 * 32 and set(trained.values()) == {1}
    for rank in run.ranks:
        assert 1 in rank.freed and rank.freed == ([1, 0] * 11)[: len(rank.freed)]
        for version, batch in enumerate(rank.batches):
            assert all(sample.oldest_version == sample.newest_version == version for sample in batch)
    steps = [event.metrics for event in run.events if isinstance(event, StepFinished)]
    assert [step for step, metrics in enumerate(steps) if metrics["engines/set"]] == [4, 9]
    assert [e for e in run.history if e[0] in ("stop", "start")][:5] == [
        *[("stop", 0), ("stop", 1), ("stop", 2), ("start", 3), ("start", 4)]
    ]


@pytest.mark.parametrize("when", [("stop", 0), ("start", 2), ("start", 1)])
async def test_a_drain_while_engines_change(when: tuple[str, int], tmp_path: Path) -> None:
    chosen = run_settings(batch_groups=8, steps=50, checkpoint_at_end=True, **TAIL)
    run = SimulatedRun(chosen, tmp_path, engines=2, sets=SETS)
    assert await run.run(stop_at=when) == "drained"
    assert run.controller.state.live_version == run.controller.state.trainer_version < 50
    assert run.ranks[0].saved == [f"step-{run.controller.state.live_version}"]


async def test_evaluations_beside_freeing_see_one_version(tmp_path: Path) -> None:
    """Evaluations beside rounds that free engines see one version."""
    chosen = run_settings(batch_groups=8, evaluate_every=2, evaluate_at_start=True)
    run = SimulatedRun(
        chosen, tmp_path, engines=3, held_out=120, samples=2, evaluation_in_flight=24, release=ReleaseKind.DRAIN
    )
    assert await run.run() == "finished"
    assert len(run.scorer.held_out) == 4 * 240
    for trajectory in run.scorer.held_out:
        assert trajectory.oldest_version == trajectory.newest_version == trajectory.id.attempt
