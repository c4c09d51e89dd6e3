"""Costs that a fleet file can have beside those of engines: kinds of rounds, rewards, judges, domains, loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.recipe.rewards import AdaptiveTimeout
from streamrl.recipe.scheduling import RoundKind, TailBatching
from streamrl.recipe.toml_text import toml_document
from streamrl.simulate.fleet import HEAVY, Domain, FleetModel, load_fleet
from streamrl.simulate.lengths import LengthModel, ModelledLengths
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import simulate
from streamrl.simulate.stages import RewardModel, RewardServers
from tests.simulate.worlds import TINY, control_settings, with_part

RACE: dict[str, Any] = {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(prompt_oversampling=1.25)}


def steps_of(model: FleetModel, **chosen: Any) -> SimulationReport:
    return simulate(control_settings(batch_groups=8, group_size=8, **chosen), model, 15)


def test_a_fixed_cost_is_paid_by_rounds_of_its_kind_alone() -> None:
    plain, costly = (
        {kind.round_kind: kind.step_s for kind in steps_of(model, **RACE).kinds}
        for model in (TINY, with_part(TINY, "push", kind_s={"long": 5.0}))
    )
    assert costly["long"] == pytest.approx(plain["long"] + 5.0)
    assert costly["short"] == pytest.approx(plain["short"])


def test_decoding_is_slower_only_while_a_judge_works() -> None:
    def seconds(**reward: float) -> float:
        return steps_of(with_part(TINY, "reward", median_s=0.05, **reward)).step_s_mean

    alone, beside = seconds(), seconds(rollout_slowdown=3.0)
    assert 1.3 * alone < beside < 3.0 * alone, "before the first completion nothing is judged"
    assert steps_of(with_part(TINY, "reward", rollout_slowdown=3.0)).step_s_mean == steps_of(TINY).step_s_mean


def test_adaptive_limits_end_slow_rewards() -> None:
    """An adaptive limit ends rewards at a multiple of the slowest correct one."""
    limits = AdaptiveTimeout(factor=1.5, min_s=0.5)
    servers = RewardServers(RewardModel(median_s=1.0, sigma=1.0, timeout_s=9.0, adaptive_timeout=limits), seed=1)
    slowest, stopped = 0.0, 0
    for number in range(1000):
        ends, reward = servers.score(100.0 * number, 0, truncated=False)
        seconds, most = ends - 100.0 * number, min(max(1.5 * slowest, 0.5), 9.0) if slowest else 9.0
        assert seconds <= most + 1e-6 and (reward == 0.0 or seconds < most)
        stopped += seconds > most - 1e-6
        slowest = max(slowest, seconds) if reward else slowest
    assert stopped > 0


def test_domains_have_their_shares_lengths_and_rewards(tmp_path: Path) -> None:
    short = LengthModel(cap=400, weights=(1.0,), mus=(2.0,), sigmas=(0.2,))
    long = replace(short, mus=(5.0,))
    domains = (Domain(share=3, lengths=short), Domain(share=1, lengths=long, reward=RewardModel(median_s=0.5)))
    model = replace(TINY, domains=domains)
    numbers = [model.domain_of(prompt) for prompt in range(400)]
    for first in range(0, 400, 40):
        assert sum(numbers[first : first + 40]) == pytest.approx(10, abs=1.5)
    source = model.drawn_lengths(0)
    drawn = np.array([np.mean(source.draw(prompt, 0, 8, 0)) for prompt in range(400)])
    assert drawn[np.array(numbers) == 0].max() < 20 < 80 < drawn[np.array(numbers) == 1].min()
    quick = replace(model, domains=(domains[0], replace(domains[1], reward=RewardModel())))
    assert steps_of(model).step_s_mean == pytest.approx(steps_of(quick).step_s_mean + 0.5, abs=0.01)
    file = tmp_path / "fleet.toml"
    file.write_text(toml_document(model))
    assert load_fleet(str(file)) == model
    file.write_text(toml_document(model).replace("lengths = {cap = 400", "lengths = {cap = 100"))
    with pytest.raises(StreamRLError, match=r"domains: each needs a share above 0 and lengths\.cap = 400"):
        load_fleet(str(file))


def test_loops_are_a_mass_at_the_cap_beside_the_power_law() -> None:
    tail = replace(HEAVY.lengths, cap_share=0.02)
    loops = replace(tail, loop_share=0.015)
    at = np.array([400.0, 1000.0, 2000.0])
    assert (loops.survival(at) < tail.survival(at))[1:].all(), "the power law is steeper"
    assert loops.survival(np.array([tail.cap - 1e-6]))[0] == pytest.approx(0.02, rel=1e-3)
    source = ModelledLengths(loops, seed=1)
    drawn = np.array([source.draw(prompt, 0, 1, 0)[0] for prompt in range(40_000)])
    assert np.mean(drawn == tail.cap) == pytest.approx(0.02, rel=0.12)
    assert np.mean(drawn > 1900) - np.mean(drawn == tail.cap) < 1e-3
    with pytest.raises(ValueError, match=r"loop_share 0\.03 at most cap_share"):
        replace(tail, loop_share=0.03)
