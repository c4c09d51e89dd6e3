"""Real engines on tiny random models: every runtime parameter is bit-equal to what was published, at every version.

The expected checksums are computed here, from the checkpoint tensors, without the code under test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.distance import Mover
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.publish.server import ServedPart

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("transformers")
from forks.call import call_in_process  # noqa: E402

from tests.weights.all_architectures import EMPTY, faults_of, push_many  # noqa: E402
from tests.weights.real_engines import (  # noqa: E402
    ARCHITECTURES,
    CONSTANT,
    LAYERS,
    Bits,
    Push,
    Shapes,
    changed,
    engine_variables,
    publisher_of,
    running_engine,
    runtime_checksums,
    sample,
    save_bits,
    tensors_of,
    write_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]


def expected_checksums(bits: Bits, shapes: Shapes, runtime: str) -> dict[str, str]:
    return runtime_checksums(tensors_of(bits, shapes), runtime)


async def checksums_of(push: Push) -> dict[str, str]:
    """vLLM's checksums, by runtime name."""
    return {name.rpartition(":")[2]: digest for name, digest in (await push.checksums()).items()}


@pytest.mark.long
def test_pushes_into_a_running_engine(tmp_path: Path, socket_directory: Path) -> None:
    """Tied Qwen2 in float32: deltas with requests in flight, then everything that must be refused, and an anchor; a
    second engine, which loads the old checkpoint, takes all deltas since as one."""
    call_in_process(push_into_two_engines, tmp_path, variables=engine_variables(socket_directory))


async def push_into_two_engines(folder: str) -> None:
    tmp_path, directory = Path(folder), Path(folder) / "model"
    bits, shapes = write_model(directory, ARCHITECTURES["qwen2-tied-biases"])
    with publisher_of(shapes, tmp_path, checkpoint=directory, chain_bytes=1 << 30) as publisher:
        async with running_engine(directory, "float32") as llm, asyncio.TaskGroup() as tasks:
            push = Push(llm, publisher)
            bits = await push_while_sampling(push, tasks, bits, shapes)
            bits = await refuse_what_does_not_fit(push, bits, shapes)
        async with running_engine(directory, "float32") as restarted:
            push = Push(restarted, publisher)
            bits = changed(bits, 9)
            await push.commit(push.publish(9, bits))
            assert await checksums_of(push) == expected_checksums(bits, shapes, "float32")


async def push_while_sampling(push: Push, tasks: asyncio.TaskGroup, bits: Bits, shapes: Shapes) -> Bits:
    loaded = await checksums_of(push)
    assert EMPTY not in loaded.values(), "a parameter is empty: the engine packed its weights"
    assert loaded == expected_checksums(bits, shapes, "float32")
    requests = [tasks.create_task(sample(push.llm, 400, seed)) for seed in range(8)]
    for version in range(5):
        bits = changed(bits, version) if version else changed(bits, 99, density=0.5)
        announcement = push.publish(version, bits)
        assert announcement.base_version == version - 1, "the first is a delta on the checkpoint"
        done = await push.commit(announcement)
        assert push.sent_as_announced(announcement)
        assert done.state_hash == announcement.state_hash
        assert await checksums_of(push) == expected_checksums(bits, shapes, "float32")
    assert not any(request.done() for request in requests), "requests ended before the last push: sample longer"
    for request in requests:
        completion = await request
        assert len(completion.token_ids) == 400
        assert [span.version for span in completion.weight_versions][-1] == "4"
        assert len(completion.weight_versions) >= 3
    return bits


async def refuse_what_does_not_fit(push: Push, bits: Bits, shapes: Shapes) -> Bits:
    from streamrl.weights import commit

    before = await checksums_of(push)
    with pytest.raises(WeightError, match="version 5 cannot be committed: staged is None"):
        await commit(push.llm, 5)

    skipped = push.publish(5, changed(bits, 5))
    wrong_base = WeightAnnouncement(
        policy_version=5, base_version=3, state_hash=skipped.state_hash, sources=skipped.sources
    )
    with pytest.raises(WeightError, match="announced was"):
        await push.commit(wrong_base)

    bits = changed(bits, 6)
    announcement = push.publish(6, bits)
    corrupt_last_chunk(push.publisher)
    with pytest.raises(WeightError, match="came 3 times with digest"):
        await push.commit(announcement)
    assert await checksums_of(push) == before

    before_seven = bits
    too_early = push.publish(7, changed(bits, 7))
    # It holds 4: it takes the delta to 5 too.
    await push.commit(announcement)
    assert not push.sent_as_announced(announcement)
    assert await checksums_of(push) == expected_checksums(bits, shapes, "float32")
    await push.commit(too_early)
    assert push.sent_as_announced(too_early)
    bits = changed(before_seven, 7)
    assert await checksums_of(push) == expected_checksums(bits, shapes, "float32")

    # Something else wrote to the live weights: the next delta must notice, and an anchor repairs it.
    await push.llm.collective_rpc("reset_weights")
    bits = changed(bits, 8)
    announcement = push.publish(8, bits)
    with pytest.raises(WeightError, match="differ before the commit"):
        await push.commit(announcement)
    await push.commit(push.publish_anchor(8))
    assert await checksums_of(push) == expected_checksums(bits, shapes, "float32")
    return bits


