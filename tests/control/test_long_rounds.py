"""Long rounds of tail batching: everybody who waits has one, and it does not race."""

from __future__ import annotations

from control_world import control_settings
from msgspec.structs import replace
from policy_world import PolicyWorld

from streamrl.config.scheduling import RoundKind, TailBatching
from streamrl.control import actions as do
from streamrl.control.engine_cost import LONG
from streamrl.control.rounds.tail_batching import TailBatching as TailBatchingRounds
from streamrl.control.settings import ControlSettings


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
    settings = race(16, 50, eta_prompts=1.5, long_round_batches=4)
    view = PolicyWorld(settings).core.launching.view()
    view = replace(view, live_version=view.trainer_version, queued=28, exhausted=True)
    launch = TailBatchingRounds(settings).launch(view)
    assert launch is not None and (launch.round_kind, launch.groups, launch.target) == (LONG, 16, 16)
