"""One vLLM engine as a run has it: pushes under load, the trainer's logprobs, seeds, sleep. A check begins with the
weights that the one before it left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

import engine_process  # noqa: E402
from anyio.from_thread import start_blocking_portal  # noqa: E402
from engine_process import engine_of, greedy_tokens, request  # noqa: E402
from gpu_cases import ON_A_GPU, needs_bfloat16, prepared, write_model  # noqa: E402

from streamrl.base.messages import PauseMode, WeightAnnouncement  # noqa: E402
from streamrl.base.types import Completion, FinishReason, TrainingSample, TrajectoryId, float_array, token_array  # noqa: E402
from streamrl.engines.resumption import resumed_request  # noqa: E402
from streamrl.engines.vllm.options import LARGE_CARD_BYTES, LARGE_CARD_TOKENS  # noqa: E402
from streamrl.engines.vllm.visible_gpus import visible_gpus  # noqa: E402
from streamrl.learning.batches.packing import pack  # noqa: E402
from streamrl.learning.model.loading import load_policy  # noqa: E402
from streamrl.learning.objective.logprobs import token_logprobs  # noqa: E402
from tests.weights.real_engines import bits_of, changed, publisher_of, read_tensors, save_bits  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
LOAD = {"cpu": (8, 200), "cuda": (64, 400)}
"""Requests in flight, and their tokens."""


class Served:
    """A model directory, a publisher of its weights, and engines that get them."""

    def __init__(self, device: str, directory: Path, sockets: Path, stack: ExitStack, **engines: Any) -> None:
        self.device, self.directory, self.sockets, self.version = device, directory, sockets, -1
        self.settings = engines
        write_model(directory, **SIZES)
        tensors = read_tensors(directory)
        self.bits = {name: bits_of(tensor) for name, tensor in tensors.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.publisher = stack.enter_context(publisher_of(self.shapes, sockets))
        self.portal = stack.enter_context(start_blocking_portal())
        self.engine = engine_of(directory, sockets, device, 0, **engines)
        began = time.perf_counter()
        stack.callback(lambda: self.portal.call(self.engine.aclose))
        self.portal.call(self.engine.start)
        self.seconds = time.perf_counter() - began

    def greedy(self) -> list[list[int]]:
        return list(self.portal.call(greedy_tokens, self.engine))

    def greedy_of_a_fresh_engine(self) -> list[list[int]]:
        """In a process of its own, on the weights that were pushed last; sums of as many ranks round alike."""
        save_bits(self.directory, self.bits, self.shapes)
        answer = self.sockets / "answer.json"
        arguments = map(str, (self.directory, self.sockets, self.device, json.dumps(self.settings), answer))
        subprocess.run([sys.executable, engine_process.__file__, *arguments], check=True)
        return list(json.loads(answer.read_text()))

    async def push(self) -> float:
        """Other weights, as a run pushes them; the seconds of the pause."""
        self.bits, self.version = changed(self.bits, self.version + 1), self.version + 1
        published = self.publisher.publish(self.version, self.bits)
        base, state_hash = published.base_version, published.state_hash
        await self.engine.stage(WeightAnnouncement(
            policy_version=self.version, base_version=base, state_hash=state_hash, sources=(published.source,)
        ))  # fmt: skip
        began = time.perf_counter()
        await self.engine.pause(PauseMode.KEEP, clear_cache=True)
        done = await self.engine.commit(self.version)
        await self.engine.resume()
        self.publisher.acknowledge(self.version)
        assert done.state_hash == state_hash
        return time.perf_counter() - began

    async def sample(self, count: int, tokens: int) -> list[Completion]:
        """Completions of requests with other prompts and seeds, all at once."""
        asked = [request(seed, tokens) for seed in range(count)]
        return list(await asyncio.gather(*map(self.engine.generate, asked)))

    async def sample_until(self, pushed: asyncio.Event, count: int, tokens: int) -> list[Completion]:
        """``count`` requests at a time, each followed by another one until ``pushed``: however long a push takes, there
        are some in flight."""
        completions = []

        async def one_after_the_other(first: int) -> None:
            seed = first
            while not pushed.is_set():
                completions.append(await self.engine.generate(request(seed, tokens)))
                seed += count

        await asyncio.gather(*map(one_after_the_other, range(count)))
        return completions


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    needs_bfloat16(request.param, "an engine in bfloat16")
    with ExitStack() as stack:
        sockets = tmp_path_factory.mktemp("s", numbered=True)
        stack.callback(os.environ.update, dict(os.environ))  # the engine's variables are read when vLLM is imported
        stack.callback(os.environ.clear)
        yield Served(request.param, tmp_path_factory.mktemp("model"), sockets, stack)


on_the_engine = pytest.mark.parametrize("served", ON_A_GPU.args[1], indirect=True, scope="module")


@on_the_engine
def test_the_engine_starts_with_large_steps(served: Served, record_property: Any) -> None:
    """vLLM starts with runner V2, and with steps of 16,384 tokens on cards of 70 GiB and more."""
    config = served.engine.front_end.vllm_config
    record_property("start_s", served.seconds)
    record_property("model_runner_v2", config.use_v2_model_runner)
    record_property("cuda_graphs", str(config.compilation_config.cudagraph_mode))
    record_property("max_num_batched_tokens", config.scheduler_config.max_num_batched_tokens)
    if served.device == "cuda":
        assert config.use_v2_model_runner
        largest = visible_gpus()[0].memory >= LARGE_CARD_BYTES
        assert not largest or config.scheduler_config.max_num_batched_tokens == LARGE_CARD_TOKENS


@on_the_engine
def test_three_pushes_under_load(served: Served, record_property: Any) -> None:
    """Afterwards greedy tokens are those of a fresh engine on the same weights."""
    count, tokens = LOAD[served.device]

    async def run() -> tuple[list[float], list[Completion], float]:
        began, pushed = time.perf_counter(), asyncio.Event()
        running = asyncio.create_task(served.sample_until(pushed, count, tokens))
        pauses = []
        for _ in range(3):
            await asyncio.sleep(0.05)
            pauses.append(await served.push())
        pushed.set()
        return pauses, await running, time.perf_counter() - began

    pauses, completions, seconds = served.portal.call(run)
    spans = [span.policy_version for done in completions for span in done.version_spans]
    assert {done.finish_reason for done in completions} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert max(spans) == served.version == 2
    assert max(len(done.version_spans) for done in completions) > 1, "no request was in flight at a push"
    record_property("pause_s", max(pauses))
    record_property("completions", len(completions))
    record_property("tokens_a_second", sum(len(done.token_ids) for done in completions) / seconds)

    assert served.greedy() == served.greedy_of_a_fresh_engine()


@on_the_engine
def test_logprobs_are_those_of_the_trainer(served: Served, record_property: Any) -> None:
    """Logprobs of sampled tokens differ from the trainer's by less than 0.02 on average."""
    save_bits(served.directory, served.bits, served.shapes)
    completions = served.portal.call(served.sample, 8, 200)
    device = torch.device(served.device)
    policy, differences = load_policy(str(served.directory), device), []
    for seed, done in enumerate(completions):
        prompt, count = list(request(seed, 1).token_ids), len(done.token_ids)
        sample = TrainingSample(
            id=TrajectoryId(prompt_id="p", group_id=seed, sample=0),
            token_ids=token_array([*prompt, *done.token_ids]),
            loss_mask=b"\0" * len(prompt) + b"\1" * count,
            behavior_logprobs=float_array([0.0] * (len(prompt) + count)),
            reward=0.0,
            oldest_version=0,
            newest_version=0,
        )
        batch = pack(prepared([sample]), 0, device)
        with torch.no_grad(), torch.autocast(served.device, torch.bfloat16):
            found = token_logprobs(policy.head(policy(batch)), batch.targets_N)[0].float().cpu()
        differences.append((found - torch.tensor(list(done.behavior_logprobs))).abs())
    apart = torch.cat(differences)
    record_property("mean_difference", float(apart.mean()))
    record_property("p99_difference", float(apart.quantile(0.99)))
    assert float(apart.mean()) < 0.02


