"""Whatever the parts of a controller hold is bounded by what is in flight and not by how long the run is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from streamrl.buffers import trajectory_store
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import RoundKind, TailBatching
from tests.run.scripted_parts import Killed, SimulatedRun, run_settings

SHORT, LONG, WINDOW = 30, 90, 8
CONTAINERS = dict | list | set | frozenset | tuple | deque
OF_THE_TEST = {"_log", "_save", "_scored", "_store_outcomes", "_waits"}
"""What a controller is given by the test, which keeps what it saw."""


def held(roots: Iterable[object]) -> Counter[str]:
    """How many entries there are in each container that can be reached through streamrl's objects, by where it is."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = deque((type(root).__name__, root) for root in roots)
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            found[path] += len(value)
            entries = [*value, *value.values()] if isinstance(value, dict) else list(value)
            waiting.extend((f"{path}[]", entry) for entry in entries)
        elif type(value).__module__.startswith("streamrl."):
            waiting.extend((f"{path}.{name}", part) for name, part in parts(value) if name not in OF_THE_TEST)
    return found


def parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    yield from getattr(value, "__dict__", {}).items()


CONTINUOUS = run_settings(steps=LONG + WINDOW, rounds=RoundKind.CONTINUOUS, max_staleness=2, checkpoint_every=2)
RACING = run_settings(
    steps=LONG + WINDOW,
    rounds=RoundKind.TAIL_BATCHING,
    tail_batching=TailBatching(prompt_oversampling=1.5, response_oversampling=1.5, deferred_prompts="regenerate"),
)


@pytest.mark.long
@pytest.mark.parametrize(("settings", "kept"), [(CONTINUOUS, True), (RACING, False)], ids=["continuous", "racing"])
async def test_a_longer_run_holds_no_more(
    settings: ControlSettings, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_store, "FEW_PROMPTS", 16)
    run = SimulatedRun(settings, tmp_path, failing=13, kept=kept)
    sizes: dict[int, Counter[str]] = {}
    happened = run.happened

    def look(kind: str, number: int) -> None:
        happened(kind, number)
        if kind == "live" and any(first <= number < first + WINDOW for first in (SHORT, LONG)):
            sizes[number] = held([run.controller])

    run.happened = look  # type: ignore[method-assign]
    assert await run.run() == "finished"
    # What is in flight moves up and down: all of a few steps are compared.
    early, late = (
        [found for step, found in sizes.items() if first <= step < first + WINDOW] for first in (SHORT, LONG)
    )
    assert len(early) == len(late) == WINDOW and len(late[0]) > 40, "nothing was looked at"
    most = {path: max(found[path] for found in early) for path in late[0]}
    least = {path: min(found[path] for found in late) for path in late[0]}
    grown = {path: (most[path], least[path]) for path in most if least[path] - most[path] > (LONG - SHORT) // 8}
    assert not grown


async def test_what_was_recovered_is_forgotten_once_the_run_goes_on(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(CONTINUOUS, steps=6)
    first = SimulatedRun(settings, tmp_path, kept=True)
    first.events_to_live = 60
    with pytest.raises(BaseExceptionGroup) as killed:
        await first.run()
    assert killed.value.subgroup(Killed)
    second = SimulatedRun(settings, tmp_path, kept=True)
    second.ranks = first.ranks
    second.ranks[0].happened = second.happened
    assert await second.run() == "finished"
    assert second.controller._resumed and not second.controller._store.trajectories
