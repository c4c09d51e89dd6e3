"""Names of the Hub, which of a repository's files they mean, and what a recipe makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.foreign_inputs.layouts import LAYOUTS
from streamrl.base.errors import RecipeError
from streamrl.prepare.hub.model_files import model_files
from streamrl.recipe.remote_names import HubName, cached_name, read_hub_name
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.run.prompts.data_files import choose_converted, choose_files, compact

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


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_of_a_split_as_datasets_finds_them(name: str) -> None:
    names, splits = LAYOUTS[name]
    for split, files in splits.items():
        assert sorted(choose_files(names, {}, split=split).names) == sorted(files)
    for split in {"train", "validation", "test", "nothing"} - set(splits):
        with pytest.raises(RecipeError, match=f'has no split "{split}"|several configurations'):
            choose_files(names, {}, split=split)


@pytest.mark.parametrize(
    ("names", "config", "split", "files"),
    [
        (PARQUET, "main", "train", PARQUET[:2]),
        (PARQUET, "", "test", PARQUET[2:]),
        (["train.jsonl", "test.jsonl", "README.md"], "", "train", ["train.jsonl"]),
        (["a/train.parquet", "b/train.parquet"], "b", "", ["b/train.parquet"]),
        (["a/train.parquet", "b/train.parquet"], "", "b/train", ["b/train.parquet"]),
        (["easy.jsonl", "hard.jsonl"], "", "hard", ["hard.jsonl"]),
        (["sums_dev.jsonl"], "", "sums_dev", ["sums_dev.jsonl"]),
        (["README.md", "main.py"], "", "", ()),
    ],
)
def test_files_of_a_configuration(names: list[str], config: str, split: str, files: list[str]) -> None:
    assert list(choose_files(names, {}, config, split).names) == list(files)


def test_what_the_recipe_must_choose_is_listed() -> None:
    for names, text in {
        ("easy.jsonl", "hard.jsonl"): "has several splits: set split=NAME, with one of train, easy, hard",
        ("train.jsonl", "val.jsonl"): "has several splits: set split=NAME, with one of train, validation",
        ("a/x.jsonl", "b/x.jsonl"): r"has several configurations: set \?config=NAME, with one of a, b",
        ("train-00001-of-00003.jsonl",): r"has 1 of the 3 files train-\*-of-00003: download it again",
    }.items():
        with pytest.raises(RecipeError, match=text):
            choose_files(names, {})


def test_the_copy_of_the_hub_has_configurations_and_splits() -> None:
    names = ["main/partial-train/0000.parquet", "main/partial-train/0001.parquet", "main/test/0000.parquet"]
    assert choose_converted(names, "", "train").names == names[:2]
    assert choose_converted(names, "main", "test").names == names[2:]
    assert choose_converted(["all.csv"], "", "train").names == ()


def test_files_of_a_split_by_what_the_readme_declares() -> None:
    names = [*PARQUET, "extra/deep/x.parquet", "rows/a.jsonl", "rows/b.jsonl"]
    card = {
        "configs": [
            {"config_name": "main", "data_files": [{"split": "train", "path": "main/train-[0-9]*"}]},
            {"config_name": "extra", "data_files": "extra/**/*.parquet", "default": True},
            {"config_name": "rows", "data_dir": "rows", "data_files": ["a.*", "b.*"]},
            {"config_name": "whole", "data_dir": "main"},
            {"config_name": "table", "data_files": {"test": "main/te*"}},
        ]
    }

    def files(config: str, split: str) -> list[str]:
        return list(choose_files(names, card, config, split).names)

    assert files("main", "") == PARQUET[:2]
    assert files("", "train") == ["extra/deep/x.parquet"]
    assert files("whole", "test") == files("table", "") == PARQUET[2:]
    assert files("rows", "") == ["rows/a.jsonl", "rows/b.jsonl"]
    assert compact(PARQUET[:2], names) == "main/train-*-of-00002.parquet"
    assert compact(["rows/a.jsonl"], names) == "rows/a.jsonl"
    with pytest.raises(RecipeError, match=r'no configuration "x": set .config=NAME, with one of main, extra'):
        files("x", "")
    with pytest.raises(
        RecipeError, match="several splits in its configuration whole: set split=NAME, with one of train, test"
    ):
        files("whole", "")