@on_the_engine
def test_a_seed_repeats_its_tokens(served: Served, record_property: Any) -> None:
    """A seed gives its tokens again alone, in a batch and after a resume."""
    (alone,) = served.portal.call(served.sample, 1, 60)
    among = served.portal.call(served.sample, 16, 60)[0]
    whole = request(0, 60)
    part = served.portal.call(served.engine.generate, msgspec.structs.replace(whole, max_tokens=20))
    rest = served.portal.call(served.engine.generate, resumed_request(whole, part, seed=whole.seed))
    resumed = [*part.token_ids, *rest.token_ids]
    record_property("same_in_a_batch", list(among.token_ids) == list(alone.token_ids))
    record_property("same_resumed", resumed == list(alone.token_ids))
    assert list(part.token_ids) == list(alone.token_ids)[:20]
    if served.device == "cuda":  # the V2 sampler's noise is a function of seed and position
        assert resumed == list(alone.token_ids)


@on_the_engine
def test_it_sleeps_wakes_and_takes_a_push(served: Served, record_property: Any) -> None:
    """Asleep, the engine gives memory back, with its weights and without; awake, it chooses the tokens of before, and
    takes a push."""
    if served.device == "cpu":
        pytest.skip("vLLM sleeps on CUDA only")
    before = served.greedy()
    for keeps, name in ((False, "given_back_gib"), (True, "given_back_with_weights_kept_gib")):
        served.engine._options = msgspec.structs.replace(served.engine._options, keeps_weights=keeps)
        free = torch.cuda.mem_get_info()[0]
        began = time.monotonic()
        served.portal.call(served.engine.sleep)
        record_property(name, (torch.cuda.mem_get_info()[0] - free) / 2**30)
        served.portal.call(served.engine.wake)
        served.portal.call(served.engine.resume)
        record_property(name.replace("given_back", "switch").replace("gib", "s"), time.monotonic() - began)
        assert served.greedy() == before
    record_property("pause_s", served.portal.call(served.push))
