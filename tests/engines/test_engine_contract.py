"""What every engine must do, asserted on each: simulated, and the real one (marked vllm)."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from streamrl.base.errors import EngineError, RequestRefused, WeightError
from streamrl.base.messages import Generate, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.contracts import Engine
from streamrl.engines.pool import EnginePool
from streamrl.engines.resumption import join_completions, remaining_tokens, resumed_request, with_unverified_tokens
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.engines.vllm.options import CPU_TURN_BLOCK_TOKENS
from streamrl.weights.publish.publisher import ShardSpec, WeightPublisher
from tests.engines.conftest import owned

CONTEXT = 512
CUTS = {"top_p": 0.97, "top_k": 12, "min_p": 0.02, "min_tokens": 30, "stop": ("w7w9", "w11w2")}
MakeRequest = Callable[..., Generate]


def simulated() -> SimulatedEngine:
    lengths = LengthMixture(median=20.0, long_median=300.0)
    return SimulatedEngine(SimulationOptions(max_model_len=CONTEXT, max_num_seqs=64, lengths=lengths))


@asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Engine]:
    if kind == "simulated":
        engine = simulated()
        await engine.start()
        yield engine
        await engine.aclose()
    elif kind == "served":
        async with request.getfixturevalue("served")(simulated()) as remote:
            yield remote
    else:
        options = request.getfixturevalue("tiny_options")(directory)
        blocks = options.cache_blocks * options.block_tokens // CPU_TURN_BLOCK_TOKENS
        options = msgspec.structs.replace(options, block_tokens=CPU_TURN_BLOCK_TOKENS, cache_blocks=blocks)
        async with request.getfixturevalue("hosted")(options, directory) as (remote, _):
            yield remote


REAL = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.torch])


@pytest_asyncio.fixture(params=["simulated", "served", REAL], scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """Shared by the module: a real engine takes 15 to 45 s to start."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
    async with owned(lambda directory: opened(request.param, request, directory)) as made:
        yield made


pytestmark = pytest.mark.asyncio(loop_scope="module")


def words_of(token_ids: Iterable[int]) -> str:
    """As vLLM decodes them: special tokens are left out, and so is the space between words."""
    return "".join(f"w{token - 2}" for token in token_ids if token > 1)


def assert_well_formed(completion: Completion) -> None:
    """Every token has a logprob and exactly one version."""
    count = len(completion.token_ids)
    assert len(completion.behavior_logprobs) == count
    assert all(logprob <= 0 for logprob in completion.behavior_logprobs)
    ends = [0, *(span.end for span in completion.version_spans)]
    assert [span.start for span in completion.version_spans] == ends[:-1]
    assert ends[-1] == count


class Burst:
    """Requests in flight, and what came of them."""

    def __init__(self, engine: Engine, requests: list[Generate]) -> None:
        self.engine = engine
        self.requests = requests
        self.completions: dict[str, Completion] = {}

    async def run_one(self, request: Generate) -> None:
        self.completions[request.request_id] = await self.engine.generate(request)

    def start(self, group: anyio.abc.TaskGroup) -> None:
        for request in self.requests:
            group.start_soon(self.run_one, request)


async def until_running(engine: Engine) -> None:
    """Let requests get under way: one short request that was sent after them has finished."""
    await engine.generate(
        Generate(
            request_id=f"probe-{id(object())}", token_ids=token_array([2, 3]), max_tokens=8, seed=3, temperature=1.0
        )
    )


async def test_completions_are_well_formed(engine: Engine, make_request: MakeRequest) -> None:
    burst = Burst(engine, [make_request(request_id=f"form-{i}", seed=i, max_tokens=60) for i in range(24)])
    async with anyio.create_task_group() as group:
        burst.start(group)
    reasons = set()
    for completion in burst.completions.values():
        assert_well_formed(completion)
        assert 1 <= len(completion.token_ids) <= 60
        reasons.add(completion.finish_reason)
        if completion.finish_reason is FinishReason.STOP:
            assert completion.token_ids[-1] == 1, "the end token is part of the completion"
        else:
            assert len(completion.token_ids) == 60
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "the limit must cut some and not all"


