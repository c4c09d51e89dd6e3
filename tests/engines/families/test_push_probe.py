"""Pushes into vLLM's models of families that need more than copies, against fresh loads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from builders.recipe import small_recipe

pytest.importorskip("vllm")
pytest.importorskip("torch")
from forks.call import call_in_process

from streamrl.engines.vllm.options import EngineOptions, engine_options
from streamrl.learning.families.family import read_families
from streamrl.recipe.sections import Engines, Lora, LoraSync, Sampling
from streamrl.weights.pull.replica import TensorSpec, TensorSpecs

pytestmark = [pytest.mark.torch, pytest.mark.vllm]


@pytest.mark.parametrize("family", ["granite4", "deepseek_v3", "qwen3_5"])
def test_pushes_equal_fresh_loads(family: str, tmp_path: Path, socket_directory: Path) -> None:
    """After 20 pushes every parameter and buffer is that of a fresh load, also in an engine that started later: a
    parameter computed from A_log, matrices derived from kv_b_proj, and a text part with float32 tensors beside
    towers."""
    assert call_in_process(pushed, family, tmp_path / family, socket_directory) == ""


def test_the_dry_run_has_a_plan_for_gated_delta_net(tmp_path: Path, socket_directory: Path) -> None:
    """vLLM makes a norm of these layers on a device by its name, where all other parameters have no values."""
    assert call_in_process(planned, "qwen3_5", tmp_path / "qwen3_5", socket_directory) == ""


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("kimi_linear", "No module named 'cutlass'"),
        ("mistral4", "No model architectures are specified"),
        ("minimax", "Layer 0 (linear_attention) does not dispatch through the Transformers attention interface"),
    ],
)
def test_a_model_that_vllm_cannot_make_is_refused(
    family: str, reason: str, tmp_path: Path, socket_directory: Path
) -> None:
    """The dry run said of these that it had not found out."""
    answer = call_in_process(planned, family, tmp_path / "model", socket_directory)
    assert answer.startswith(f"vLLM cannot serve {tmp_path}/model, of type {family!r}, on this machine: {reason}")


def test_keys_that_are_values_have_their_adapter_twice(tmp_path: Path, socket_directory: Path) -> None:
    """Gemma 4 has no projection of values in layers of full attention: in those of a window an adapter of keys has one
    place, in the others two."""
    assert call_in_process(places_of_keys, "gemma4", tmp_path / "gemma4", socket_directory) == "1, 2, 1, 2, 1, 2"


def places_of_keys(family: str, directory: str, sockets: str) -> str:
    from streamrl.engines.vllm import load_plan_probe
    from streamrl.learning.state.unmerged import adapter_shapes

    options, tensors = tiny_model(family, directory, sockets)
    options = msgspec.structs.replace(options, adapter=Lora(rank=4, sync=LoraSync.ADAPTER, targets=("k_proj",)))
    shapes = adapter_shapes(options.adapter, options.model_path)
    plans = []
    record = load_plan_probe.record_adapter_plan
    load_plan_probe.record_adapter_plan = lambda model, specs: plans.append(record(model, specs))
    adapter = {name: TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()}
    load_plan_probe.probe_engine(options, tensors, adapter)
    return ", ".join(str(len(routes)) for name, routes in sorted(plans[0].routes.items()) if ".lora_A." in name)


def planned(family: str, directory: str, sockets: str) -> str:
    from streamrl.base.errors import ModelRefused
    from streamrl.engines.vllm.load_plan_probe import probe_engine

    try:
        probe_engine(*tiny_model(family, directory, sockets), {})
    except ModelRefused as refusal:
        return str(refusal)
    return ""


def pushed(family: str, directory: str, sockets: str) -> str:
    from streamrl.engines.families.push_probe import push_problem

    return push_problem(tiny_model(family, directory, sockets)[0])


def tiny_model(family: str, directory: str, sockets: str) -> tuple[EngineOptions, TensorSpecs]:
    """Write a tiny checkpoint. Returns the options of its engine, and the tensors that a run publishes."""
    from streamrl.engines.vllm.load_plan_probe import published_tensors
    from streamrl.learning.families.tiny_checkpoint import write_tiny_checkpoint

    table = read_families()[family]
    write_tiny_checkpoint(table, Path(directory))
    recipe = small_recipe(
        directory,
        engines=Engines(dtype=table.engine_dtype, max_model_len=256, max_num_seqs=4),
        sampling=Sampling(max_tokens=64),
    )
    return engine_options(recipe, 0, sockets, device="cpu"), published_tensors(directory)
