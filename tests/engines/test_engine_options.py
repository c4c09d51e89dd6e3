"""Options computed from the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.recipe import Engines, Model, Prompts, Recipe, Reward, Sampling
from streamrl.engines.engine_options import CPU_BLOCK_TOKENS, CPU_CACHE_BYTES, cache_blocks, engine_options
from streamrl.errors import RecipeError

CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": 600,
}


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def recipe(model: Path, *, max_tokens: int = 100, **engines: object) -> Recipe:
    return Recipe(
        model=Model(path=str(model)),
        prompts=Prompts(train="prompts.jsonl"),
        rewards=(Reward(function="rewards:exact"),),
        sampling=Sampling(max_tokens=max_tokens),
        engines=Engines(**engines),
    )


def test_context_is_capped_by_the_model(model_directory: Path) -> None:
    assert engine_options(recipe(model_directory), 0, "/s", device="cpu").max_context == 600
    assert engine_options(recipe(model_directory, max_context=200), 0, "/s", device="cpu").max_context == 200


@pytest.mark.parametrize(
    ("fields", "named"), [({"max_context": 601}, "engines.max_context"), ({"max_tokens": 600}, "sampling.max_tokens")]
)
def test_a_context_that_cannot_be_is_refused(model_directory: Path, fields: dict[str, int], named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        engine_options(recipe(model_directory, **fields), 0, "/s", device="cpu")


def test_missing_model_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.path: cannot read .*config\.json"):
        engine_options(recipe(tmp_path / "absent"), 0, "/s", device="cpu")


def test_device_decides_dtype_and_blocks(model_directory: Path) -> None:
    on_cpu = engine_options(recipe(model_directory, max_running=8, max_context=256), 1, "/s", device="cpu")
    assert (on_cpu.name, on_cpu.dtype, on_cpu.cache_blocks) == ("engine-1", "float32", 19)
    on_cuda = engine_options(recipe(model_directory, max_running=8), 1, "/s", device="cuda")
    assert (on_cuda.dtype, on_cuda.cache_blocks) == ("bfloat16", 0)
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_cuda.environment


def test_cores_bind_only_the_engine_they_are_given_to(model_directory: Path) -> None:
    bound = recipe(model_directory, count=3, cores=("0-1,4", ""))
    environments = [engine_options(bound, index, "/run/s", device="cpu").environment for index in range(3)]
    assert [e.get("OMP_PLACES") for e in environments] == ["{0},{1},{4}", None, None]
    assert environments[0]["OMP_NUM_THREADS"] == "3"
    assert int(environments[1]["OMP_NUM_THREADS"]) >= 1
    assert environments[0]["VLLM_RPC_BASE_PATH"] == "/run/s"


def test_cache_never_exceeds_its_gibibyte_nor_falls_below_one_request() -> None:
    large = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32}
    block_bytes = 2 * 32 * 4096 * 4 * CPU_BLOCK_TOKENS
    assert cache_blocks(large, "float32", 512, 256) == CPU_CACHE_BYTES // block_bytes
    assert cache_blocks(large, "float32", 8192, 256) == 8192 // CPU_BLOCK_TOKENS + 1