async def test_later_turns_find_their_blocks_until_the_weights_change(
    engine: Engine, make_request: MakeRequest, request: pytest.FixtureRequest
) -> None:
    """At least 99 % of the tokens that can be in the cache: whole blocks of the turn before, but for its last token."""
    pool, histories = EnginePool({"engine-0": engine}), {i: token_array(range(2, 6 + i)) for i in range(16)}

    async def trajectory(number: int, turns: range) -> None:
        for turn in turns:
            asked = make_request(
                request_id=f"{number}.0.0/{turn}", token_ids=histories[number], max_tokens=50, min_tokens=50
            )
            answer = (await pool.generate(asked)).token_ids
            histories[number] = histories[number] + answer + token_array([3 + turn] * 20)

    async def shares(turns: range) -> dict[str, float]:
        async with anyio.create_task_group() as group:
            for number in histories:
                group.start_soon(trajectory, number, turns)
        print(found := pool.prefix_hits.take())
        return found

    found = await shares(range(5))
    if "vllm" not in request.node.callspec.id:
        assert found == {}, "it has no cache"
        return
    assert found["engines/prefix_hit_of_possible_ratio"] >= 0.99
    assert found["engines/prefix_hit_ratio"] + found["engines/prefix_miss_new_ratio"] >= 0.99
    await engine.pause(PauseMode.KEEP, clear_cache=False)
    await engine.resume()
    found = await shares(range(5, 7))
    assert found["engines/prefix_hit_of_possible_ratio"] >= 0.99 and found["engines/prefix_miss_pause_ratio"] > 0.3


async def test_a_seed_gives_the_same_completion(engine: Engine, make_request: MakeRequest) -> None:
    first, second, other = [
        await engine.generate(make_request(request_id=f"seed-{i}", token_ids=token_array([5, 6]), seed=seed))
        for i, seed in enumerate([11, 11, 12])
    ]
    assert first == second
    assert first.token_ids != other.token_ids


async def test_temperature_0_is_greedy(engine: Engine, make_request: MakeRequest) -> None:
    """Whatever the seed, also beside requests that are sampled."""
    requests = [make_request(request_id=f"0-{i}", seed=i, max_tokens=40, temperature=float(i % 3)) for i in range(9)]
    burst = Burst(engine, [msgspec.structs.replace(request, token_ids=token_array([5, 6])) for request in requests])
    async with anyio.create_task_group() as group:
        burst.start(group)
    greedy = [burst.completions[request.request_id] for request in requests if not request.temperature]
    assert all(completion.token_ids == greedy[0].token_ids for completion in greedy)
    assert_well_formed(greedy[0])


async def test_a_refused_request_leaves_the_engine_alive(engine: Engine, make_request: MakeRequest) -> None:
    with pytest.raises(RequestRefused, match=str(CONTEXT)):
        await engine.generate(make_request(request_id="long", token_ids=token_array([4] * (CONTEXT + 1))))
    with pytest.raises(RequestRefused):
        await engine.generate(make_request(request_id="empty", token_ids=token_array()))
    assert_well_formed(await engine.generate(make_request(request_id="after-refusal")))


async def test_context_ends_a_completion(engine: Engine, make_request: MakeRequest) -> None:
    prompt = token_array([4] * (CONTEXT - 3))
    completion = await engine.generate(make_request(request_id="edge", token_ids=prompt, max_tokens=40, seed=2))
    assert len(completion.token_ids) <= 3
    assert_well_formed(completion)


async def test_aborted_requests_return_what_they_have(engine: Engine, make_request: MakeRequest) -> None:
    long = Burst(engine, [make_request(request_id=f"abort-{i}", seed=i, max_tokens=480) for i in range(16)])
    async with anyio.create_task_group() as group:
        long.start(group)
        await until_running(engine)
        await engine.abort([request.request_id for request in long.requests])
        await engine.abort(["unknown"])
    cut = [c for c in long.completions.values() if c.finish_reason is FinishReason.ABORT]
    assert cut, "nothing was cut: the requests were too short for the test"
    assert any(len(completion.token_ids) > 0 for completion in cut)
    for completion in long.completions.values():
        assert_well_formed(completion)


