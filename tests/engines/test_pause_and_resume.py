"""Real engines: trajectories that are paused, requests submitted ahead of a push, an engine that joins and stops."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from builders.processes import until
from builders.stages import ZeroRewards

from streamrl.base.messages import Generate, WeightAnnouncement
from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryOutcome, TrajectoryPaused
from streamrl.base.types import Completion, FinishReason, Prompt, TokenArray, Trajectory, TrajectoryId, token_array
from streamrl.contracts import Engine, Journal, Sampler
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.sections import Sampling
from streamrl.stages.episodes import Episodes
from streamrl.weights.publish.publisher import Published, ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher as RankPublisher
from tests.engines.conftest import owned

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.torch, pytest.mark.asyncio(loop_scope="module")]

LONGEST = 400


class Weights:
    """The trainer's side. Even versions are the tiny model, whose greedy completions are long; odd ones differ."""

    def __init__(self, model: Path, endpoint: str) -> None:
        import safetensors.torch
        import torch

        tensors = safetensors.torch.load_file(model / "model.safetensors")
        shards = [
            ShardSpec(name=name, dtype="bfloat16", shape=tuple(tensor.shape), offset=0, count=tensor.numel())
            for name, tensor in tensors.items()
        ]
        self.bits = {n: t.flatten().view(torch.int16).numpy().view(np.uint16).copy() for n, t in tensors.items()}
        self.rank = RankPublisher(endpoint, run_id="pause", rank=0, shards=shards)
        self.version = -1

    def next_version(self) -> WeightAnnouncement:
        self.version += 1
        if self.version:
            random = np.random.default_rng(7)  # the same positions every time: a change and its inverse
            for name, values in self.bits.items():
                if name.endswith("proj.weight"):
                    values[random.random(values.size) < 0.3] ^= 0x0060  # mantissa bits: up to 75 % of a value
        return self._announced(self.rank.publish(self.version, self.bits))

    async def anchor(self, policy_version: int) -> WeightAnnouncement:
        return self._announced(self.rank.publish_anchor(policy_version))

    def _announced(self, published: Published) -> WeightAnnouncement:
        return WeightAnnouncement(
            policy_version=self.version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            sources=(published.source,),
        )


class Bench:
    """One real engine, what pushes to it, and a stage over a pool of which it is the only one that serves."""

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self.engine = engine
        self.weights = weights
        self.sync = WeightSync({"engine-0": engine}, weights.anchor, in_flight=InFlight.KEEP, timeout_s=300)

    async def push(self) -> None:
        await self.sync.push(self.weights.next_version())
        self.weights.rank.acknowledge(self.weights.version)

    async def greedy(self, prompts: list[TokenArray], name: str, tokens: int = LONGEST) -> list[Completion]:
        """A completion for each prompt, on an engine whose caches hold nothing."""
        await self.sync.pause()
        await self.sync.resume()
        done: dict[int, Completion] = {}

        async def one(index: int) -> None:
            done[index] = await self.engine.generate(greedy_request(prompts[index], f"{name}-{index}", tokens))

        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, index)
        return [done[index] for index in range(len(prompts))]


def greedy_request(prompt: TokenArray, name: str, tokens: int) -> Generate:
    return Generate(request_id=name, token_ids=prompt, max_tokens=tokens, seed=1, temperature=0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Bench]:
    """At version 0."""

    @asynccontextmanager
    async def opened(directory: Path) -> AsyncIterator[Bench]:
        weights = Weights(tiny_model, f"ipc://{directory}/w")
        try:
            weights.rank.start()
            options = request.getfixturevalue("tiny_options")(directory)
            async with request.getfixturevalue("hosted")(options, directory) as (engine, _):
                made = Bench(engine, weights)
                await made.push()
                yield made
        finally:
            weights.rank.close()

    async with owned(opened) as made:
        yield made


def prompts_of(count: int, length: int = 4) -> list[TokenArray]:
    random = np.random.default_rng(length)
    return [token_array(random.integers(2, 32, length).tolist()) for _ in range(count)]


async def unending(bench: Bench, count: int, name: str) -> tuple[list[TokenArray], list[Completion]]:
    """Prompts whose greedy completions reach the limit, and these completions."""
    prompts = prompts_of(4 * count)
    completions = await bench.greedy(prompts, name)
    found = [(p, c) for p, c in zip(prompts, completions, strict=True) if c.finish_reason is FinishReason.LENGTH]
    assert len(found) >= count
    return [p for p, _ in found[:count]], [c for _, c in found[:count]]


class Roll:
    """Episodes, one trajectory for each prompt."""

    def __init__(self, engine: Sampler, prompts: list[TokenArray]) -> None:
        self.stage = Episodes(engine, Sampling(max_tokens=LONGEST, temperature=0.0), ZeroRewards(), Journal())
        self.prompts = [Prompt(prompt_id=f"p{i}", token_ids=tokens) for i, tokens in enumerate(prompts)]
        self.ids = [TrajectoryId(prompt_id=p.prompt_id, group_id=i, sample=0) for i, p in enumerate(self.prompts)]
        self.paused: dict[int, int] = {}
        self.finished: dict[int, Trajectory] = {}

    def launch(self) -> None:
        for identity, prompt in zip(self.ids, self.prompts, strict=True):
            self.stage.launch(LaunchTrajectory(id=identity, prompt=prompt, group_size=1, seed=3), self._take)

    async def _take(self, outcome: TrajectoryOutcome) -> None:
        if isinstance(outcome, TrajectoryPaused):
            assert outcome.id.group_id not in self.paused
            self.paused[outcome.id.group_id] = outcome.tokens
        else:
            assert isinstance(outcome, Scored) and outcome.outcome.trajectory.id.group_id not in self.finished
            self.finished[outcome.outcome.trajectory.id.group_id] = outcome.outcome.trajectory

    def spans(self, index: int) -> list[tuple[int, int, int]]:
        spans = self.finished[index].segments[0].version_spans
        return [(span.start, span.end, span.policy_version) for span in spans]

    def tokens(self, index: int) -> TokenArray:
        return self.finished[index].segments[0].token_ids


