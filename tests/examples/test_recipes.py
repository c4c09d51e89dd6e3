"""examples/recipes: each fits the GPUs of its name with the shapes of its real model, its prompts and rewards work on
rows of the data set's form, and a small model of each architecture trains three steps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.files import EXAMPLES
from builders.pretrained import folder_of_shapes, tokenizer_json

from streamrl.cli.try_rewards import trial_completions
from streamrl.cli.try_rewards.trial_scoring import score_groups
from streamrl.engines.vllm.visible_gpus import Gpu
from streamrl.prepare import gpu_placement
from streamrl.prepare.called_rewards import trajectory_of
from streamrl.prepare.preflight import check_model
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.learning_rate import learning_rate_notice
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.run.prompts.open_prompts import open_prompts
from streamrl.run.prompts.prompt_spec import prompt_sources

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

RECIPES = sorted((EXAMPLES / "recipes").glob("*.toml"))
CONFIGS = Path(__file__).parent / "model_configs"
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
}
GIB_OF_A_GPU = {24: 22.5, 80: 79.0}
"""What the smallest card that is sold by this name shows: an L4 or A10G, an A100 or H100."""
ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "3 boxes of 4 pens: how many pens?", "answer": "3 * 4 = <<3*4=12>>12\n#### 12"},
    "nlile/hendrycks-MATH-benchmark": {
        "problem": r"What is $\frac{1}{2} + 11.5$?", "solution": r"It is $\boxed{12}$.", "answer": "12",
        "subject": "Algebra", "level": 1, "unique_id": "x",
    },
    "agentica-org/DeepScaleR-Preview-Dataset": {"problem": "What is 6 + 6?", "answer": "12", "solution": "12."},
    "HuggingFaceH4/aime_2024": {"id": 1, "problem": "What is 6 + 6?", "solution": "", "answer": "012", "url": ""},
    "google-research-datasets/mbpp": {
        "task_id": 1, "text": "Write a function to add one.", "code": "", "test_setup_code": "",
        "test_list": ["assert one_more(3) == 4", "assert one_more(-1) == 0"], "challenge_test_list": [],
    },
}  # fmt: skip
STAND_IN = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 104, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>"


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder of the model of ``config``: headers with its real shapes and a file of holes, and a tokenizer."""
    write_tokens(folder_of_shapes(folder, config))
    return folder


def write_tokens(folder: Path) -> None:
    special = ["<unk>", "<eos>", "<user>", "<assistant>"]
    tokens = tokenizer_json(special, map(chr, [10, *range(32, 127)]))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "unk_token": "<unk>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: model_folder(root / name, json.loads((CONFIGS / f"{name}.json").read_text())) for name in PARAMETERS}


def here(path: Path, folder: Path, model: Path) -> Recipe:
    """The recipe with files of this machine in place of names of the Hub."""
    return load_recipe(path, [f"{key}={toml_value(value)}" for key, value in local(path, folder, model).items()])


def local(path: Path, folder: Path, model: Path) -> dict[str, str]:
    text, found = path.read_text(), {"model.path": str(model), "run.directory": str(folder / "runs")}
    for key, pattern in (("prompts.train", "train"), ("evaluation.prompts", "prompts")):
        source = re.search(rf'^{pattern} = "(.*)"$', text, re.MULTILINE)
        assert source, f"{path.name} has no {key}"
        name, _, options = source[1].removeprefix("hf:").partition("?")
        if source[1].startswith("hf:"):
            file = folder / f"{name.replace('/', '--')}.jsonl"
            file.write_text(json.dumps(ROWS[name]) + "\n")
            kept = [option for option in options.split("&") if option.partition("=")[0] not in ("config", "split")]
            found[key] = f"{file}?{'&'.join(kept)}"
    return found


def model_of(path: Path, models: dict[str, Path]) -> Path:
    return models[load_recipe(path).model.path.rpartition("/")[2]]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_fits_its_gpus_and_its_rate_is_usual(
    path: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(path, models)
    recipe = here(path, tmp_path, model)
    count, size = map(int, re.findall(r"(\d+)x(\d+)gb$", path.stem)[0])
    memory = int(GIB_OF_A_GPU[size] * (1 << 30))
    monkeypatch.setattr(gpu_placement, "visible_gpus", lambda: tuple(Gpu(str(n), memory) for n in range(count)))
    facts = check_model(recipe).facts
    assert facts.parameters == PARAMETERS[model.name]
    placement = gpu_placement.gpu_placement(recipe)
    assert placement.problems == []
    assert all(placement.used(gpu) < 0.97 * gpu.memory and placement.on(gpu) for gpu in placement.gpus), (
        placement.lines()
    )
    assert learning_rate_notice(recipe.training.learning_rate, facts.parameters, adapters=recipe.lora.rank > 0) is None


@pytest.mark.long
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
async def test_its_prompts_and_rewards_work(path: Path, models: dict[str, Path], tmp_path: Path) -> None:
    recipe = here(path, tmp_path, model_of(path, models))
    tokenizer = load_tokenizer(recipe.model.path)
    source = open_prompts(prompt_sources(recipe)["prompts.train"], tokenizer, seed=0, shuffle=False)
    (prompt,) = await source.draw(1)
    await source.aclose()
    text = tokenizer.decode(prompt.token_ids, skip_special=False)
    assert text.startswith("<user>") and text.endswith("<assistant>") and len(text) > 60
    program = "```python\ndef one_more(n):\n    return n + 1\n```"
    expected = str(prompt.columns.get("answer", "")) if "countdown" in path.stem else "12"
    right = program if "code" in path.stem else f"So <answer>{expected}</answer> it is \\boxed{{{expected}}}"
    answers = {right: 1.0, "I do not know \\boxed{7} <answer>7</answer> ```python\n1\n```": 0.0}
    trajectories = tuple(
        trajectory_of(prompt, tokenizer.encode(answer), sample=number) for number, answer in enumerate(answers)
    )
    group = trial_completions.CompletedGroup(prompt, trajectories)
    ((good, bad),), _ = await score_groups(recipe.rewards, recipe.reward_limits, [group], tokenizer)
    assert (good.reward, bad.reward < 0.1) == (1.0, True), (good, bad)  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("stem", ["qwen3-0.6b-gsm8k-1x24gb", "llama-3.2-1b-gsm8k-1x24gb", "qwen3-4b-math-1x80gb"])
def test_a_small_model_of_its_architecture_trains_three_steps(stem: str, tmp_path: Path) -> None:
    (path,) = (one for one in RECIPES if one.stem == stem)
    real = json.loads((CONFIGS / f"{load_recipe(path).model.path.rpartition('/')[2]}.json").read_text())
    config = transformers.AutoConfig.for_model(**(real | STAND_IN))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    write_tokens(tmp_path / "model")
    (tmp_path / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    settings = local(path, tmp_path, tmp_path / "model") | {
        "run.steps": 3,
        "engines.kind": "simulated",
        "rewards.0.function": f"{tmp_path / 'reward.py'}:reward",
        "rewards.0.options": {},
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 48,
        "training.advanced.threads": 1,
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={toml_value(value)}")]
    command = [sys.executable, "-m", "streamrl", "train", str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["optim/grad_norm"] > 0 and step["weights/payload_bytes"] > 0 for step in steps)
