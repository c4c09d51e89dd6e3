"""Who fetches a version from whom: over any hosts, without some of them, and for an engine that joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as some

from streamrl.base.messages import WeightAnnouncement, WeightSource
from streamrl.engines.push.relay_tree import RelayPlace, RelayTree, ancestors, children

PLACES = some.lists(some.tuples(some.integers(0, 40), some.booleans()), min_size=1, max_size=60).map(
    lambda hosts: {
        f"engine-{index}": RelayPlace(f"host-{host}", f"tcp://{host}:{index}", beside)
        for index, (host, beside) in enumerate(hosts)
    }
)


def way_up(tree: RelayTree, name: str, engines: Collection[str], pieces: int, gone: Collection[str]) -> list[str]:
    """Engines from ``name`` up to the child of the trainer, each the first living source of the one before."""
    way = [name]
    while above := [one for one in tree.sources(way[-1], engines, pieces) if one not in gone]:
        assert above[0] not in way, "it waits for itself"
        way.append(above[0])
    return way


@given(PLACES, some.integers(1, 300), some.data())
def test_all_reach_the_trainer_which_sends_two_copies_at_most(
    places: dict[str, RelayPlace], pieces: int, data: some.DataObject
) -> None:
    tree = RelayTree(lambda: places)
    engines = data.draw(some.sets(some.sampled_from(sorted(places)), min_size=1))
    ways = {name: way_up(tree, name, engines, pieces, ()) for name in engines}
    assert len({way[-1] for way in ways.values()}) <= 2
    below = Counter(tree.sources(name, engines, pieces)[0] for name, way in ways.items() if len(way) > 1)
    hosts = {places[name].host for name in engines}
    for name, count in below.items():
        assert name in engines
        others = [one for one in engines if one != name and places[one].host == places[name].host]
        assert count <= len(others) + 2, "more than two copies leave a host"
    roots = {way[-1] for way in ways.values()}
    if any(places[name].beside_trainer for name in engines):
        assert any(places[name].beside_trainer for name in roots)
    gone = data.draw(some.sets(some.sampled_from(sorted(engines))))
    ends = {way_up(tree, name, engines, pieces, gone)[-1] for name in engines - gone}
    spread = max(1, *(sum(places[one].host == host for one in engines) for host in hosts))
    assert len(ends) <= 2 + (2 + spread) * len(gone), "those that are left ask the trainer one by one"


@given(PLACES, some.data())
def test_an_engine_that_joins_asks_holders(places: dict[str, RelayPlace], data: some.DataObject) -> None:
    tree = RelayTree(lambda: places)
    name, *holders = data.draw(some.lists(some.sampled_from(sorted(places)), min_size=1, unique=True))
    sources = tree.sources(name, holders, 10)
    assert len(set(sources)) == len(sources) <= 3
    assert set(sources) <= set(holders)
    assert bool(sources) == bool(holders)
    here = [one for one in holders if places[one].host == places[name].host]
    assert not here or places[sources[0]].host == places[name].host


@given(some.integers(1, 300), some.integers(1, 300))
def test_the_shape_is_the_faster_one(hosts: int, pieces: int) -> None:
    """In steps in which a link carries one piece."""

    def steps(width: int) -> int:
        depth = max(len(ancestors(place, width)) for place in range(hosts))
        return width * (pieces + depth)

    width = children(hosts, pieces)
    assert steps(width) == min(steps(1), steps(2))
    parents = [place for place in range(hosts) if not ancestors(place, width)]
    assert parents == list(range(min(width, hosts)))


def test_an_engine_is_found_where_it_is_now() -> None:
    places = {f"engine-{index}": RelayPlace(f"host-{index}", f"tcp://{index}:1") for index in range(3)}
    tree = RelayTree(lambda: places)
    announced = WeightAnnouncement(1, 0, 0, (WeightSource(0, "tcp://trainer:1", "d", 100, 1, 1),))
    assert tree.with_relays(announced, "engine-2", places).peers == ("tcp://1:1", "tcp://0:1")
    places = places | {"engine-1": RelayPlace("host-9", "tcp://9:1")}
    assert tree.with_relays(announced, "engine-1", ["engine-0", "engine-2"]).peers == ("tcp://2:1", "tcp://0:1")
    assert tree.with_relays(announced, "engine-2", places).peers == ("tcp://0:1",)
    assert tree.with_relays(announced, "engine-1", places).peers == ("tcp://2:1", "tcp://0:1")
    assert tree.with_relays(announced, "elsewhere", places) is announced
