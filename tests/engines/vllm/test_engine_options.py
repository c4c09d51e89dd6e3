"""Options computed from the recipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.messages import PauseMode
from streamrl.engines.async_llm.options import unset_service_address
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.options import (
    CPU_BATCH_TOKENS,
    CPU_BLOCK_TOKENS,
    CPU_CACHE_BYTES,
    batched_tokens,
    cache_blocks,
    device_problems,
    engine_options,
    expected_room,
)
from streamrl.pretrained.model_facts import read_model_config
from streamrl.recipe.environment import Environment
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import Engines, EngineShape, Recipe, Run, Sampling

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 600,
}


class Calls:
    """What is called of vLLM, with its arguments."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **options: Any) -> None:
            self.made.append(" ".join(map(str, [name, *arguments, *options.values()])))

        return call


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def recipe(model: Path, *, max_tokens: int = 100, **engines: object) -> Recipe:
    return small_recipe(str(model), sampling=Sampling(max_tokens=max_tokens), engines=Engines(**engines))


def test_context_is_capped_by_the_model(model_directory: Path) -> None:
    assert engine_options(recipe(model_directory), 0, "/s", device="cpu").max_model_len == 600
    assert engine_options(recipe(model_directory, max_model_len=200), 0, "/s", device="cpu").max_model_len == 200


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"max_model_len": 601}, "engines.max_model_len"), ({"max_tokens": 600}, "sampling.max_tokens")],
)
def test_a_context_that_cannot_be_is_refused(model_directory: Path, fields: dict[str, int], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        engine_options(recipe(model_directory, **fields), 0, "/s", device="cpu")


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128},  # GPT-2
        {"d_model": 64, "n_layers": 2, "n_heads": 2, "max_seq_len": 128},  # DBRX
        {"text_config": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_sequence_length": 128}},
    ],
)
def test_sizes_are_read_by_the_other_names_that_models_give_them(sizes: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    options = engine_options(recipe(tmp_path, max_num_seqs=1), 0, "/s", device="cpu")
    assert (options.max_model_len, options.cache_blocks) == (128, 1 * 9 // 8 + 1)
    facts = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    assert facts.items() <= read_model_config(tmp_path).items()
    with pytest.raises(RecipeError, match="the model's 128 positions"):
        engine_options(recipe(tmp_path, max_model_len=129), 0, "/s", device="cpu")


def test_missing_model_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.path: .*absent has no config\.json"):
        engine_options(recipe(tmp_path / "absent"), 0, "/s", device="cpu")


def test_device_decides_dtype_and_blocks(model_directory: Path) -> None:
    on_cpu = engine_options(recipe(model_directory, count=2, max_num_seqs=8, max_model_len=256), 1, "/s", device="cpu")
    assert (on_cpu.name, on_cpu.dtype, on_cpu.cache_blocks) == ("engine-1", "float32", 19)
    on_cuda = engine_options(recipe(model_directory, count=2, max_num_seqs=8), 1, "/s", device="cuda")
    assert (on_cuda.dtype, on_cuda.cache_blocks, on_cuda.prefix_caching) == ("bfloat16", 0, True)
    repeated = small_recipe(str(model_directory), run=Run(deterministic=True))
    assert not engine_options(repeated, 0, "/s", device="cpu").prefix_caching, "bits must not depend on what is cached"
    talks = replace(recipe(model_directory, max_num_seqs=8, max_model_len=256), environment=Environment(env="g.py:G"))
    ordered, repeated = (engine_options(replace(talks, run=Run(deterministic=d)), 0, "/s") for d in (False, True))
    assert ordered.by_priority and not repeated.by_priority and not on_cpu.by_priority
    assert ordered.cache_blocks * ordered.block_tokens > 2 * 8 * 256, "room for as many again between two turns"
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_cuda.variables


@pytest.mark.parametrize(("chunk", "block"), [(None, 128), (8192, 128), (64, 64)])
def test_a_block_is_in_one_chunk_of_attention(chunk: int | None, block: int, model_directory: Path) -> None:
    """vLLM's core dies of the first request where blocks are larger than chunks (Llama 4)."""
    (model_directory / "config.json").write_text(json.dumps(CONFIG | {"text_config": {"attention_chunk_size": chunk}}))
    assert engine_options(recipe(model_directory), 0, "/s", device="cpu").block_tokens == block


def test_hybrids_and_composites_are_served_as_they_can_be(tmp_path: Path) -> None:
    """Towers are not loaded; prefixes of a hybrid are not cached on a CPU, whose engines prefill without chunks; the
    states of its recurrent layers take blocks, and only attention takes KV."""
    text = {**CONFIG, "num_hidden_layers": 4, "max_position_embeddings": 256}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    hybrid = {"text_config": text | {"layer_types": kinds}, "vision_config": {"depth": 6}}
    for name, config in (("plain", text), ("hybrid", hybrid)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    cpu, cuda = (
        engine_options(recipe(tmp_path / "hybrid", max_num_seqs=8), 0, "/s", device=d) for d in ("cpu", "cuda")
    )
    plain = engine_options(recipe(tmp_path / "plain", max_num_seqs=8), 0, "/s", device="cpu")
    assert (cpu.text_only, cpu.prefix_caching) == (True, False)
    assert (cuda.text_only, cuda.prefix_caching) == (True, True)
    assert (plain.text_only, plain.prefix_caching) == (False, True)
    assert (plain.cache_blocks, cpu.cache_blocks) == (8 * 2 * 9 // 8 + 1, 8 * 5 * 9 // 8 + 1)


def test_cores_bind_only_the_engine_they_are_given_to(model_directory: Path) -> None:
    bound = recipe(model_directory, count=3, cores=("0-1,4", ""))
    environments = [engine_options(bound, index, "/run/s", device="cpu").variables for index in range(3)]
    assert [e.get("OMP_PLACES") for e in environments] == ["{0},{1},{4}", None, None]
    assert environments[0]["OMP_NUM_THREADS"] == "3"
    assert int(environments[1]["OMP_NUM_THREADS"]) >= 1
    assert environments[0]["VLLM_RPC_BASE_PATH"] == "/run/s"


def test_the_cache_is_between_one_request_and_a_gibibyte() -> None:
    """The cache never exceeds its gibibyte, nor falls below one request."""
    large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32}
    block_bytes = 2 * 32 * 4096 * 4 * CPU_BLOCK_TOKENS
    assert cache_blocks(large, "float32", 512, 256) == CPU_CACHE_BYTES // block_bytes
    assert cache_blocks(large, "float32", 8192, 256) == 8192 // CPU_BLOCK_TOKENS + 1
    assert cache_blocks(large, "float32", 8192, 256, block_tokens=32) == 8192 // 32 + 1


@pytest.mark.parametrize(("windowed", "full", "groups"), [(3, 1, 3), (10, 2, 5), (2, 2, 1), (0, 4, 0), (4, 0, 0)])
def test_windows_beside_full_attention_take_blocks(windowed: int, full: int, groups: int, tmp_path: Path) -> None:
    """vLLM refuses to start where one request of full length does not fit: OLMo 3 and Gemma 3 have three and five
    layers with a window for one without."""
    kinds = ["sliding_attention"] * windowed + ["full_attention"] * full
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": windowed + full}
    blocks = 256 // CPU_BLOCK_TOKENS
    a_request = blocks + groups * (blocks + 1)
    config = sizes | {"layer_types": kinds, "max_position_embeddings": 256}
    assert cache_blocks(config, "float32", 256, 4) == 4 * a_request * 9 // 8 + 1
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    assert engine_options(recipe(tmp_path, kv_tokens=64), 0, "/s", device="cpu").cache_blocks == a_request + 1
    for device in ("cpu", "cuda"):
        options = engine_options(recipe(tmp_path, kv_tokens=2560), 0, "/s", device=device)
        assert 2560 <= options.cache_tokens < 2560 + options.block_tokens, "as many tokens in any number of groups"
    if groups:
        assert options.cache_tokens < options.cache_blocks * options.block_tokens / (1 + groups)


def test_workers_share_the_heads_and_each_has_cores_of_its_own(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    deep = EngineShape(count=1, tensor_parallel_size=2, cores=("0-3",), args={"pipeline_parallel_size": 2})
    both = recipe(model_directory, count=2, tensor_parallel_size=2, max_num_seqs=8, sets=(deep,))
    options = [engine_options(both, index, "/s", device="cpu") for index in range(3)]
    assert [one.name for one in options] == ["engine-0", "engine-1", "engine-2"]
    assert [one.workers for one in options] == [2, 2, 4] and [one.max_num_seqs for one in options] == [8, 8, 16]
    bound = [one.variables["VLLM_CPU_OMP_THREADS_BIND"] for one in options]
    assert bound == ["0|1", "2|3", "0|1|2|3"], "half of the cores are for training"
    assert not any("OMP_NUM_THREADS" in one.variables for one in options), "vLLM sets it for each worker"
    with pytest.raises(IndexError, match="engine-3"):
        engine_options(both, 3, "/s", device="cpu")


def test_engines_of_a_cuda_set_sleep_with_their_share(model_directory: Path) -> None:
    """Engines of a set on CUDA sleep, and take the share of memory that they were given."""
    both = recipe(model_directory, count=4, sets=(EngineShape(count=2, tensor_parallel_size=2),), kv_tokens=1000)
    options = [engine_options(both, index, "/s", device="cuda", gpu_memory_utilization=0.2) for index in range(6)]
    assert options[0].sleeps and (options[0].cache_blocks, options[0].block_tokens) == (64, 16)
    assert options[4].cache_blocks == 0, "of the second set vLLM decides"
    assert list(device_problems(both, CONFIG, device="cuda")) == []
    alone = engine_options(recipe(model_directory, count=2), 0, "/s", device="cuda")
    assert (options[0].gpu_memory_utilization, alone.gpu_memory_utilization, alone.sleeps) == (0.2, 0.85, False)


@pytest.mark.parametrize(
    ("keeps", "sleep"),
    [(False, ["sleep 1", "wake_up ['weights']"]), (True, ["pause_generation abort True", "release_kv_cache_memory"])],
)
async def test_an_engine_sleeps_with_or_without_its_weights(
    model_directory: Path, keeps: bool, sleep: list[str]
) -> None:
    """An engine that keeps its weights frees its KV cache alone, which vLLM allows in a pause without requests. Nothing
    runs before the cache has its memory again."""
    engine = RunEngine(replace(engine_options(recipe(model_directory), 0, "/s", device="cuda"), keeps_weights=keeps))
    engine._llm = calls = Calls()
    await engine.sleep()
    await engine.wake()
    await engine.pause(PauseMode.KEEP, clear_cache=True)
    assert engine._paused
    await engine.resume()
    assert calls.made == [*sleep, "wake_up ['kv_cache']"] and not engine._paused


@pytest.mark.parametrize(("asked", "gib", "given"), [(0, 80, 16_384), (0, 24, 0), (0, 0, 0), (4_096, 80, 4_096)])
def test_tokens_of_a_step_follow_the_card(model_directory: Path, asked: int, gib: int, given: int) -> None:
    """The tokens of a step follow the card unless the recipe gives them."""
    made = recipe(model_directory, max_num_batched_tokens=asked)
    memory = gib * 2**30 * 995 // 1000  # a card of 80 GB shows a little less
    assert batched_tokens(engine_options(made, 0, "/s", device="cuda"), memory) == given
    assert batched_tokens(engine_options(made, 0, "/s", device="cpu"), 0) == (asked or CPU_BATCH_TOKENS)


def test_fewer_tokens_of_a_step_than_requests_are_refused(model_directory: Path) -> None:
    problems = dict(broken_rules(recipe(model_directory, max_num_batched_tokens=100)))
    assert problems["engines.max_num_batched_tokens"] == (
        "100 is less than engines.max_num_seqs = 256, a token for each: raise it, or set 0 (by GPU)"
    )


def test_a_set_that_cannot_run_is_named_with_a_remedy(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that the machine cannot run is named with a remedy."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    made = recipe(
        model_directory,
        sets=(EngineShape(count=2, tensor_parallel_size=2), EngineShape(count=1, tensor_parallel_size=3)),
    )
    cores, heads = device_problems(made, CONFIG, device="cpu")
    named, _, problem = cores.partition(": ")
    assert named == "engines.advanced.sets.0"
    assert problem == "2 engines of 2 workers need 4 cores, and this machine has 3: lower count or tensor_parallel_size"
    named, _, problem = heads.partition(": ")
    assert named == "engines.advanced.sets.1.tensor_parallel_size"
    assert problem == "the model has 2 attention heads, which 3 workers cannot share: set one of 1, 2"


def test_the_room_of_an_unstarted_set_is_known_or_estimated(model_directory: Path) -> None:
    """The room of a set that was never started is known or estimated."""
    made = recipe(model_directory, count=2, max_num_seqs=8, max_model_len=256, sets=(EngineShape(count=1),))
    assert expected_room(made, 5_000, device="cpu") == {"2x1": 5_000, "1x1": 8 * 2 * 2 * 9 // 8 * CPU_BLOCK_TOKENS}
    deep = recipe(model_directory, count=2, sets=(EngineShape(count=1, tensor_parallel_size=2),))
    assert expected_room(deep, 5_000, device="cuda") == {"2x1": 5_000, "1x2": 10_000}, "no weights to be read here"
    assert expected_room(recipe(model_directory), 5_000) == {"1x1": 5_000}


def test_the_address_of_a_service_is_no_port_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets VLLM_PORT in every pod beside a service named vllm; vLLM raises an error for an address there."""
    for value in ("tcp://10.0.0.1:8000", "5000", ""):
        monkeypatch.setenv("VLLM_PORT", value)
        unset_service_address()
        assert os.environ.get("VLLM_PORT") == (None if "tcp" in value else value)


@pytest.mark.parametrize(
    ("dtype", "device", "engine", "refused"),
    [
        ("auto", "cpu", "bfloat16", False),
        ("bfloat16", "cpu", "bfloat16", False),
        ("float32", "cpu", "float32", True),
        ("float32", "cuda", "float32", False),
    ],
)
def test_gated_delta_net_is_bfloat16_on_a_cpu(
    model_directory: Path, dtype: str, device: str, engine: str, refused: bool
) -> None:
    """Of a composite, whose text part has the layers: what the recipe leaves open is bfloat16, and another dtype is
    refused before vLLM fails."""
    text = {"linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
    (model_directory / "config.json").write_text(json.dumps(CONFIG | {"text_config": text}))
    made = recipe(model_directory, dtype=dtype)
    config = read_model_config(model_directory)
    assert engine_options(made, 0, "/s", device=device).dtype == engine
    problems = list(device_problems(made, config, device=device))
    assert [problem.partition(":")[0] for problem in problems] == (["engines.dtype"] if refused else [])
