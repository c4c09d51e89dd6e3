"""``streamrl.trl`` with the real objects of TRL and peft, and ``streamrl init --from`` a script, which is run."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError
from streamrl.cli.dialects.conversions import ForeignSettings
from streamrl.cli.dialects.translation import NEEDLESS, TRANSLATED, Translation, outcome_of, translated
from streamrl.cli.dialects.trl_objects import foreign_of_trainer
from streamrl.cli.dialects.trl_trainers import GRPOTrainer
from streamrl.cli.main import main
from streamrl.recipe.dialects.foreign_keys import defaults_of, find
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.toml_text import parse_toml
from streamrl.recipe.user_code import load_user_object

trl = pytest.importorskip("trl")
trl_rewards = pytest.importorskip("trl.rewards")
peft = pytest.importorskip("peft")
ROWS = [{"prompt": f"{number}", "answer": str(number)} for number in range(32)]
CPU = {"use_cpu": True, "bf16": False}


def short(completions: list[str], scale: float = 1.0, **columns: Any) -> list[float]:
    return [-scale * len(text) for text in completions]


def made(folder: Path, method: str = "GRPO", **objects: Any) -> Translation:
    """The translation of a trainer with ``objects``."""

    def write(name: str, ending: str, content: bytes) -> str:
        (folder / f"{name}{ending}").write_bytes(content)
        return str(folder / f"{name}{ending}")

    common = {"model": "org/tiny", "reward_funcs": short, "train_dataset": ROWS}
    return translated(foreign_of_trainer(method, "grpo.py", common | objects, write))


def values(translation: Translation) -> Mapping[str, Any]:
    """Values by the keys of the recipe."""
    return {path: value for setting in translation.settings for path, value in setting.sets.items()}


# ---- the table beside the installed TRL ----------------------------------------------------------


@pytest.mark.parametrize("method", ["GRPO", "RLOO"])
def test_the_defaults_of_the_table_are_trls_own(method: str) -> None:
    """Every field of TRL has a row. A default that would change the recipe is in the table, with TRL's value."""
    kind = getattr(trl, f"{method}Config")
    config = kind(output_dir="o", **CPU)
    known = defaults_of("TRL", method)
    settings = ForeignSettings()
    settings |= {field.name: getattr(config, field.name) for field in dataclasses.fields(kind)}
    settings |= {"num_processes": 1, "trainer": method.lower()}
    plain = load_recipe({"model": "m", "prompts": "t.jsonl", "rewards": "a:b"})
    memory_and_places = {"activation_checkpointing", "gpu_memory_utilization", "directory", "project", "device"}
    for field in dataclasses.fields(kind):
        row = find("TRL", field.name)
        assert row is not None, field.name
        if field.name in known:
            assert known[field.name] == field.default, field.name
        value = getattr(config, field.name)
        if value is None or value in ([], ""):
            continue
        value = getattr(value, "value", value)
        setting = outcome_of("TRL", field.name, value, settings)
        assert setting.outcome in (TRANSLATED, NEEDLESS), (field.name, setting)
        for path, chosen in setting.sets.items():
            section, _, key = path.partition(".")
            ours = getattr(getattr(plain, section), key)
            assert key in memory_and_places or field.name in known or ours in (chosen, None) or key in (
                "prompts_per_batch", "epochs_per_batch", "loss_normalization",
            ), (field.name, chosen, ours)  # fmt: skip


# ---- objects -------------------------------------------------------------------------------------


def test_the_objects_of_a_script_make_its_recipe(tmp_path: Path) -> None:
    args = trl.GRPOConfig(
        "out", **CPU, learning_rate=1e-5, per_device_train_batch_size=8, gradient_accumulation_steps=4, beta=0.04,
        loss_type="dr_grpo", scale_rewards=False, max_steps=200, warmup_steps=20, seed=7, report_to="wandb",
        lr_scheduler_type="cosine", max_completion_length=256, use_vllm=True, steps_per_generation=8,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules=["q_proj"])
    translation = made(tmp_path, args=args, peft_config=lora, reward_funcs=[short, functools.partial(short, scale=0.5)])
    assert translation.refused() == []
    expected = {
        "rollout.prompts_per_batch": 8, "training.updates_per_batch": 2, "run.steps": 100, "training.warmup_steps": 10,
        "checkpoint.every": 250, "lora.rank": 16, "lora.alpha": 8, "objective.loss_normalization": "constant",
        "objective.advantages": "group_mean", "objective.kl_coefficient": 0.04, "run.seed": 7,
        "off_policy.mask": "sequence", "metrics.report_to": ["wandb"], "training.schedule": "cosine",
    }  # fmt: skip
    found = values(translation)
    assert {path: found[path] for path in expected} == expected
    recipe = load_recipe(parse_toml(translation.recipe))
    assert [reward.label for reward in recipe.rewards] == ["short", "short_1"]
    assert [json.loads(line) for line in Path(recipe.prompts.train).read_text().splitlines()] == ROWS
    scaled: Any = load_user_object(recipe.rewards[1].function)
    assert scaled(completions=["four"]) == [-2.0]


