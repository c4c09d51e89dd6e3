"""The controller's side of reward workers: streams to the workers, inspection of the functions, and changes of rewards.

``processes`` and ``run_controller`` call it in the controller's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from anyio import to_thread

from streamrl.base.atomic_files import write_durable
from streamrl.base.errors import RecipeError
from streamrl.base.run_events import RunWarning
from streamrl.base.types import Texts
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.launch.attached_rewards import AttachedRewards, Note
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Topology, rewards_endpoint
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.reward_messages import LoadRewardSet, RewardOrder, RewardReply, RewardRequest, RewardResult
from streamrl.rewards.rewards_snapshot import fresh_rewards, read_rewards_file
from streamrl.rewards.signature import needed_columns
from streamrl.rewards.time_limits import LearntLimits
from streamrl.run.prompts.open_prompts import check_prompts, missing_columns, open_prompts
from streamrl.run.prompts.prompt_spec import SourceKind, prompt_sources, read_spec, settings_of_sources
from streamrl.stages.reward import ORDERS_WINDOW, RewardSettings, RewardStage, WorkerStreams, wait_ready

FIRST_PROMPTS = 16


@asynccontextmanager
async def open_worker(topology: Topology, index: int) -> AsyncIterator[WorkerStreams]:
    """Open the streams to reward worker ``index`` or to its successor, and wait until the worker is ready."""
    name = f"reward-{index}"
    orders_at = topology.endpoint(name, "orders")
    async with (
        zmq_sender(RewardOrder, orders_at, bind=True, window=ORDERS_WINDOW, name=f"{name}.orders") as orders,
        zmq_receiver(RewardResult, topology.endpoint(name, "results"), bind=True, name=f"{name}.results") as results,
    ):
        await wait_ready(orders, results)
        yield orders, results


async def open_reward_stage(
    recipe: Recipe, topology: Topology, run_directory: Path, emit: Callable[[RewardReply | RunWarning], Awaitable[None]]
) -> tuple[RewardStage, AttachedRewards]:
    """Make the reward stage, with the rewards of the recipe or of the resumed run."""
    snapshot = await to_thread.run_sync(read_rewards_file, run_directory) or fresh_rewards(recipe)
    inspections = await to_thread.run_sync(inspect_in_subprocess, snapshot.rewards)
    version = snapshot.reward_version
    rewards = snapshot.rewards
    settings = RewardSettings(
        functions="+".join(reward.label for reward in rewards),
        per_group=any(
            inspection.signature is not None and inspection.signature.per_group for inspection in inspections
        ),
        timeout_s=max(reward.timeout_s for reward in rewards),
        concurrency=recipe.reward_limits.concurrency,
        # Workers begin with the rewards of the recipe, which are version 0.
        attached=LoadRewardSet(reward_version=version, rewards=rewards) if version else None,
    )
    workers = [partial(open_worker, topology, index) for index in range(recipe.reward_limits.workers)]

    async def notify(notice: str) -> None:
        await emit(RunWarning(step=0, message=notice))

    stage = RewardStage(settings, workers, LearntLimits(snapshot.since, snapshot.slowest_s), notify)
    return stage, AttachedRewards(recipe, stage, snapshot, emit, check_reward)


async def change_rewards(topology: Topology, attached: AttachedRewards, run_directory: Path, note: Note) -> None:
    """Carry out requests of users to change rewards. ``note`` is first called for the rewards of a resumed run. Each
    change is written into ``run_directory``, for a successor of this controller."""

    def write_and_note(version: int, rewards: Texts, change: str) -> None:
        for name, content in attached.file().items():
            write_durable(run_directory / name, content)
        note(version, rewards, change)

    if version := attached.snapshot.reward_version:
        note(version, tuple(reward.label for reward in attached.snapshot.rewards), "resume")
    endpoint = rewards_endpoint(topology)
    async with zmq_receiver(RewardRequest, endpoint, bind=False, name="controller.rewards") as requests:
        await attached.run(requests, write_and_note)


async def check_reward(recipe: Recipe, reward: Reward) -> None:
    """Import one function in a separate process, and check that the first prompts have its columns. Raises
    ``RecipeError``."""
    (inspection,) = await to_thread.run_sync(inspect_in_subprocess, [reward])
    problems = list(inspection.problems)
    if inspection.signature is not None:
        columns = needed_columns([inspection.signature])
        tokenizer = await to_thread.run_sync(load_tokenizer, recipe.model.path)
        settings = settings_of_sources(recipe)
        for path, spec in prompt_sources(recipe).items():
            if any(columns.values()) and settings[path].serves(reward):
                problems += [f"{path}: {text}" for text in await _missing_columns(spec, tokenizer, columns)]
    if problems:
        raise RecipeError(*dict.fromkeys(problems))


async def _missing_columns(spec: str, tokenizer: Tokenizer, columns: Mapping[str, Sequence[str]]) -> list[str]:
    if read_spec(spec).kind is SourceKind.ITERATOR:  # never import user code here
        return await to_thread.run_sync(check_prompts, spec, tokenizer, columns)
    source = await to_thread.run_sync(partial(open_prompts, spec, tokenizer, seed=0, shuffle=False))
    try:
        prompts = await source.draw(min(FIRST_PROMPTS, source.size or FIRST_PROMPTS))
    finally:
        await source.aclose()
    return [column for prompt in prompts for column in missing_columns(prompt, columns)]
