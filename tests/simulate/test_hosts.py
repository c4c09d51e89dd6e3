"""Hosts of a simulated fleet: weights over their links, hosts that join and are lost, and wrong models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.files import SORT_RECIPE as RECIPE

from streamrl.base.errors import StreamRLError
from streamrl.cli.main import main
from streamrl.recipe.scheduling import RoundKind, TailBatching
from streamrl.recipe.toml_text import toml_document
from streamrl.simulate.fleet import FleetModel, load_fleet
from streamrl.simulate.host_model import HostChange, HostsModel, Link
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.simulation import Simulation
from tests.simulate.worlds import TINY, control_settings, with_part

STEPS = 12
FOUR = with_part(TINY, "engines", count=8)
RACE = {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(response_oversampling=1.25)}
LOST = (HostChange(at_s=0.15, host=1, kind="loss"), HostChange(at_s=0.75, host=2, kind="loss"))
BACK = (HostChange(at_s=1.0, host=1, kind="join"), HostChange(at_s=1.5, host=4, kind="join"))


def on_hosts(model: FleetModel = FOUR, **keys: Any) -> FleetModel:
    return msgspec.structs.replace(model, hosts=HostsModel(**{"count": 4, "notice_s": 0.02, **keys}))


def simulated(model: FleetModel, **chosen: Any) -> Simulation:
    """Run to the end with nothing lost; returns the simulation, its report as ``said``."""
    settings = msgspec.structs.replace(control_settings(batch_groups=16, group_size=8, **chosen), steps=STEPS)
    simulation = Simulation(settings, model, ModelledLengths(model.lengths))
    simulation.said = simulation.run()  # type: ignore[attr-defined]
    accounting = simulation.core.state.accounting()
    assert accounting.trained == STEPS * 16 * 8
    assert accounting.issued == accounting.trained + sum(accounting.dropped.values()) + accounting.in_flight
    assert not any(engine.running for engine in simulation.rollout.engines)
    return simulation


# ---- weights over links --------------------------------------------------------------------------------

HUNDRED = Link(gbit_s=0.1)
HOP_S = 40e6 * 8 / 100e6


@pytest.mark.parametrize("hosts", [1, 2, 8, 128])
def test_direct_copies_share_the_link_of_the_trainer(hosts: int) -> None:
    model = HostsModel(count=hosts, weights="direct", push_bytes=40e6, link=HUNDRED, trainer_link=HUNDRED)
    assert model.push_s(range(hosts)) == pytest.approx(hosts * HOP_S)
    slow = msgspec.structs.replace(model, own_links={"0": Link(gbit_s=0.0001)}, apply_s=5.0)
    assert slow.push_s(range(hosts)) == pytest.approx(1000 * HOP_S + 5.0), "and the slowest host is waited for"


@pytest.mark.parametrize("hosts", [1, 2, 8, 32])
def test_a_chain_takes_one_copy_and_a_piece_a_host(hosts: int) -> None:
    """Of 39 pieces. As measured with the relays of a run: see docs/evidence/simulation.md."""
    model = HostsModel(count=hosts, push_bytes=40e6, link=HUNDRED, trainer_link=HUNDRED)
    assert model.push_s(range(hosts)) == pytest.approx(HOP_S * (39 + hosts - 1) / 39)


def test_many_hosts_and_few_pieces_take_a_tree() -> None:
    """Many hosts and few pieces take a tree, and each of its levels adds its latency."""
    far = Link(gbit_s=0.1, latency_s=0.1)
    model = HostsModel(count=126, push_bytes=2 << 20, link=far, trainer_link=far)
    piece_s = HUNDRED.seconds(1 << 20)
    # Two children each: six levels, and the last piece leaves each of them as the second of two.
    assert model.push_s(range(126)) == pytest.approx(2 * piece_s * (2 + 5) + 6 * 0.2)


@pytest.mark.long
def test_a_push_takes_its_transfer_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A push takes the time of its transfer, and the report has its share."""
    plain, slow = simulated(FOUR), simulated(on_hosts(push_bytes=40e6, link=HUNDRED, trainer_link=HUNDRED))
    before, after = plain.said, slow.said  # type: ignore[attr-defined]
    assert after.transfer_s == pytest.approx(HOP_S * 42 / 39)
    assert after.step_s_mean - before.step_s_mean == pytest.approx(after.push_s - before.push_s, rel=0.05)
    assert after.trained == before.trained and after.push_share > 0.7 and (before.hosts, after.hosts) == (0, 4)
    file = tmp_path / "fleet.toml"
    file.write_text(toml_document(slow.model))
    assert load_fleet(str(file)) == slow.model
    asked = [str(RECIPE), "--fleet", str(file), "--set", "rollout.prompts_per_batch=2", "--warm-up", "0"]
    for command in ("simulate", "what-if"):
        assert main([command, *asked, "--steps", "2"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "4 hosts of 0.1 Gbit/s" in shown and "push" in shown


# ---- hosts that come and go ----------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [{}, RACE], ids=["synchronous", "short and long"])
@pytest.mark.parametrize("keeps_tokens", [True, False])
def test_requests_of_a_lost_host_go_on_elsewhere(rounds: dict[str, Any], keeps_tokens: bool) -> None:
    stays = simulated(on_hosts(), **rounds)
    changes = simulated(on_hosts(changes=LOST, keeps_tokens=keeps_tokens), **rounds)
    report, before = changes.said, stays.said  # type: ignore[attr-defined]
    assert (report.hosts, report.hosts_lost) == (2, 2) and report.requests_moved > 0
    assert report.seconds > before.seconds and (rounds or report.trained == before.trained)
    again = report.generated_tokens - before.generated_tokens
    assert rounds or (abs(again) < 10 if keeps_tokens else again > 100), "sampled again, or not"


def test_a_host_that_joins_serves_once_it_has_the_weights() -> None:
    def served(**keys: Any) -> tuple[int, float]:
        simulation = simulated(on_hosts(changes=LOST + BACK, link=HUNDRED, trainer_link=HUNDRED, **keys))
        assert simulation.said.hosts_joined == (2 if not keys else 0)  # type: ignore[attr-defined]
        return len(simulation.rollout.serving), simulation.said.seconds  # type: ignore[attr-defined]

    assert served()[0] == 8, "one came back, a fifth joined, and one stays lost"
    engines, seconds = served(join_bytes=1e12)
    assert engines == 4 and seconds > served()[1]


def test_a_rate_of_losses_loses_nothing_else() -> None:
    report = simulated(on_hosts(loss_every_s=1.5, rejoin_s=0.2)).said  # type: ignore[attr-defined]
    assert report.hosts_lost > 3 and report.hosts_joined > 1


def test_all_hosts_may_be_away_for_a_while_and_not_for_ever() -> None:
    away = [HostChange(at_s=0.2, host=host, kind="loss") for host in range(4)]
    back = HostChange(at_s=0.6, host=0, kind="join")
    assert simulated(on_hosts(changes=(*away, back))).rollout.serving == (0, 1)
    with pytest.raises(StreamRLError, match=r"the last host .* was lost at 0 s and none joins"):
        simulated(on_hosts(changes=tuple(away)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"count": 9}, "hosts.count = 9 for engines.count = 8"),
        ({"count": 0, "push_bytes": 1.0}, "hosts.count is 0"),
        ({"link": {"gbit_s": 0.0}}, r"hosts\.link\.gbit_s"),
        ({"link": {"gbits": 1.0}}, "gbits"),
        ({"weights": "tree"}, r"hosts\.weights"),
        ({"changes": [{"at_s": 1.0, "host": 2, "kind": "join"}]}, "host 2 is there at 1 s: remove this join"),
        ({"changes": [{"at_s": 1.0, "host": 4, "kind": "loss"}]}, "host 4 is not there at 1 s"),
        ({"changes": [{"at_s": 1.0, "host": 1, "kind": "loss"}], "loss_every_s": 9.0}, "a schedule, or a rate"),
        ({"rejoin_s": 9.0}, "needs hosts.loss_every_s"),
        ({"own_links": {"7": {"gbit_s": 1.0}}}, "own_links has '7'"),
    ],
)
def test_wrong_hosts_are_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(msgspec.to_builtins(FOUR) | {"hosts": {"count": 4} | keys}, FleetModel)
