"""The controller's side of a judge, with judges whose answers are scripted: loads, figures, death and successor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import StreamEnded
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StepFinished
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe
from streamrl.recipe.served_models import Judge
from streamrl.recipe.topology import Role, Topology, plan_topology
from streamrl.rewards.served.gate import ActorLoad, ModelEvent, ModelOrder, ModelReady, ModelReport
from streamrl.rewards.served.link import ServedModelLink

STEP = StepFinished(step=1, policy_version=1, metrics={"reward/mean": 0.5})


def recipe(model: str = "/j") -> Recipe:
    return small_recipe("/m", rewards=(Reward(function="judge"),), judge=Judge(model=model))


def load(running: int, waiting: int = 0) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, kv_cache_usage=0.0, generated_tokens=0)


@asynccontextmanager
async def judge(topology: Topology) -> AsyncIterator[tuple[ReceiveStream[ModelOrder], SendStream[ModelEvent]]]:
    """A judge's ends of the streams, as its process opens them."""
    async with (
        zmq_sender(ModelEvent, topology.endpoint("judge-0", "reports"), bind=False, name="reports") as reports,
        zmq_receiver(ModelOrder, topology.endpoint("judge-0", "orders"), bind=False, name="orders") as orders,
    ):
        yield orders, reports


async def until_asked(link: ServedModelLink, questions: float) -> dict[str, float]:
    while (figures := link.measured(STEP).metrics).get("judge/questions_total") != questions:
        await anyio.sleep(0.01)
    return figures


async def test_it_hears_of_the_actor_and_its_figures_outlive_it(tmp_path: Path) -> None:
    topology = plan_topology(recipe(), tmp_path)
    link = ServedModelLink(Role.JUDGE, topology)
    now = load(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        # The first dies: its orders break, as those of a killed process do.
        async with judge(topology) as (orders, reports):
            assert await orders.receive() == ActorLoad(share=0.0)
            await reports.send(ModelReady(max_model_len=64))
            await link.ready(lambda: now, 8)
            now = load(3, waiting=3)
            assert await orders.receive() == ActorLoad(share=0.75)
            now = load(8, waiting=8)
            assert await orders.receive() == ActorLoad(share=1.0)
            await reports.send(ModelReport(questions=4, batches=2, waited_s=2.0, awake_s=3.0))
            assert (await until_asked(link, 4.0))["judge/waited_mean_s"] == 0.5
            await reports.abort("killed")  # type: ignore[attr-defined]
        async with judge(topology) as (orders, reports):
            assert await orders.receive() == ActorLoad(share=1.0)
            await reports.send(ModelReady(max_model_len=64))
            await reports.send(ModelReport(questions=1, batches=1, waited_s=0.5, awake_s=1.0))
            figures = await until_asked(link, 5.0)
            assert figures == {
                "reward/mean": 0.5,
                "judge/questions_total": 5.0,
                "judge/batches_total": 3.0,
                "judge/waited_mean_s": 0.5,
                "judge/awake_s_total": 4.0,
            }
            link.retire()
            with pytest.raises(StreamEnded):
                await orders.receive()
            await reports.aclose()


async def test_a_run_ends_while_its_judge_is_being_started_again(tmp_path: Path) -> None:
    topology = plan_topology(recipe(), tmp_path)
    link = ServedModelLink(Role.JUDGE, topology)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        async with judge(topology) as (orders, reports):
            await orders.receive()
            await reports.send(ModelReady(max_model_len=64))
            await link.ready(lambda: load(0), 8)
            await reports.abort("killed")  # type: ignore[attr-defined]
        link.retire()