def corrupt_last_chunk(publisher: WeightPublisher) -> None:
    *others, part = publisher._chain
    flipped = bytearray(part.chunks[-1])
    flipped[-1] ^= 1
    chunks = [*part.chunks[:-1], memoryview(flipped)]
    publisher._server.serve([*others, ServedPart(part.policy_version, part.manifest_digest, part.manifest, chunks)])


@pytest.mark.long
@pytest.mark.parametrize("mover", [Mover.ENCODED, Mover.HOST])
def test_packed_and_quantised_layers(tmp_path: Path, socket_directory: Path, mover: Mover) -> None:
    """By each mover. Query and key norms, untied heads, a bfloat16 engine, packed kernels beside the parameters: what
    is computed with is only seen in the output. One kind of layer is quantised while it is loaded, and rebuilt: it
    equals that of an engine that loads the result. ``all_architectures.py`` has the other kinds of model."""
    variables = engine_variables(socket_directory, linear="packed")
    call_in_process(push_into_packed_layers, tmp_path, mover, variables=variables)


async def push_into_packed_layers(folder: str, mover: str) -> None:
    tmp_path, directory = Path(folder), Path(folder) / "model"
    quantised = {"quantization": "online", "quantization_config": {"targets": {"*down_proj": "fp8_per_channel"}}}
    bits, shapes = write_model(directory, ARCHITECTURES["qwen3"])
    outputs = []
    with publisher_of(shapes, tmp_path, checkpoint=directory, movers=(Mover(mover),)) as publisher:
        async with running_engine(directory, "bfloat16", **quantised) as llm:
            push = Push(llm, publisher)
            for version, density in enumerate((0.9, 0.9, 0.02)):
                bits = changed(bits, version, density)
                announcement = push.publish(version, bits)
                assert (await push.commit(announcement)).state_hash == announcement.state_hash
                assert push.sent_as_announced(announcement) and push.mover == mover
                checksums = await checksums_of(push)
                assert EMPTY not in checksums.values()
                expected = expected_checksums(bits, shapes, "bfloat16")
                assert {name for name in expected if checksums[name] != expected[name]} == {
                    f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(LAYERS)
                }, "plain parameters hold what was published, and others are quantised"
                await llm.reset_prefix_cache()
                outputs.append(list((await sample(llm, 40)).token_ids))
            assert outputs[0] != outputs[1], "the change is too small to be seen in the output"
    save_bits(directory, bits, shapes)
    async with running_engine(directory, "bfloat16", **quantised) as fresh:
        assert await checksums_of(Push(fresh, publisher)) == checksums
        assert list((await sample(fresh, 40)).token_ids) == outputs[-1]


@pytest.mark.long
def test_experts_on_two_workers_after_many_deltas(tmp_path: Path, socket_directory: Path) -> None:
    """Experts that vLLM packs after loading, cut between two tensor-parallel workers, against an engine that loads the
    result afresh. ``all_architectures.py`` does this for every kind of model."""
    call_in_process(push_into_experts, tmp_path, variables=engine_variables(socket_directory, workers=2))


async def push_into_experts(folder: str) -> None:
    compared = await push_many(Path(folder), ARCHITECTURES["qwen2-moe"], dtype="bfloat16", workers=2, deltas=30)
    assert not faults_of(*compared)
    assert len({name.partition(":tp")[2][:1] for name in compared[0]}) == 2, "the checksums are of one worker"


@pytest.mark.long
@pytest.mark.parametrize("family", ["glm4-moe-expert-bias", "minimax-m2-expert-bias"])
def test_a_constant_of_experts_stays_as_it_was_loaded(family: str, tmp_path: Path, socket_directory: Path) -> None:
    """Five pushes leave the expert bias, which is not trained, as the file has it; all else equals a fresh engine."""
    call_in_process(push_beside_a_constant, tmp_path, family, variables=engine_variables(socket_directory))


async def push_beside_a_constant(folder: str, family: str) -> None:
    # vLLM's router on a CPU computes this kind of scores with groups of experts only: nothing is sampled of MiniMax.
    more = {"seed": 0} if family.startswith("minimax") else None
    compared = await push_many(Path(folder), ARCHITECTURES[family], dtype="float32", workers=1, deltas=5, more=more)
    assert not faults_of(*compared)
    assert any(CONSTANT in name for name in compared[0]), "the checksums are of the constant, too"
