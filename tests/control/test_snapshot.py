"""What a checkpoint keeps of control: nothing that was drawn is lost, and what lost its race still waits."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from control_world import World, control_settings

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Prompt, token_array
from streamrl.buffers.prompt_shelf import PromptShelf
from streamrl.control import events as on
from streamrl.control.state import ControlState
from streamrl.journal.control_file import control_file, read_control_file
from streamrl.journal.kept_state import CONTROL_FILE
from streamrl.journal.snapshot import take_snapshot
from streamrl.recipe.scheduling import GroupSizing, RoundKind, SizingKind, TailBatching

RACING = control_settings(
    rounds=RoundKind.TAIL_BATCHING,
    tail_batching=TailBatching(prompt_oversampling=1.5),
    batch_groups=4,
    group_size=4,
    steps=9,
    group_sizing=GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8)),
)


def run_to_version(world: World, version: int) -> None:
    world.begin()
    while world.live_version < version:
        if not world.goes_on():
            trajectory = world.sampled[0]
            world.score(trajectory, reward=float(trajectory.sample), tokens=3 + trajectory.group_id)


def resumed(world: World, version: int) -> ControlState:
    """A new core that goes on from what a checkpoint of ``world`` keeps."""
    state = ControlState(world.settings)
    kept = msgspec.msgpack.decode(
        msgspec.msgpack.encode(take_snapshot(world.core)), type=type(take_snapshot(world.core))
    )
    state.handle(on.RunBegan(policy_version=version, kept=kept))
    return state


def test_losers_and_prompts_under_way_are_kept_and_no_name_is_used_twice() -> None:
    world = World(RACING)
    run_to_version(world, 1)
    losers = [t.prompt_id for t in world.core.supply.queue.tickets()]
    assert losers
    under_way = {g.prompt_id for g in world.core.buffer.groups.values()}
    state = resumed(world, 1)
    assert [t.prompt_id for t in state.supply.queue.tickets()] == losers
    again = {g.prompt_id for g in state.buffer.groups.values()} | {t.prompt_id for t in state.supply.waiting.tickets()}
    assert under_way <= again
    assert state.supply.drawn_prompts == world.next_prompt
    assert not {i for a in world.launched for i in a.ids} & {i for g in state.buffer.groups.values() for i in g.members}


def test_a_loser_whose_long_round_is_under_way_waits_for_it_again_and_draws_what_it_drew() -> None:
    world = World(msgspec.structs.replace(RACING, tail_batching=TailBatching(prompt_oversampling=2.0)))
    run_to_version(world, 1)
    under_way = world.core.buffer.groups.values()
    noise = {group.prompt_id: group.ticket.noise for group in under_way}
    assert world.core.round_kind == "long" and len(noise) == 4 and min(noise.values()) >= 0
    state = resumed(world, 1)
    assert state.round_kind == "long"
    assert {group.prompt_id: group.ticket.noise for group in state.buffer.groups.values()} == noise


def test_the_group_sizing_goes_on_as_if_nothing_had_happened() -> None:
    world = World(RACING)
    run_to_version(world, 4)
    state = resumed(world, 4)
    assert state.sizer.snapshot() == world.core.sizer.snapshot()
    assert state.sizer.size == world.core.sizer.size


def test_the_file_holds_the_prompts_that_it_names(tmp_path: Path) -> None:
    world = World(RACING)
    run_to_version(world, 1)
    snapshot = take_snapshot(world.core)
    shelf = PromptShelf("", {})
    shelf.put(Prompt(prompt_id=f"p{i}", token_ids=token_array([i, 2]), columns={"n": i}) for i in range(100))
    for name, content in control_file(snapshot, shelf).items():
        (tmp_path / name).write_bytes(content)
    kept = read_control_file(tmp_path)
    assert kept is not None
    assert kept.snapshot == snapshot
    assert {p.prompt_id for p in kept.prompts} == snapshot.prompt_ids()
    assert all(p.columns["n"] == p.token_ids[0] for p in kept.prompts)
    (tmp_path / CONTROL_FILE).write_bytes(b"\xc1 not msgpack")
    with pytest.raises(StreamRLError, match="cannot be read"):
        read_control_file(tmp_path)
    assert read_control_file(tmp_path / "elsewhere") is None
