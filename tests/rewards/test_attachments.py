"""Rewards that are changed while a run goes on: through the real stage, a real worker and real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.stage_messages import Scored
from streamrl.base.types import ScoredTrajectory, Trajectory
from streamrl.cli.main import main
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.zmq_stream import zmq_receiver
from streamrl.launch.attached_rewards import AttachedRewards
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe
from streamrl.rewards.attachments import RewardAttachments, as_reward
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.rewards.reward_messages import RewardRequest
from streamrl.rewards.rewards_snapshot import fresh_rewards
from streamrl.stages.reward import RewardSettings, RewardStage, wait_ready
from tests.rewards.conftest import KILLERS

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]
COUNT = 300


def a_function(completion: str) -> float:
    return float(len(completion))


def test_a_function_is_named_as_another_process_can_import_it() -> None:
    assert as_reward(a_function, weight=2.0) == Reward(function=f"{__name__}:a_function", weight=2.0)
    assert as_reward("module:f") == Reward(function="module:f")
    with pytest.raises(RecipeError, match="cannot be imported"):
        as_reward(lambda completion: 1.0)


@pytest.mark.parametrize(
    ("function", "option", "found"),
    [
        ("reward_model", "path=model", "{here}/model"),
        ("judge", "cache=answers.sqlite", "{here}/answers.sqlite"),
        ("mine.py:f", "table=../rows.json", "{above}/rows.json"),
        ("mine.py:f", "table=rows.json", "rows.json"),  # nothing says that it is a path
    ],
)
@pytest.mark.parametrize("action", [("attach", "run"), ("replace", "run", "old")])
def test_paths_of_a_command_are_relative_to_where_it_is_given(
    action: tuple[str, ...], function: str, option: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("streamrl.cli.control._change", lambda command, run, operation: asked.append(operation) or 0)
    assert main(["reward", *action, function, "--option", option]) == 0
    made = asked[0].reward
    here = tmp_path.resolve()
    assert list(made.options.values()) == [found.format(here=here, above=here.parent)]
    assert made.function == (f"{here}/mine.py:f" if ":" in function else function)


@pytest.mark.long
async def test_live_changes_lose_no_sample(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """Live changes lose no sample, and the log says which version scored which sample."""
    recipe = make_recipe("length")
    attachments = RewardAttachments()
    log: list[Any] = []
    checked: list[str] = []

    def note(version: int, rewards: tuple[str, ...], change: str) -> None:
        log.append((version, rewards, change))

    async def reply(answer: Any) -> None:
        attachments.deliver_reply(answer)

    async def accept(recipe: Recipe, reward: Reward) -> None:
        checked.append(reward.label)

    outcomes: list[Any] = []
    endpoint = f"ipc://{tmp_path}/changes"
    async with anyio.create_task_group() as group:

        @asynccontextmanager
        async def open_worker() -> AsyncIterator[Any]:
            orders_in, orders_out = memory_stream(64)
            results_in, results_out = memory_stream(64)

            async def work() -> None:
                tokenizer = load_tokenizer(recipe.model.path)
                await run_reward_worker(recipe, tokenizer, 0, orders_out, results_in, owns_process=False)
                await results_in.aclose()

            group.start_soon(work)
            await wait_ready(orders_in, results_out)
            yield orders_in, results_out

        async def listen() -> None:
            async with zmq_receiver(RewardRequest, endpoint, bind=False, name="changes") as changes:
                await attached.run(changes, note)

        async def score(trajectory: Trajectory) -> None:
            outcomes.append(await stage.score(trajectory, 5))

        async def flow() -> None:
            for sample in range(COUNT):
                trajectory = make_trajectory("ab", sample=sample, group=sample // 5)
                group.start_soon(score, trajectory)
                await asyncio.sleep(0)
                if sample in (60, 120, 180, 240):
                    await reached[sample].wait()

        reached = {sample: anyio.Event() for sample in (60, 120, 180, 240)}
        settings = RewardSettings(functions="length", per_group=False, timeout_s=300.0, concurrency=4)
        stage = RewardStage(settings, [open_worker])
        attached = AttachedRewards(recipe, stage, fresh_rewards(recipe), reply, accept)
        running = stage.running()
        await running.__aenter__()
        changing = anyio.CancelScope()
        group.start_soon(listen)
        group.start_soon(flow)

        async def change() -> None:
            with changing:
                await attachments.run(endpoint)

        group.start_soon(change)
        while not outcomes:
            await asyncio.sleep(0)
        assert await attachments.attach(f"{KILLERS}:half", weight=2.0) == 1
        reached[60].set()
        with pytest.raises(RecipeError, match="no_such"):
            await attachments.replace("length", f"{KILLERS}:no_such")
        reached[120].set()
        with pytest.raises(RecipeError, match='no reward is called "lenght"'):
            await attachments.detach("lenght")
        version = await attachments.replace("length", f"{KILLERS}:three", trusted=True)
        reached[180].set()
        assert await attachments.detach("half") == version + 1
        reached[240].set()
        while len(outcomes) < COUNT:
            await asyncio.sleep(0)
        await running.__aexit__(None, None, None)
        listed = await attachments.attached()
        assert listed.reward_version == version + 1
        assert [(r.name, r.since, r.trusted) for r in listed.rewards] == [("three", version, True)]
        assert checked == ["half", "no_such", "three"]
        changing.cancel()
        attachments.close()
    with pytest.raises(StreamRLError, match="has ended"):
        await attachments.detach("three")
    assert all(isinstance(o, Scored) and isinstance(o.outcome, ScoredTrajectory) for o in outcomes), outcomes
    assert sorted(o.outcome.trajectory.id.sample for o in outcomes) == list(range(COUNT))
    by_version = {0: {"length": 2.0}, 1: {"length": 2.0, "half": 0.5}}
    by_version |= {version: {"three": 3.0, "half": 0.5}, version + 1: {"three": 3.0}}
    totals = {0: 2.0, 1: 3.0, version: 4.0, version + 1: 3.0}
    for outcome in (o.outcome for o in outcomes):
        assert outcome.reward_parts == by_version[outcome.reward_version]
        assert outcome.reward == totals[outcome.reward_version]
    assert {o.outcome.reward_version for o in outcomes} == set(by_version)
    assert len({(o.outcome.trajectory.id.group_id, o.outcome.reward_version) for o in outcomes}) == COUNT // 5
    assert log == [
        (1, ("length", "half"), f"attach half ({KILLERS}:half)"),
        (version, ("three", "half"), f"replace length by three ({KILLERS}:three)"),
        (version + 1, ("three",), "detach half"),
    ]


async def test_the_end_of_the_run_ends_all_waiting_tasks(tmp_path: Path) -> None:
    attachments = RewardAttachments()
    async with anyio.create_task_group() as group:
        group.start_soon(attachments.run, f"ipc://{tmp_path}/changes")
        await anyio.wait_all_tasks_blocked()
        attachments.close()
    attachments = RewardAttachments()
    async with anyio.create_task_group() as group:

        async def ask() -> None:
            with pytest.raises(StreamRLError, match="ended before"):
                await attachments.detach("length")  # nobody answers

        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        attachments.close()
