"""Names of the Hub, which of a repository's files they mean, and what a recipe makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.base.errors import RecipeError
from streamrl.prepare.hub.data_files import (
    chosen_split,
    compact,
    declared_splits,
    matching,
    model_files,
    splits_by_name,
)
from streamrl.recipe.remote_names import HubName, cached_name, read_hub_name
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe

SHA = "0123456789abcdef0123456789abcdef01234567"
PARQUET = [f"main/train-0000{n}-of-00002.parquet" for n in range(2)] + ["main/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("hf:gpt2", HubName("gpt2")),
        ("hf:a/b@refs/pr/3", HubName("a/b", "refs/pr/3")),
        (f"a_1/b.c@{SHA}", HubName("a_1/b.c", SHA)),
        *(
            (bad, None)
            for bad in ("hf:a/b/c", "hf:", "hf:a/b@", "hf:-a/b", "hf:a/b.", "hf:a--b/c", "hf:a/b..c", "hf:a b")
        ),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    if name is None:
        with pytest.raises(RecipeError, match='is no name of the Hub: write "hf:owner/name"'):
            read_hub_name(text)
    else:
        assert read_hub_name(text) == name


def test_a_folder_of_the_cache_says_what_it_holds() -> None:
    assert cached_name(f"/c/hub/models--a--b/snapshots/{SHA}") == HubName("a/b", SHA)
    assert cached_name(f"/c/hub/datasets--gsm8k/snapshots/{SHA}") == HubName("gsm8k", SHA, dataset=True)
    assert cached_name(f"/c/hub/models--a--b/snapshots/{SHA[:8]}") is None and cached_name("/models/a") is None


def test_a_folder_that_is_there_wins_over_a_name(tmp_path: Path) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    recipe = tmp_path / "recipe.toml"
    judge = '[judge]\nmodel = "a/b@v2"\n[[rewards]]\nfunction = "judge"\noptions = { prompt = "{completion}" }\n'
    data = '[prompts]\ntrain = "hf:openai/gsm8k?config=main&split=train&prompt=question"\n'
    scored = '[[rewards]]\nfunction = "reward_model"\noptions = { path = "a/scorer" }\n'
    recipe.write_text(f'[model]\npath = "here/model"\n{data}{judge}{scored}')
    read = load_recipe(recipe)
    assert read.model.path == str(tmp_path / "here" / "model") and read.judge.model == "hf:a/b@v2"
    assert read.rewards[1].options["path"] == "hf:a/scorer"
    assert read.prompts.train == "hf:openai/gsm8k?config=main&split=train&prompt=question"
    assert load_recipe(recipe, ["model.path=not/here"]).model.path == "hf:not/here"
    assert load_recipe(recipe, ["model.path=./not/here"]).model.path == str(tmp_path / "not" / "here")
    recipe.write_text(dump_recipe(read))
    assert load_recipe(recipe) == read, "what is recorded is read as it was"


def test_files_of_a_model() -> None:
    kept = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    kept += ["chat_template.jinja", "merges.txt", "tokenizer.model", "README.md", "additional_chat_templates/a.jinja"]
    left = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "onnx/model.onnx", "onnx/config.json"]
    left += [
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "modeling.py",
        ".gitattributes",
        "a/b.safetensors",
    ]
    assert model_files([*left, *kept]) == kept
    assert model_files(["consolidated.safetensors"]) == ["consolidated.safetensors"]


@pytest.mark.parametrize(
    ("names", "config", "split", "found"),
    [
        (PARQUET, "main", "train", PARQUET[:2]),
        (PARQUET, "", "test", PARQUET[2:]),
        (["data/train-00000-of-00001-abc.parquet", "data/test.parquet"], "", "test", ["data/test.parquet"]),
        (["train.jsonl", "test.jsonl", "README.md"], "", "train", ["train.jsonl"]),
        (["main/partial-train/0000.parquet", "main/partial-train/0001.parquet"], "main", "train", None),
        (["a/train.parquet", "b/train.parquet"], "b", "", ["b/train.parquet"]),
        (["a.csv"], "", "", []),
    ],
)
def test_files_of_a_split_by_their_names(names: list[str], config: str, split: str, found: list[str] | None) -> None:
    splits = splits_by_name(names)
    assert (matching(chosen_split(splits, "default", config, split), names) if splits else []) == (
        names if found is None else found
    )


def test_files_of_a_split_by_what_the_readme_declares() -> None:
    names = [*PARQUET, "extra/deep/x.parquet", "rows/a.jsonl", "rows/b.jsonl"]
    card = {
        "configs": [
            {"config_name": "main", "data_files": [{"split": "train", "path": "main/train-*"}]},
            {"config_name": "extra", "data_files": "extra/**/*.parquet", "default": True},
            {"config_name": "rows", "data_dir": "rows", "data_files": ["a.*", "b.*"]},
            {"config_name": "whole", "data_dir": "main"},
        ]
    }
    splits, default = declared_splits(card, names)
    assert (list(splits), default) == (["main", "extra", "rows", "whole"], "extra")
    assert matching(chosen_split(splits, default, "main", ""), names) == PARQUET[:2]
    assert matching(chosen_split(splits, default, "", "train"), names) == ["extra/deep/x.parquet"]
    assert matching(chosen_split(splits, default, "whole", "test"), names) == PARQUET[2:]
    assert matching(chosen_split(splits, default, "rows", ""), names) == [], "two JSONL files are not read as one"
    assert compact(PARQUET[:2], names) == "main/train-*-of-00002.parquet"
    assert compact(["rows/a.jsonl"], names) == "rows/a.jsonl"
    with pytest.raises(RecipeError, match=r'no configuration "x": set .config=NAME, with one of main, extra'):
        chosen_split(splits, default, "x", "")
    with pytest.raises(
        RecipeError, match="several splits in its configuration whole: set split=NAME, with one of test, train"
    ):
        chosen_split(splits, default, "whole", "")
