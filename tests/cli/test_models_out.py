"""``streamrl export`` and ``push`` of runs with simulated engines and real training of a small model."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from builders.files import SORT, json_lines
from builders.hub import TOKEN, LocalHub

from streamrl.cli.main import main
from streamrl.cli.trained_models.model_card import model_card
from streamrl.cli.trained_models.saved_model import saved_model
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.toml_text import toml_value

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

REWARD = "def reward(completion, *, prompt):\n    return float(sum(map(ord, completion)) % 2)\n"
BASE_CARD = "---\nlicense: other\nlicense_name: sorting\nlanguage: en\ntags: [mine]\n---\n# the base\n"
SETTINGS: dict[str, Any] = {
    "engines.kind": "simulated",
    "run.steps": 2,
    "rollout.prompts_per_batch": 4,
    "rollout.group_size": 4,
    "sampling.max_tokens": 32,
    "sampling.top_p": 0.9,
    "evaluation.prompts": "held.jsonl",
    "evaluation.samples": 2,
    "checkpoint.every": 1,
    "training.advanced.threads": 1,
}


def train(directory: Path, **settings: Any) -> Path:
    """The run of a model whose folder has a card, a licence, templates, and files that are nobody's business."""
    model = directory / "model"
    shutil.copytree(SORT / "model", model)
    (model / "README.md").write_text(BASE_CARD)
    (model / "LICENSE").write_text("free\n")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (model / "prompts.jsonl").write_text("a secret prompt\n")
    (directory / "reward.py").write_text(REWARD)
    rows = (SORT / "held_out.jsonl").read_text().splitlines(keepends=True)
    (directory / "held.jsonl").write_text("".join(rows[:3]))
    chosen = SETTINGS | {"model.path": str(model), "rewards.0.function": f"{directory / 'reward.py'}:reward"}
    chosen |= {"evaluation.prompts": str(directory / "held.jsonl"), "run.directory": str(directory / "runs")} | settings
    flags = [f"{key}={toml_value(value)}" for key, value in chosen.items()]
    command = [sys.executable, "-m", "streamrl", "train", str(SORT / "recipe.toml"), *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert (summary["state"], summary["step"]) == ("finished", 2) and "eval/held_out/avg@2" in summary["scores"]
    return Path(summary["directory"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights trained."""
    return train(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters trained."""
    return train(tmp_path_factory.mktemp("lora"), **{"lora.rank": 4, "checkpoint.every": 2})


def tensors(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def masters(checkpoint: Path) -> dict[str, Any]:
    """What the optimizer holds, in float32: what is published are these values in bfloat16."""
    return {n.removeprefix("master."): t for n, t in tensors(checkpoint / "trainer").items() if n.startswith("master.")}


@pytest.mark.long
def test_an_export_equals_the_published_weights(run: Path, tmp_path: Path) -> None:
    """An export holds the weights that were published, and transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    out = tmp_path / "new" / "model"
    assert main(["export", str(run), str(out)]) == 0
    published = {name: master.to(torch.bfloat16) for name, master in masters(run / "checkpoints/step-000002").items()}
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    loaded = dict(model.named_parameters())
    assert set(loaded) == set(published)
    assert all(torch.equal(loaded[name].data, value) for name, value in published.items())
    before = tensors(SORT / "model")
    assert any(not torch.equal(before[name], value) for name, value in published.items()), "something was trained"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12:"}], tokenize=False) == "12:"
    generation = GenerationConfig.from_pretrained(out)
    assert (generation.do_sample, generation.temperature, generation.top_p, generation.top_k) == (True, 1.0, 0.9, 0)
    assert generation.eos_token_id == 2 and generation.max_new_tokens is None
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names == {
        "LICENSE",
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.long
def test_adapters_are_merged_and_weights_are_split(adapted: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = tmp_path / "model"
    assert main(["export", str(adapted), str(out), "--shard-size", "100KB"]) == 0
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2 and (out / "model.safetensors.index.json").is_file()
    base, adapter = tensors(SORT / "model"), load_file(adapted / "checkpoints/latest/adapter/adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    changed = 0
    for name, parameter in model.named_parameters():
        pair = [adapter.get(f"base_model.model.{name.removesuffix('weight')}lora_{one}.weight") for one in "AB"]
        merged = base[name]
        if pair[0] is not None and pair[1] is not None:
            merged = torch.addmm(base[name].float(), pair[1], pair[0], alpha=16 / 4).to(torch.bfloat16)
        changed += not torch.equal(merged, base[name])
        assert torch.equal(parameter.data, merged), name
    assert changed
    assert "LoRA of rank 4, merged into" in (out / "README.md").read_text()


@pytest.mark.long
def test_the_card_describes_training_and_not_the_machine(run: Path, tmp_path: Path) -> None:
    """The model card says how the model was trained, and nothing about the machine."""
    from huggingface_hub import ModelCard

    assert main(["export", str(run), str(tmp_path / "m"), "--version", "1"]) == 0
    text = (tmp_path / "m" / "README.md").read_text()
    data = ModelCard(text).data
    assert (data.license, data.license_name, data.language, data.library_name) == (
        "other",
        "sorting",
        "en",
        "transformers",
    )
    assert data.tags == ["streamrl", "reinforcement-learning", "grpo"] and data.base_model is None
    assert data.eval_results is None, "version 1 was not evaluated"
    assert (
        "| optimizer steps | 1 of 2 |" in text and "| rewards | reward |" in text and "| versions | streamrl " in text
    )
    assert str(run.parent.parent) not in text and "secret" not in text
    assert main(["export", str(run), str(tmp_path / "best"), "--version", "best"]) == 0
    card = ModelCard.load(tmp_path / "best" / "README.md")
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    lines = json_lines(run / "metrics.jsonl")
    (last,) = [line for line in lines if line["kind"] == "evaluation" and line["step"] == 2]
    assert scores == {name: last[f"eval/held_out/{name}"] for name in ("avg@2", "pass@1", "pass@2")}
    assert {result.dataset_type for result in card.data.eval_results} == {"held.jsonl"}


@pytest.mark.long
def test_eval_of_a_run_is_the_evaluation_that_the_run_had(run: Path, tmp_path: Path, capfd: Any) -> None:
    """The same completions of the same prompts, scored by the same reward."""
    assert main(["eval", f"{run}@2", "--out", str(tmp_path / "out.jsonl"), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    ours = json_lines(tmp_path / "out.jsonl")[:6]
    theirs = json_lines(run / "evaluations/step-000002.jsonl")
    assert sorted(ours, key=lambda line: (line["number"], line["sample"])) == theirs
    listed = json_lines(run / "metrics.jsonl")
    (last,) = [line for line in listed if line["kind"] == "evaluation" and line["step"] == 2]
    scores = {
        f"eval/held_out/{name}": score["value"] for name, score in report["passes"][0]["scores"]["held_out"].items()
    }
    assert {name: last[name] for name in scores} == pytest.approx(scores) and report["version"] == 2


@pytest.mark.long
@pytest.mark.vllm
def test_vllm_serves_an_export_as_transformers_does(run: Path, tmp_path: Path) -> None:
    """vLLM serves an export, and its greedy completions equal those of transformers."""
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run), str(tmp_path / "m")]) == 0
    chosen = ("--samples", "8", "engines.kind=vllm", "engines.max_num_seqs=16", "--out", str(tmp_path / "out.jsonl"))
    command = [sys.executable, "-m", "streamrl", "eval", str(tmp_path / "m"), str(run), *chosen, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    sampled, greedy = json.loads(done.stdout)["passes"]
    lines = json_lines(tmp_path / "out.jsonl")
    solved = [sum(line["reward"] == 1 for line in lines[:24] if line["number"] == n) for n in range(3)]
    by_hand = {k: fmean(1 - comb(8 - c, k) / comb(8, k) for c in solved) for k in (1, 2, 4, 8)}
    assert {k: sampled["scores"]["held_out"][f"pass@{k}"]["value"] for k in by_hand} == pytest.approx(by_hand)
    assert 0 < sum(solved) < 24 and greedy["temperature"] == 0.0 and len(lines) == 24 + 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").float()
    for line in lines[24:]:
        prompt = torch.tensor([line["prompt_token_ids"]])
        made = model.generate(prompt, max_new_tokens=32, do_sample=False)
        assert made[0].tolist() == line["prompt_token_ids"] + line["token_ids"]


def damage(run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")


def fill(run: Path) -> None:
    (run.parent / "m").mkdir()
    (run.parent / "m" / "mine").write_text("")


@pytest.mark.long
@pytest.mark.parametrize(
    ("prepare", "options", "problem"),
    [
        (None, ("--version", "7"), "has no checkpoint of version '7' (a number, latest, best): it has versions 1, 2"),
        (None, ("--shard-size", "much"), "--shard-size much: "),
        (fill, (), "m is not empty: name a directory that is not there yet"),
        (damage, (), "hf is damaged: model.safetensors differs; take another version of the run"),
        (damage, ("--shard-size", "1MB"), "hf is damaged: model.safetensors differs"),
        (lambda run: (run / "recipe.toml").unlink(), (), "is not the directory of a run"),
    ],
)
def test_nothing_is_left_of_an_export_that_fails(
    run: Path,
    tmp_path: Path,
    capsys: Any,
    prepare: Callable[[Path], None] | None,
    options: tuple[str, ...],
    problem: str,
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    if prepare is not None:
        prepare(copy)
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(copy), str(tmp_path / "m"), *options]) == (1 if prepare is damage else 2)
    assert problem in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.long
def test_a_full_disk_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    assert main(["export", str(run), str(tmp_path / "m")]) == 1
    assert "are free in" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_base_without_a_card_draws_no_warning(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    saved = saved_model(tmp_path / "run")
    (saved.folder / "README.md").write_text("# A model\n")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("huggingface_hub").addHandler(handler)
    try:
        card = model_card(saved, load_recipe(run / "recipe.toml"))
    finally:
        logging.getLogger("huggingface_hub").removeHandler(handler)
    assert not records and "library_name: transformers" in card


# ---- the Hub -------------------------------------------------------------------------------------


@pytest.fixture
def push(run: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """``streamrl push`` of the run, as a process of its own: a client reads its variables once."""
    with LocalHub() as hub:

        def command(name: str, *options: str, token: str = TOKEN, **variables: str) -> tuple[int, str, str]:
            arguments = [sys.executable, "-m", "streamrl", "push", str(run), name, *options]
            environment = os.environ | hub.environment(tmp_path / "home", token) | variables
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert token == "" or token not in done.stdout + done.stderr
            return done.returncode, done.stdout, done.stderr

        command.hub = hub  # type: ignore[attr-defined]
        yield command


@pytest.mark.long
def test_a_push_is_the_export_in_a_private_repository(push: Any, run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "m")]) == 0
    exported = {
        path.relative_to(tmp_path / "m").as_posix(): path.read_bytes() for path in (tmp_path / "m").rglob("*.*")
    }
    push.hub.commit("tester/mine", {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"kept"}, private=True)
    code, out, err = push("mine", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert (answer["version"], answer["url"]) == (2, f"{push.hub.url}/tester/mine") and answer["commit"]
    files = push.hub.files("tester/mine")
    assert {name: files.get(name) for name in exported} == exported
    assert set(files) == {*exported, "LICENSE", "notes.txt"}, "weights of before are gone, prompts never came"
    assert push("org/new")[0] == 0 and push.hub.repositories["org/new"].private
    assert push("org/open", "--public")[0] == 0 and not push.hub.repositories["org/open"].private
    code, _, err = push("org/open")
    assert code == 2 and "org/open is public: push to another name, or say that it may be: --public" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "token", "fault", "variables", "problem"),
    [
        ("mine", "", None, {}, "nobody is logged in to the Hub: `hf auth login`"),
        ("mine", "hf_wrong", None, {}, "the Hub does not know the token: `hf auth login`"),
        ("new", TOKEN, ("/api/repos/create", 403), {}, "the account may not write to tester/new"),
        ("mine", TOKEN, ("/api/models/tester/mine/preupload", 403), {}, "the account may not write to tester/mine"),
        ("mine", TOKEN, ("/api/whoami", 503), {}, "the Hub refuses mine: "),
        ("mine", TOKEN, ("/api/whoami", "hang"), {}, "the Hub cannot be reached at http://127.0.0.1:"),
        ("mine", TOKEN, None, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub cannot be reached at http://127.0.0.1:9"),
        ("mine", TOKEN, None, {"HF_HUB_OFFLINE": "1"}, "look at the network, HF_ENDPOINT and HF_HUB_OFFLINE"),
        ("a/b/c", TOKEN, None, {}, "'a/b/c' is no name on the Hub: write owner/name"),
    ],
)
def test_a_push_that_fails_says_why_in_one_sentence(
    push: Any, name: str, token: str, fault: tuple[str, int | str] | None, variables: dict[str, str], problem: str
) -> None:
    push.hub.faults.update([fault] if fault else [])
    began = time.monotonic()
    code, out, err = push(name, token=token, **variables)
    assert (code, out) == (2 if name == "a/b/c" else 1, "") and problem in err.splitlines()[-1]
    assert time.monotonic() - began < 60