async def test_paused_trajectories_go_on_from_their_tokens(bench: Bench) -> None:
    """Paused trajectories leave the engine and go on from their tokens."""
    prompts, whole = await unending(bench, 12, "pause")
    roll = Roll(bench.engine, prompts)
    old = bench.weights.version
    async with roll.stage.running():
        roll.launch()
        await until(lambda: bench.engine.load().running == 12)
        roll.stage.pause(roll.ids[:8])
        await until(lambda: len(roll.paused) == 8)
        await until(lambda: bench.engine.load().running == 4 or len(roll.finished) == 4)
        assert roll.stage.statistics().running <= 4
        await until(lambda: len(roll.finished) == 4)
        await until(lambda: bench.engine.load().running == 0)
        await bench.push()
        roll.stage.resume(roll.ids)
    assert len(roll.finished) == 12
    cut = [i for i in range(8) if roll.paused[i]]
    assert len(cut) == 8, "the pause came before their first token"
    new = bench.weights.version
    rests = await bench.greedy([prompts[i] + whole[i].token_ids[: roll.paused[i]] for i in cut], "rest", tokens=LONGEST)
    for i, rest in zip(cut, rests, strict=True):
        paused = roll.paused[i]
        assert roll.tokens(i)[:paused] == whole[i].token_ids[:paused], "the prefix is what was sampled before"
        assert roll.tokens(i)[paused:] == rest.token_ids[: LONGEST - paused]
        assert roll.spans(i) == [(0, paused, old), (paused, len(roll.tokens(i)), new)]
    for i in range(8, 12):
        assert roll.tokens(i) == whole[i].token_ids and roll.spans(i) == [(0, LONGEST, old)]


async def test_requests_of_a_pause_use_the_next_version_alone(bench: Bench) -> None:
    """Requests submitted during a pause are computed by the next version alone."""
    prompts = prompts_of(8, length=300)  # two full blocks of the prefix cache, and more
    old = await bench.greedy(prompts, "old", tokens=40)
    done: dict[str, Completion] = {}

    async def submit(prompt: TokenArray, name: str) -> None:
        done[name] = await bench.engine.generate(greedy_request(prompt, name, 40))

    async with anyio.create_task_group() as group:
        for index, prompt in enumerate(prompts):  # their blocks are in the cache, and keep the KV of the old weights
            group.start_soon(submit, prompt, f"warm-{index}")
        await until(lambda: len(done) == len(prompts))
        await bench.sync.pause()
        for index, prompt in enumerate(prompts):
            group.start_soon(submit, prompt, f"ahead-{index}")
        group.start_soon(submit, prompts[0], "aborted")
        await until(lambda: bench.engine.load().waiting == len(prompts) + 1)
        await bench.engine.abort(["aborted"])
        await until(lambda: "aborted" in done)
        assert done["aborted"].finish_reason is FinishReason.ABORT and not done["aborted"].token_ids
        assert not any(name.startswith("ahead") for name in done)
        await bench.push()
    fresh = await bench.greedy(prompts, "fresh", tokens=40)
    for index, (before, after) in enumerate(zip(old, fresh, strict=True)):
        ahead = done[f"ahead-{index}"]
        assert {span.policy_version for span in ahead.version_spans} == {bench.weights.version}
        assert ahead.token_ids == after.token_ids
        assert np.allclose(ahead.behavior_logprobs, after.behavior_logprobs, atol=1e-4)
        assert not np.allclose(before.behavior_logprobs[:1], after.behavior_logprobs[:1], atol=1e-3), "same weights?"


async def test_an_engine_joins_serves_and_stops(
    bench: Bench, hosted: Any, tiny_options: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An engine joins, takes requests over and stops while trajectories run. Two real engines: a host is started,
    brought to the live version, gets half of the requests, drains and ends."""
    pool = EnginePool({"engine-0": bench.engine}, unavailable=["engine-1"])
    await pool.start()
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        options = msgspec.structs.replace(tiny_options(Path(directory)), name="engine-1")
        async with hosted(options, Path(directory)) as (late, process):
            await pool.attach("engine-1", late)
            await bench.sync.admit("engine-1", late)
            assert await late.checksums() == await bench.engine.checksums()
            while bench.weights.version % 2 or bench.weights.version < 4:
                await bench.push()  # reaches both
            assert await bench.engine.checksums() == await late.checksums()
            prompts, whole = await unending(bench, 12, "join")
            roll = Roll(pool, prompts)
            pool.readmit("engine-1", UNAVAILABLE)
            async with roll.stage.running():
                roll.launch()
                await until(lambda: late.load().running > 0)
                await pool.migrate([f"{roll.ids[0]}/0", f"{roll.ids[1]}/0"], to="engine-1")
                await until(lambda: late.load().running > 2)
                await pool.drain("engine-1", "test")
                bench.sync.remove(pool.detach("engine-1"))
                await late.aclose()
                assert await process.wait() == 0
                await bench.push()
    assert len(roll.finished) == 12
    old, new = bench.weights.version - 1, bench.weights.version
    for index in range(12):
        spans = roll.spans(index)
        assert [version for *_, version in spans] in ([old], [new], [old, new]) and spans[-1][1] == len(
            roll.tokens(index)
        )
        sampled_before = spans[0][1] if spans[0][2] == old else 0
        assert roll.tokens(index)[:sampled_before] == whole[index].token_ids[:sampled_before]