async def test_pause_abort_is_a_barrier(engine: Engine, make_request: MakeRequest) -> None:
    burst = Burst(engine, [make_request(request_id=f"barrier-{i}", seed=i, max_tokens=480) for i in range(16)])
    async with anyio.create_task_group() as group:
        burst.start(group)
        await until_running(engine)
        await engine.pause(PauseMode.ABORT, clear_cache=True)
    assert any(c.finish_reason is FinishReason.ABORT for c in burst.completions.values())
    await engine.resume()
    assert_well_formed(await engine.generate(make_request(request_id="after-barrier")))


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_pause_keep_freezes_and_goes_on(engine: Engine, make_request: MakeRequest, clear_cache: bool) -> None:
    make = [make_request(request_id=f"keep-{clear_cache}-{i}", seed=i, max_tokens=200) for i in range(12)]
    burst = Burst(engine, make)
    async with anyio.create_task_group() as group:
        burst.start(group)
        await until_running(engine)
        await engine.pause(PauseMode.KEEP, clear_cache=clear_cache)
        done = len(burst.completions)
        late = Burst(engine, [make_request(request_id=f"late-{clear_cache}", seed=5)])
        late.start(group)
        await anyio.sleep(0.3)  # nothing may happen: there is no event to wait for
        assert len(burst.completions) == done
        assert not late.completions, "a request sent to a paused engine waits"
        await engine.resume()
    assert all(c.finish_reason is not FinishReason.ABORT for c in burst.completions.values())
    assert len(burst.completions) == 12
    assert late.completions


async def test_cut_work_goes_on_by_its_tokens(engine: Engine, make_request: MakeRequest) -> None:
    requests = [make_request(request_id=f"resume-{i}", seed=i, max_tokens=300) for i in range(12)]
    burst = Burst(engine, requests)
    async with anyio.create_task_group() as group:
        burst.start(group)
        await until_running(engine)
        await engine.pause(PauseMode.ABORT, clear_cache=True)
    await engine.resume()
    cut = [r for r in requests if burst.completions[r.request_id].finish_reason is FinishReason.ABORT]
    assert cut
    for request in cut:
        partial = burst.completions[request.request_id]
        rest = resumed_request(request, partial, seed=1000 + request.seed, request_id=f"{request.request_id}-again")
        joined = join_completions(partial, await engine.generate(rest))
        assert_well_formed(joined)
        assert len(joined.token_ids) <= 300
        assert joined.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


