"""The topic ``live``: figures of a race, from an engine and a buffer that are real."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from streamrl.base.messages import Generate
from streamrl.base.types import DropReason, FinishReason, TrajectoryId, token_array
from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.control.run_state import Batch, RunState
from streamrl.engines.pool import EnginePool
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.observe.top.live_figures import LiveFigures, pause_after
from streamrl.run.wait_reason import RunWaits, ShellView

LONG = LengthMixture(median=50, sigma=0.0, long_share=0.0)


def group_of(number: int, size: int) -> Group:
    members = {sample: Member(oldest_version=0) for sample in range(size)}
    prompt = PromptRef(prompt_id=f"p{number}")
    return Group(
        group_id=number, prompt=prompt, launch_version=0, oldest_version=0, size=size, keep=size, weight=size,
        round_kind="short", members=members, open=size,
    )  # fmt: skip


async def test_tokens_so_far_are_shared_out_and_exact_at_the_end() -> None:
    """Tokens so far are divided among the requests that an engine runs, and are exact at the end."""
    gate = anyio.Semaphore(0)

    async def one_step(seconds: float) -> None:
        await gate.acquire()

    async def settle() -> None:
        for _ in range(50):
            await checkpoint()

    engine = SimulatedEngine(SimulationOptions(max_num_seqs=2, lengths=LONG), sleep=one_step)
    pool, state = EnginePool({"engine-0": engine}), RunState(steps=9, batch=Batch(batch_id=0, target=6), live_version=0)
    state.buffer.admit(group_of(0, 3))
    state.buffer.admit(group_of(1, 2))
    waits = RunWaits(lambda: 5.0, lambda: ShellView(sampling=2, scoring=1, environment=3))
    waits.update(state)
    live = LiveFigures(lambda *_: None, lambda: state, waits, pool, budget=40)
    live.figures(0.0)
    async with anyio.create_task_group() as tasks:
        for sample in range(3):
            name = f"{TrajectoryId(prompt_id='p0', group_id=0, sample=sample)}/0"
            tasks.start_soon(
                pool.generate,
                Generate(request_id=name, token_ids=token_array([1, 2]), max_tokens=40, seed=sample, temperature=1.0),
            )
        await settle()
        gate.release()
        await settle()
        live.figures(0.5)  # one step of the one that came first
        for _ in range(8):
            gate.release()
        await settle()
        now = live.figures(1.0)
        (row,), rows = now.engines, now.groups
        assert (row.running, row.waiting, row.serves) == (2, 1, True)
        assert row.tokens_s == pytest.approx(32.0)  # 8 steps of 2 in half a second
        assert [(r.id, r.tokens, r.marks) for r in rows] == [(0, [9, 9, 0], "ssw"), (1, [0, 0], "ww")]
        assert (now.waits_for, now.budget, now.scoring, now.environment) == ("sampling", 40, 1, 3)
        first = TrajectoryId(prompt_id="p0", group_id=0, sample=0)
        scored = Member(oldest_version=0, finish_reason=FinishReason.LENGTH, reward=1.0, tokens=11)
        state.buffer.score(first, scored)
        state.prompts.queue.append(PromptRef(prompt_id="p1"))
        state.buffer.drop_group(state.buffer.untrained[1], DropReason.LOST_RACE)
        rows = live.figures(1.5).groups
        assert [(r.tokens, r.marks, r.state) for r in rows] == [
            ([11, 9, 0], "csw", "racing"),
            ([0, 0], "ww", "deferred"),
        ]
        state.trainer_version = 1
        assert [r.id for r in live.figures(2.0).groups] == [0], "those of the step before are gone"
        for _ in range(200):
            gate.release()
    assert len(live.figures(2.5).groups[0].tokens) == 3 and engine.load().running == 0


def test_figures_that_take_long_come_less_often() -> None:
    assert [pause_after(seconds) for seconds in (0.001, 0.1)] == [0.5, 10.0]
