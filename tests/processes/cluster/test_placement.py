from __future__ import annotations

import sys
import time
from collections import Counter
from functools import reduce
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.errors import RecipeError
from streamrl.processes.cluster.host_assignment import GpuNeed, HostRoom, assign, on_fewer_ranks
from streamrl.processes.cluster.ray_hosts import RayLink, ray_hosts
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Cluster, Recipe, Transport
from streamrl.recipe.topology import prepared_sets

ON_CPU = GpuNeed(engine=0, rank=0)


def recipe(**settings: object) -> Recipe:
    sections: dict[str, Any] = {"model": {"path": "m"}, "prompts": {"train": "p.jsonl"}}
    for key, value in settings.items():
        *path, name = key.split("__")
        reduce(lambda table, part: table.setdefault(part, {}), path, sections)[name] = value
    return load_recipe(sections | {"rewards": [{"function": "exact_match"}]})


def rooms(*gpus: int) -> list[HostRoom]:
    return [
        HostRoom(name=f"h{n}", address=f"10.0.0.{n}", gpus=tuple(map(str, range(count))))
        for n, count in enumerate(gpus)
    ]


def hosts_of(one: Recipe, hosts: list[HostRoom], need: GpuNeed = ON_CPU) -> dict[str, str]:
    return {name: f"{place.host}:{','.join(place.gpus)}" for name, place in assign(one, hosts, need).items()}


def test_ranks_share_the_controllers_host() -> None:
    """Ranks are together on the controller's host, and engines on the others."""
    found = hosts_of(recipe(engines__count=4, training__ranks=2), rooms(0, 0, 0))
    assert found == {f"trainer-{r}": "h0:" for r in (0, 1)} | {f"engine-{e}": f"h{1 + e // 2}:" for e in range(4)}


def test_all_are_on_the_only_host() -> None:
    assert set(hosts_of(recipe(engines__count=2), rooms(0)).values()) == {"h0:"}


def test_a_recipe_says_how_many_hosts_share_ranks_and_engines() -> None:
    one = recipe(
        engines__count=2, training__ranks=2, cluster__advanced__trainer_hosts=2, cluster__advanced__engine_hosts=2
    )
    found = hosts_of(one, rooms(0, 0, 0))
    assert found == {"trainer-0": "h0:", "trainer-1": "h1:", "engine-0": "h2:", "engine-1": "h0:"}


def test_ranks_take_the_fewest_hosts() -> None:
    """Ranks take the fewest hosts, and engines take whole groups of the GPUs that are left."""
    one = recipe(engines__count=3, engines__tensor_parallel_size=2, training__ranks=5)
    found = hosts_of(one, rooms(2, 4, 8), GpuNeed(engine=1, rank=1))
    assert found["trainer-0"] == "h2:0" and found["trainer-4"] == "h2:4"
    assert [found[f"engine-{e}"] for e in range(3)] == ["h0:0,1", "h1:0,1", "h1:2,3"]


def test_each_set_of_engines_has_its_own_width() -> None:
    """Four small engines, or one large one, have the four GPUs beside the rank in turn."""
    one = recipe(engines__count=4, engines__advanced__sets=[{"count": 1, "tensor_parallel_size": 4}])
    found = hosts_of(one, rooms(5), GpuNeed(engine=1, rank=1))
    assert [found[f"engine-{e}"] for e in range(5)] == ["h0:1", "h0:2", "h0:3", "h0:4", "h0:1,2,3,4"]


@pytest.mark.parametrize(
    ("settings", "gpus", "says"),
    [
        ({"cluster__hosts": 3}, (0, 0), "3 hosts are asked for, and there are 2 (h0, h1)"),
        ({"engines__count": 4, "training__ranks": 2}, (2, 2), "4 engines of 1 and 2 ranks of 1 need 6 GPUs, and 4 are"),
        ({"engines__tensor_parallel_size": 4}, (3, 3), "engines.args.pipeline_parallel_size or training.ranks"),
    ],
)
def test_too_small_a_cluster_is_refused_with_the_arithmetic(
    settings: dict[str, object], gpus: tuple[int, ...], says: str
) -> None:
    one = recipe(**settings)
    with pytest.raises(RecipeError) as refused:
        assign(one, rooms(*gpus), GpuNeed(engine=1, rank=1) if any(gpus) else ON_CPU)
    assert says in str(refused.value)


def test_a_smaller_cluster_runs_the_ranks_that_fit() -> None:
    """A run that has lost hosts goes on with the ranks for which there is room."""
    one = recipe(engines__count=2, training__ranks=4, cluster__hosts=3, cluster__advanced={"trainer_hosts": 2})
    need = GpuNeed(engine=1, rank=1)
    fewer = on_fewer_ranks(one, rooms(2, 3), need)
    assert fewer is not None and fewer.training.ranks == 3
    assert on_fewer_ranks(one, rooms(2), need) is None
    shared = recipe(training__ranks=2, cluster__advanced={"trainer_hosts": 2, "engine_hosts": 2})
    same = on_fewer_ranks(shared, rooms(0), ON_CPU)
    assert same is not None and same.training.ranks == 2


@given(
    gpus=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    ranks=st.integers(1, 9),
    engines=st.integers(1, 9),
    widths=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    ranks_on_gpu=st.booleans(),
)
def test_no_gpu_has_two_tenants_and_no_engine_two_hosts(
    gpus: list[int], ranks: int, engines: int, widths: tuple[int, int], ranks_on_gpu: bool
) -> None:
    one = recipe(
        engines__count=engines,
        engines__tensor_parallel_size=widths[0],
        training__ranks=ranks,
        engines__advanced__sets=[{"count": engines + 1, "tensor_parallel_size": widths[1]}],
    )
    need = GpuNeed(engine=1, rank=int(ranks_on_gpu))
    try:
        places = assign(one, rooms(*gpus), need)
    except RecipeError:
        # It may refuse what could just be packed, but never what fits with room to spare on each host.
        assert any(count < ranks * need.rank + (engines + 1) * max(widths) for count in gpus)
        return
    assert set(places) >= {f"trainer-{rank}" for rank in range(ranks)}
    for engines_of_set, width in zip(prepared_sets(one), widths, strict=True):
        names = [*engines_of_set.engines, *(f"trainer-{rank}" for rank in range(ranks))]
        taken = Counter((places[name].host, gpu) for name in names for gpu in places[name].gpus)
        assert set(taken.values()) <= {1}
        assert all(int(gpu) < gpus[int(host[1:])] for host, gpu in taken)
        assert all(len(places[name].gpus) == width for name in engines_of_set.engines)


async def test_the_run_goes_on_while_ray_takes_back_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray's head hangs, that takes as long as it does: other hosts would end, since nobody asks them."""
    slow = SimpleNamespace(remove_placement_group=lambda _: time.sleep(0.3))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", slow)
    actor = SimpleNamespace(close=SimpleNamespace(remote=lambda: 0.0))
    errors = SimpleNamespace(RayError=OSError, ActorUnavailableError=OSError)
    asked = 0
    async with anyio.create_task_group() as tasks:
        link = RayLink(SimpleNamespace(kill=lambda _: None, exceptions=errors), actor, None)  # type: ignore[arg-type]
        monkeypatch.setattr(link, "_call", anyio.sleep)
        tasks.start_soon(link.release)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.3:
            await anyio.sleep(0.01)
            asked += 1
    assert asked > 5


async def test_without_ray_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match=r"streamrl\[ray\]"):
        async with ray_hosts(Cluster(), Transport()):
            pass
