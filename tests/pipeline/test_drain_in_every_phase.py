"""A drain may be asked for at any moment: nothing is lost without a reason, what is trained goes live and is saved."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_parts import SimulatedRun, run_settings
from test_simulated_run import CONTINUOUS

from streamrl.recipe.scheduling import RoundKind

pytestmark = pytest.mark.asyncio

ROUNDS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "continuous": CONTINUOUS,
    "tail_batching": {"rounds": RoundKind.TAIL_BATCHING},
}
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
    assert accounting.balanced and accounting.in_flight == 0
    assert state.live_version == state.trainer_version < 50, "what was trained is live"
    assert [rank.saved[-1:] for rank in run.ranks] == [[f"step-{state.live_version}"]] * 2, "and saved"
    assert accounting.trained == sum(run.trained().values()), "nothing that was trained is missing, nothing twice"
    assert run.summary().accounting == run.controller.state.accounting()


async def test_a_drain_that_is_asked_for_when_the_run_has_ended_changes_nothing(tmp_path: Path) -> None:
    run = SimulatedRun(run_settings(steps=3), tmp_path, ranks=2)
    assert await run.run(stop_at=("ended", 0)) == "finished"
    assert run.history[-1][0] == "ended", "the ranks end last, and it was asked for then"
    assert run.controller.state.live_version == 3