def test_rloo_has_its_own_defaults(tmp_path: Path) -> None:
    translation = made(tmp_path, "RLOO", args=trl.RLOOConfig("out", **CPU))
    recipe = load_recipe(parse_toml(translation.recipe))
    assert (recipe.objective.algorithm, recipe.rollout.group_size) == ("rloo", 2)
    assert recipe.objective.kl_coefficient == 0.05  # in the reward, as the method has it
    several = made(tmp_path, "RLOO", args=trl.RLOOConfig("out", **CPU, num_iterations=2))
    assert any("clips the ratio of a whole sequence" in line for line in several.refused())


@dataclasses.dataclass
class OwnConfig(trl.GRPOConfig):  # type: ignore[name-defined, misc]
    """As open-r1 has one: its fields are the script's own."""

    system_prompt: str | None = None


class Near:
    """A reward that is an object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.scale for _ in completions]

    def half(self, completions: list[str], **columns: Any) -> list[float]:
        return [self.scale / 2 for _ in completions]


def factory(scale: float, pattern: re.Pattern[str]) -> Any:
    table = {"scale": scale}

    def nested(completions: list[str], **columns: Any) -> list[float]:
        return [table["scale"] * len(pattern.findall(text)) for text in completions]

    return nested


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (Near(0.5), 0.5),
        (Near(0.5).half, 0.25),
        (factory(0.5, re.compile("a")), 1.0),
        (functools.partial(short, scale=0.25), -0.5),
        (trl_rewards.get_soft_overlong_punishment(100, 20), 0.0),
    ],
)
def test_a_reward_is_written_as_it_is(reward: Any, value: float, tmp_path: Path) -> None:
    translation = made(tmp_path, reward_funcs=reward, args=OwnConfig("o", **CPU, system_prompt="p"))
    recipe = load_recipe(parse_toml(translation.recipe))
    loaded: Any = load_user_object(recipe.rewards[0].function)
    assert loaded(completions=["aa"], completion_ids=[[1, 2]]) == [value]
    assert "system_prompt" not in translation.recipe


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"reward_funcs": lambda completions, **columns: [0.0]}, "source of .*<lambda> is not known: write it as a"),
        ({"reward_funcs": factory(1.0, open(__file__))}, "nested uses pattern .TextIOWrapper., which cannot be"),  # type: ignore[arg-type] # noqa: SIM115
        ({"reward_funcs": Near}, "reward_funcs has .*Near.*: give functions, or objects that can be called"),
        ({"train_dataset": iter(ROWS)}, "train_dataset is a list_iterator, which another process cannot read"),
        ({"train_dataset": [{"text": "1"}]}, 'train_dataset: row 0 has no column "prompt": it has text'),
        ({"train_dataset": [{"prompt": object()}]}, "train_dataset: row 0 cannot be written as JSON"),
        ({"peft_config": peft.LoraConfig()}, "peft_config.target_modules is not set, and peft chooses them by"),
        ({"peft_config": peft.PrefixTuningConfig()}, "peft_config is a PrefixTuningConfig: adapters are of low rank"),
        ({"args": trl.SFTConfig("o", **CPU)}, "args is a SFTConfig, and GRPOTrainer takes a GRPOConfig"),
        ({"model": object()}, "model is a object that was not loaded: give its directory, or its name"),
    ],
)
def test_an_object_that_cannot_travel_is_refused(objects: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=sentence):
        made(tmp_path, **objects)


@pytest.mark.parametrize(
    ("objects", "start"),
    [
        ({"callbacks": [object()]}, "callbacks = "),
        ({"tools": [short]}, "tools = "),
        ({"rollout_func": short}, "rollout_func = "),
        ({"nonsense": 1}, 'nonsense = "int": no key of TRL that is known'),
        ({"args": trl.GRPOConfig("o", **CPU, repetition_penalty=1.1)}, "repetition_penalty = 1.1: "),
        ({"args": trl.GRPOConfig("o", **CPU, push_to_hub=True)}, "push_to_hub = true: streamrl push RUN NAME"),
        ({"args": trl.GRPOConfig("o", **CPU, save_strategy="epoch")}, 'save_strategy = "epoch": checkpoint.every'),
        (
            {"args": trl.GRPOConfig("o", **CPU, model_init_kwargs={"load_in_4bit": True})},
            "model_init_kwargs.load_in_4bit = true: weights are trained and served as",
        ),
        (
            {"peft_config": peft.LoraConfig(target_modules=["a"], lora_dropout=0.1, bias="all")},
            "peft_config.lora_dropout = 0.1: ",
        ),
    ],
)
def test_a_setting_without_a_counterpart_is_refused(objects: dict[str, Any], start: str, tmp_path: Path) -> None:
    assert any(line.startswith(start) for line in made(tmp_path, **objects).refused())


def test_a_trainer_of_its_own_is_refused() -> None:
    class OwnTrainer(GRPOTrainer):
        def compute_loss(self) -> None: ...

    with pytest.raises(RecipeError, match="OwnTrainer is a trainer of its own, whose methods"):
        OwnTrainer("m", short, train_dataset=ROWS)


def test_other_names_are_trls_and_other_trainers_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import streamrl.trl

    assert streamrl.trl.GRPOConfig is trl.GRPOConfig
    with pytest.raises(ImportError, match=r"streamrl\.trl has no SFTTrainer: models are trained by rewards here"):
        from streamrl.trl import SFTTrainer  # noqa: F401
    monkeypatch.setitem(sys.modules, "unsloth", sys)
    with pytest.raises(RecipeError, match="unsloth is imported, which replaces the code of models"):
        GRPOTrainer("m", short, train_dataset=ROWS)


def test_the_list_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer("org/tiny", short, trl.GRPOConfig("out", **CPU, max_steps=3), ROWS)
    printed = capsys.readouterr().out
    assert "translated:" in printed and "default that differs:" in printed and "max_steps = 3\n" in printed
    assert trainer.recipe.run.steps == 3 and trainer.recipe.run.directory == "out"
    with pytest.raises(RecipeError, match="repetition_penalty"):
        GRPOTrainer("org/tiny", short, trl.GRPOConfig("out", **CPU, repetition_penalty=1.1), ROWS)
    assert capsys.readouterr().out == ""


# ---- whole scripts -------------------------------------------------------------------------------

QUICK_START = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

dataset = Dataset.from_list([{"prompt": str(n)} for n in range(64)])

# Define the reward function, which rewards completions that are close to 20 characters
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", use_cpu=True, bf16=False, max_steps=2, max_completion_length=8)
trainer = GRPOTrainer(
    model="MODEL",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""
"""TRL's example of its documentation, with rows and a model of this host, and two steps on the CPU."""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_script_of_trls_documentation_trains(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    model = Path(__file__).parents[2] / "examples" / "sort" / "model"
    script = QUICK_START.replace("MODEL", str(model)).replace("from trl", "from streamrl.trl")
    (tmp_path / "grpo.py").write_text(script + 'trainer.save_model("final")\n')
    command = [sys.executable, "grpo.py"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=390)
    assert finished.returncode == 0, finished.stderr
    assert "finished: 2 of 2 steps" in finished.stdout
    (run,) = (path for path in (tmp_path / "Qwen2-0.5B-GRPO").glob("run-*") if path.is_dir())
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "final" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_init_runs_a_script_and_writes_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """The script reads a file beside it, writes into the folder of the run only, and never trains. It is for a
    GPU, and recorded without one."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bonus.txt").write_text("0.5")
    extra = 'BONUS: float = float(open("bonus.txt").read())\nopen("written.txt", "w").close()\n'
    script = extra + QUICK_START.replace("-abs(20", "BONUS - abs(20").replace("MODEL", "org/tiny").replace(
        "use_cpu=True, bf16=False", "bf16=True"
    )
    (tmp_path / "grpo.py").write_text(script + 'raise SystemExit("after train()")\n')
    assert main(["init", "new", "--from", "grpo.py"]) == 0
    printed = capfd.readouterr()
    assert "grpo.py is run as it is, in " in printed.err and "max_steps = 2\n      run.steps = 2" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bonus.txt", "grpo.py", "new"]
    assert sorted(path.name for path in Path("new").iterdir()) == ["recipe.toml", "reward_len.py", "train.jsonl"]
    recipe = load_recipe("new/recipe.toml")
    reward: Any = load_user_object(recipe.rewards[0].function)
    assert reward(completions=["x" * 19]) == [-0.5] and len(Path(recipe.prompts.train).read_text().splitlines()) == 64


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("import unsloth\n", ": unsloth is imported, which replaces"),
        (
            "from trl import SFTTrainer\nSFTTrainer('m')\n",
            "s.py makes a SFTTrainer: models are trained by rewards here",
        ),
        ("raise KeyError('x')\n", "s.py ended with KeyError: 'x' (s.py:1): mend it"),
        ("print(1)\n", "s.py never called train(), and made 0 trainers"),
        ("import os\nos._exit(3)\n", "s.py ended with exit code 3 before its trainer had a recipe"),
    ],
)
def test_a_script_without_a_recipe_is_refused(
    script: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text(script)
    assert main(["init", "new", "--from", "s.py"]) == 2
    assert sentence in capfd.readouterr().err
    assert not Path("new").exists()