@pytest.mark.parametrize("cuts", [{}, CUTS], ids=["all tokens", "some"])
async def test_whatever_is_kept_a_completion_is_the_one_of_its_seed(
    engine: Engine, make_request: MakeRequest, cuts: dict[str, object]
) -> None:
    """All of it, a part, with a token that other weights chose, and what another temperature made of the same noise."""
    name = f"whole-{len(cuts)}"
    requests = [make_request(request_id=f"{name}-{i}", seed=i, max_tokens=90, **cuts) for i in range(40, 52)]
    whole, other = Burst(engine, requests), Burst(engine, [hotter(request) for request in requests])
    async with anyio.create_task_group() as group:
        whole.start(group)
        other.start(group)
    expected = [whole.completions[request.request_id] for request in requests]
    hot = [other.completions[f"{request.request_id}-hot"] for request in requests]
    asked = []
    for place, (request, found, warm) in enumerate(zip(requests, expected, hot, strict=True)):
        wrong = found.token_ids[:]
        wrong[len(wrong) // 2] = 2 + (wrong[len(wrong) // 2] - 1) % 28
        kept = (found.token_ids[:-1], found.token_ids[: len(found.token_ids) // 2], wrong[:-1], warm.token_ids[:-1])
        kept_request = msgspec.structs.replace(request, request_id=f"{name}-kept-{place}")
        asked.append(with_unverified_tokens(kept_request, kept[place % 4]))
    verified, before = Burst(engine, asked), await sampled_tokens(engine)
    async with anyio.create_task_group() as group:
        verified.start(group)
    sampled = await sampled_tokens(engine) - before
    assert sampled < 0.8 * sum(len(wanted.token_ids) for wanted in expected), "what holds is not decoded again"
    for request, wanted in zip(asked, expected, strict=True):
        found = verified.completions[request.request_id]
        assert_well_formed(found)
        assert found.token_ids == wanted.token_ids, request.request_id
        assert found.finish_reason is wanted.finish_reason
        assert found.behavior_logprobs.tolist() == pytest.approx(wanted.behavior_logprobs.tolist(), abs=1e-4)


async def sampled_tokens(engine: Engine) -> int:
    """Since the engine started. A host tells what it does after every order."""
    await engine.pause(PauseMode.KEEP, clear_cache=False)
    await engine.resume()
    await engine.checksums()
    return engine.load().generated_tokens


def hotter(request: Generate) -> Generate:
    """Other choices by the same noise, as other weights make them."""
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-hot", temperature=1.3)


async def test_a_used_up_limit_returns_at_once(engine: Engine, make_request: MakeRequest) -> None:
    request = make_request(request_id="used-up", token_ids=token_array([2, 3, 4]), max_tokens=2, prefix_length=2)
    assert remaining_tokens(request) == 0
    completion = await engine.generate(request)
    assert (len(completion.token_ids), completion.finish_reason) == (0, FinishReason.LENGTH)


async def test_commit_needs_a_pause(engine: Engine) -> None:
    with pytest.raises(WeightError, match="pause first"):
        await engine.commit(1)


async def test_cancelling_a_request_frees_its_id(engine: Engine, make_request: MakeRequest) -> None:
    request = make_request(request_id="cancelled", seed=7, max_tokens=480)
    async with anyio.create_task_group() as group:
        group.start_soon(engine.generate, request)
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    await until_running(engine)
    assert_well_formed(await engine.generate(request))


async def test_a_closed_engine_says_so() -> None:
    closed = simulated()
    await closed.start()
    await closed.aclose()
    with pytest.raises(EngineError, match="closed"):
        await closed.pause(PauseMode.KEEP, clear_cache=False)


@pytest.mark.parametrize("engine", [REAL], indirect=True)
@pytest.mark.parametrize("cuts", [{}, CUTS], ids=["all tokens", "some"])
async def test_joined_logprobs_are_those_of_one_forward_pass(
    engine: Engine, make_request: MakeRequest, tiny_model: Path, cuts: dict[str, object]
) -> None:
    """Cut, resumed by tokens, joined: every logprob equals the trainer's of the whole within 1e-4."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2ForCausalLM

    from streamrl.learning.objective.logprobs import UNCHANGED, token_logprobs

    name = f"score-{len(cuts)}"
    requests = [
        make_request(request_id=f"{name}-{i}", seed=i, max_tokens=300, temperature=float(i % 4 > 0), **cuts)
        for i in range(16)
    ]
    burst = Burst(engine, requests)
    async with anyio.create_task_group() as group:
        burst.start(group)
        await until_running(engine)
        await engine.pause(PauseMode.ABORT, clear_cache=True)
    await engine.resume()
    model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    resumed = 0
    for request in requests:
        joined = burst.completions[request.request_id]
        if joined.finish_reason is FinishReason.ABORT:
            resumed += len(joined.token_ids) > 0
            rest = resumed_request(request, joined, seed=500 + request.seed, request_id=f"{request.request_id}-again")
            joined = join_completions(joined, await engine.generate(rest))
        sequence = torch.tensor([*request.token_ids, *joined.token_ids])
        early = torch.arange(len(joined.token_ids)) < request.min_tokens
        settings = request if request.temperature else UNCHANGED
        with torch.no_grad():
            logits = model(sequence[None]).logits[0, len(request.token_ids) - 1 : -1]
            scored = token_logprobs(logits, sequence[len(request.token_ids) :], settings, excluded=(early, [1]))[0]
        assert (scored - torch.tensor(joined.behavior_logprobs.tolist())).abs().max() < 1e-4
        words = words_of(joined.token_ids[: request.min_tokens]), words_of(joined.token_ids[request.min_tokens :])
        stopped = joined.finish_reason is FinishReason.STOP and joined.token_ids[-1] != 1
        assert stopped is any(one in words[0][1 - len(one) :] + words[1] for one in request.stop)
    assert resumed > 0, "no completion was cut in the middle"


@pytest.mark.parametrize("engine", [REAL], indirect=True)
async def test_a_stop_string_is_found_across_a_cut(engine: Engine, make_request: MakeRequest) -> None:
    cut = make_request(token_ids=token_array([2, 3, 9]), prefix_length=1, max_tokens=400, stop=("w7w",), min_tokens=1)
    completion = await engine.generate(cut)
    assert (len(completion.token_ids), completion.finish_reason) == (1, FinishReason.STOP)


@pytest.mark.parametrize("engine", [REAL], indirect=True)
async def test_spans_tell_which_version_sampled_each_token(
    engine: Engine, make_request: MakeRequest, tiny_model: Path
) -> None:
    """Last in this module: it changes the weights."""
    before = await engine.generate(make_request(request_id="uncommitted"))
    assert {span.policy_version for span in before.version_spans} == {-1}
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        publisher, bits = open_publisher(tiny_model, f"ipc://{directory}/w")
        publisher.start()
        try:
            await commit(engine, publisher, await stage(engine, publisher, 0, bits))
            name = next(name for name in bits if name.endswith("q_proj.weight"))
            bits[name] = bits[name].copy()
            bits[name][::7] ^= 1
            staged = await stage(engine, publisher, 1, bits)
            burst = Burst(engine, [make_request(request_id=f"span-{i}", seed=i, max_tokens=400) for i in range(16)])
            async with anyio.create_task_group() as group:
                burst.start(group)
                await until_running(engine)
                await commit(engine, publisher, staged)
        finally:
            publisher.close()
    spans = [[span.policy_version for span in c.version_spans] for c in burst.completions.values()]
    assert [0, 1] in spans, f"no completion crossed the commit: {spans}"
    assert all(versions in ([0], [1], [0, 1]) for versions in spans)
    for completion in burst.completions.values():
        assert_well_formed(completion)
    with pytest.raises(WeightError):
        await engine.stage(WeightAnnouncement(policy_version=9, base_version=8, state_hash=1, sources=()))
    assert_well_formed(await engine.generate(make_request(request_id="after-refused-stage")))


def open_publisher(model: Path, endpoint: str) -> tuple[WeightPublisher, dict[str, np.ndarray]]:
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(model / "model.safetensors")
    shards = [
        ShardSpec(name=name, dtype="bfloat16", shape=tuple(tensor.shape), offset=0, count=tensor.numel())
        for name, tensor in tensors.items()
    ]
    bits = {name: tensor.flatten().view(torch.int16).numpy().view(np.uint16) for name, tensor in tensors.items()}
    return WeightPublisher(endpoint, run_id="contract", rank=0, shards=shards), bits


async def stage(
    engine: Engine, publisher: WeightPublisher, version: int, bits: dict[str, np.ndarray]
) -> WeightAnnouncement:
    published = publisher.publish(version, bits)
    announcement = WeightAnnouncement(
        policy_version=version,
        base_version=published.base_version,
        state_hash=published.state_hash,
        sources=(published.source,),
    )
    await engine.stage(announcement)
    return announcement


async def commit(engine: Engine, publisher: WeightPublisher, staged: WeightAnnouncement) -> None:
    await engine.pause(PauseMode.KEEP, clear_cache=False)
    committed = await engine.commit(staged.policy_version)
    assert committed.state_hash == staged.state_hash
    await engine.resume()
    publisher.acknowledge(staged.policy_version)
