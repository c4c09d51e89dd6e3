"""Long rounds of tail batching: everybody who waits has one, it does not race, and all of it starts at once."""

from __future__ import annotations

from control_world import control_settings
from policy_world import PolicyWorld

from streamrl.config.scheduling import RoundKind, StalePolicy, TailBatching
from streamrl.control import actions as do
from streamrl.control.engine_cost import LONG
from streamrl.control.rounds.policy import RoundView
from streamrl.control.rounds.tail_batching import TailBatching as TailBatchingRounds
from streamrl.control.settings import ControlSettings
from streamrl.types import DropReason


def race(groups: int, steps: int, **options: object) -> ControlSettings:
    tail = TailBatching(**options)  # type: ignore[arg-type]
    return control_settings(
        rounds=RoundKind.TAIL_BATCHING, batch_groups=groups, group_size=1, steps=steps, tail_batching=tail
    )


def samples_of_steps(settings: ControlSettings) -> list[int]:
    world = PolicyWorld(settings)
    world.begin()
    world.run_to_end()
    assert not len(world.core.supply.queue) or settings.steps % 9, "the last cycle left prompts behind"
    return [action.samples for action in world.answers if isinstance(action, do.StepOptimizer)]


def test_the_end_of_a_run_does_not_shorten_a_long_round_that_is_due() -> None:
    cycle = [4] * 8 + [16]
    assert samples_of_steps(race(4, 9, eta_prompts=1.5, long_round_batches=4)) == cycle
    assert samples_of_steps(race(4, 18, eta_prompts=1.5, long_round_batches=4)) == 2 * cycle


def test_the_last_step_trains_those_who_would_wait_for_a_round_that_never_comes() -> None:
    assert samples_of_steps(race(4, 7, eta_prompts=1.5, long_round_batches=4)) == [4] * 6 + [12]


def test_a_long_round_takes_whole_batches_once_the_source_is_empty() -> None:
    """Twelve more than it trains would race in it."""
    rounds = TailBatchingRounds(race(16, 50, eta_prompts=1.5, long_round_batches=4))
    view = RoundView(
        trainer_version=5,
        live_version=5,
        batch_trajectories=16,
        group_size=1,
        target=16,
        seats=16,
        joined=0,
        batch_closed=False,
        round_kind="",
        untrained=0,
        untrained_trajectories=0,
        held=0,
        queued=28,
        exhausted=True,
        free_slots=1000,
        steps_left=20,
        when_stale=StalePolicy.WAIT,
        due=(),
    )
    launch = rounds.launch(view)
    assert launch is not None and (launch.round_kind, launch.groups, launch.target) == (LONG, 16, 16)


def test_packed_races_race_with_domains_too() -> None:
    shares = {"easy": 2.0, "hard": 1.0}
    world = PolicyWorld(race(3, 12, eta_prompts=1.34, cohort_batches=4, domain_column="domain", domains=shares))
    world.begin()
    world.run_to_end()
    lost = [a for a in world.answers if isinstance(a, do.CancelGroup) and a.reason is DropReason.LOST_RACE]
    assert len(lost) >= 6, "every round of the cohort waited for all of its prompts"


def test_a_long_round_that_lacks_a_domain_starts_fresh_prompts_of_it_at_once() -> None:
    """The queue is overfull with one domain; the other's place in the round is a fresh prompt's."""
    shares = {"easy": 2.0, "hard": 1.0}
    world = PolicyWorld(race(3, 30, eta_prompts=1.34, domain_column="domain", domains=shares))
    world.begin()
    opened: set[int] = set()
    lacked = 0
    while world.finished is None:
        if world.draw is not None:
            world.answer_draw()
        elif world.to_publish is not None:
            world.go_live()
        elif world.to_step is not None:
            world.step()
        else:
            batch = world.core.batch
            if batch.round_kind == LONG and batch.batch_id not in opened:
                opened.add(batch.batch_id)
                lacked += any(not t.attempt for t in world.sampled)
                assert len(world.sampled) == 3, "part of the long round waits for the rest of it"
            easy = [t for t in world.sampled if world.domain_of[t.prompt_id] == "easy"]
            world.score((easy or world.sampled)[0], 1.0, 3)
    assert lacked, "no long round lacked a domain"
