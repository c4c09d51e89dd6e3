"""``streamrl memory``: a recipe on cards that this host does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.files import ROOT
from builders.pretrained import folder_of_shapes

from streamrl.cli.main import main

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
KINDS = {"all weights": (), "8-bit": ("training.optimizer=adamw_8bit",), "LoRA": ("lora.rank=16",)}
KINDS["LoRA, checkpointing"] = (*KINDS["LoRA"], "training.activation_checkpointing=true")
CARDS = (16, 24, 40, 80)
Fit = dict[str, Any]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Recipes of nothing but a model, prompts and a reward, with the public sizes of the models."""
    folder = tmp_path_factory.mktemp("recipes")
    found = {}
    for name in MODELS:
        config = json.loads((ROOT / "tests" / "examples" / "model_configs" / f"{name}.json").read_text())
        folder_of_shapes(folder / name, config)
        found[name] = folder / f"{name}.toml"
        found[name].write_text(
            f'[model]\npath = "{folder / name}"\n[prompts]\ntrain = "rows.jsonl"\n[[rewards]]\nfunction = "math"\n'
        )
    return found


def fits(recipe: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[Fit]:
    assert main(["memory", str(recipe), "--json", *options]) == 0
    cards: list[Fit] = json.loads(capsys.readouterr().out)["cards"]
    return cards


def cell(fit: Fit) -> str:
    return fit["mode"] if fit["problem"] else f"{fit['mode']}, {fit['state'] + fit['step'] + fit['unseen']:.1f}"


@pytest.mark.seconds(6)
def test_the_table_of_the_docs_is_what_it_prints(recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["| model | trains | state | 16 GB | 24 GB | 40 GB | 80 GB |", "|---|---|---|---|---|---|---|"]
    for name, path in recipes.items():
        for kind, overrides in KINDS.items():
            found = fits(path, capsys, *(f"--set={override}" for override in overrides))
            cells = " | ".join(cell(fit) for fit in found)
            lines.append(f"| {name} | {kind} | {found[-1]['state']:.1f} | {cells} |")
    table = "\n".join(lines)
    assert table in (ROOT / "docs" / "gpus_and_hosts.md").read_text(), table


@pytest.mark.seconds(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_placed_or_refused_with_a_remedy(
    name: str, recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With default keys, on an H100, an A100 of 40 GB, a 4090 and a T4: side by side, in turns, or one sentence."""
    for kind in ("all weights", "LoRA"):
        overrides = [f"--set={override}" for override in KINDS[kind]]
        found = fits(recipes[name], capsys, *overrides, "--cards", "80,40,24")
        found += fits(recipes[name], capsys, *overrides, "--cards", "15", "--older")
        for fit in found:
            memory = 0.96 * fit["card"]
            rank = fit["state"] + fit["step"] + fit["unseen"]
            if fit["mode"] == "refused":
                assert fit["problem"].count("memory: ") == 1 and fit["problem"].count(": ") == 2
                remedy = fit["problem"].rpartition(": ")[2].removeprefix("set ").partition(", or ")[0]
                if not remedy.startswith("use more"):
                    settings = [f"--set={setting.replace(' = ', '=')}" for setting in remedy.split(" with ")]
                    older = ["--older"] if fit["card"] == 15 else []
                    (again,) = fits(recipes[name], capsys, *overrides, *settings, "--cards", str(fit["card"]), *older)
                    assert again["problem"] == "", "the remedy is right"
            elif fit["mode"] == "in turns":
                assert rank + 2 <= memory and 0 < fit["engine"] + 1 <= memory
                assert rank + fit["engine"] > memory
            else:
                assert fit["mode"] == "side by side" and rank + fit["engine"] < memory


def test_wrong_cards_are_refused(recipes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", str(recipes["Qwen3-0.6B"]), "--cards", "0"]) == 2
    assert "--gpus 1 --cards 0: at least 1 each" in capsys.readouterr().err
