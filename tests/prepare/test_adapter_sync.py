"""Adapters are served as adapters where vLLM can, and merged elsewhere with the reason and what it costs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

from streamrl.base.errors import RecipeError
from streamrl.cli.dry_run import dry_run
from streamrl.launch.pipeline import Pipeline
from streamrl.prepare import recipe_probe
from streamrl.prepare.adapter_sync import arrived_share, with_adapter_sync
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import LoraSync, Recipe

pytestmark = pytest.mark.torch
DEMO = Path(__file__).parents[2] / "examples" / "sort"


def of_demo(*overrides: str) -> Recipe:
    return load_recipe(DEMO / "recipe.toml", ["lora.rank=8", *overrides])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (['engines.kind="simulated"'], "simulated engines have no model"),
        (["lora.advanced.dora=true"], "lora.advanced.dora: is not served by vLLM beside the base"),
        (["lora.rank=600"], "lora.rank: 600 is more than the 512 of vLLM"),
        (['engines.args.quantization="fp8"', "off_policy.correct_mismatch=true"], "engines.args.quantization:"),
    ],
)
def test_what_cannot_be_served_is_merged_with_a_reason(overrides: list[str], reason: str) -> None:
    recipe, text = with_adapter_sync(of_demo("training.learning_rate=1e-5", *overrides))
    assert recipe.lora.sync is LoraSync.MERGED
    assert reason in text and "engines have about 44% of a change after 30 steps" in text


def test_adapters_beside_experts_are_merged_on_a_cpu(tmp_path: Path) -> None:
    """vLLM's build for CPUs has no kernel for them: an engine would die at its first request."""
    shutil.copytree(DEMO / "model", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config.write_text(json.dumps(json.loads(config.read_text()) | experts))
    model = f"model.path={tmp_path}/model"
    recipe, text = with_adapter_sync(of_demo(model))
    assert recipe.lora.sync is LoraSync.MERGED
    assert "vLLM on a CPU serves no adapters of a model with experts" in text
    with pytest.raises(RecipeError, match=r'serves no adapters .*lora.sync = "merged"'):
        with_adapter_sync(of_demo(model, "lora.sync=adapter"))


def test_the_share_is_between_what_was_measured() -> None:
    shares = [arrived_share(rate) for rate in (0.0, 1e-7, 1e-6, 3e-6, 1e-5, 5e-5, 1e-3)]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.05, 0.97)
    assert with_adapter_sync(of_demo("lora.sync=merged")) == (of_demo("lora.sync=merged"), "")


@pytest.mark.vllm
@pytest.mark.long
def test_a_dry_run_asks_vllm_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What vLLM said of the adapters, on which the recipe leaves the choice to it, is not asked again."""
    asked: list[str] = []
    run_child = recipe_probe._run_child

    def note(kind: str, argument: str, timeout_s: float) -> Any:
        asked.append(kind)
        return run_child(kind, argument, timeout_s)

    monkeypatch.setattr(recipe_probe, "_run_child", note)
    assert dry_run(of_demo(), ()) == 0
    assert [kind for kind in asked if kind in ("model", "prompt")] == ["model", "prompt"]
    printed = capsys.readouterr().out
    assert 'for lora.sync = "auto": works' in printed and "all checks passed" in printed
    assert "transformers makes other tokens" not in printed


@pytest.mark.vllm
@pytest.mark.long
def test_vllm_itself_is_asked_what_it_serves(tmp_path: Path) -> None:
    """A head of its own is no module that vLLM adapts: a run that demands it ends with the sentence of the dry run."""
    shutil.copytree(DEMO / "model", tmp_path / "model")
    file, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    tensors = load_file(file)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, file, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    model = f"model.path={tmp_path}/model"
    recipe, text = with_adapter_sync(of_demo(model))
    assert (recipe.lora.sync, text) == (LoraSync.ADAPTER, "")
    with_head = 'lora.targets=["q_proj", "lm_head"]'
    recipe, text = with_adapter_sync(of_demo(model, with_head))
    assert recipe.lora.sync is LoraSync.MERGED and "computes no adapter on 'lm_head'" in text
    with pytest.raises(RecipeError, match="computes no adapter on 'lm_head'"):
        with_adapter_sync(of_demo(model, with_head, "lora.sync=adapter"))
    demanding = of_demo(model, with_head, "lora.sync=adapter", f"run.directory={tmp_path}/runs")

    async def start() -> None:
        async with Pipeline(demanding):
            pytest.fail("the run began")

    with pytest.raises(RecipeError, match="computes no adapter on 'lm_head'"):
        anyio.run(start)
    assert not (tmp_path / "runs").exists()
