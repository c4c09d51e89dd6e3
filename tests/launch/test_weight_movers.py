"""The movers that a topology plans."""

from __future__ import annotations

from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.launch.weight_movers import mover_lines, movers_of
from streamrl.recipe.sections import Weights
from streamrl.recipe.topology import ProcessPlan, Role, Topology
from streamrl.weights.distance import Mover


def engines(*places: tuple[tuple[str, ...], str]) -> tuple[ProcessPlan, ...]:
    return tuple(
        ProcessPlan(role=Role.ENGINE, index=index, gpus=gpus, host=host) for index, (gpus, host) in enumerate(places)
    )


def test_movers_set_availabilitys_and_gpus() -> None:
    """A rank with a GPU shares its memory with engines of its host, unless the recipe says otherwise or weights go
    through a store; several ranks take the slowest mover."""
    rank = ProcessPlan(role=Role.TRAINER, index=0, gpus=("0",))
    around = engines((("0",), ""), (("1",), ""), (("0", "1"), ""), (("0",), "far"))
    planned = [Mover.DEVICE, Mover.HOST, Mover.HOST, Mover.ENCODED]
    encoded = [Mover.ENCODED] * 4
    on_cpu = replace(rank, gpus=())
    for shared, transport, of, movers in (
        (None, "", rank, planned),
        (None, "s3://bucket/run", rank, encoded),
        (False, "", rank, encoded),
        (None, "", on_cpu, encoded),
        (True, "", on_cpu, [Mover.HOST, Mover.HOST, Mover.HOST, Mover.ENCODED]),
    ):
        recipe = small_recipe(weights=Weights(shared_memory=shared, transport=transport))
        assert list(movers_of(recipe, Topology(processes=(of, *around), endpoints={})).values()) == movers
    both = Topology(processes=(rank, replace(rank, index=1, gpus=("1",)), *around), endpoints={})
    assert mover_lines(small_recipe(), both) == [
        "  weights get to engine-0, engine-1, engine-2 from the trainer's memory on the same host",
        "  weights get to engine-3 as encoded bytes",
    ]


def test_ranks_of_several_hosts_all_encode() -> None:
    """Where a part of a version comes from another host, every rank encodes: also the one beside the engines."""
    ranks = [ProcessPlan(role=Role.TRAINER, index=index, gpus=("0",), host=host) for index, host in enumerate("ab")]
    topology = Topology(processes=(*ranks, *engines((("1",), "a"), (("2",), "a"))), endpoints={})
    assert set(movers_of(small_recipe(), topology).values()) == {Mover.ENCODED}
