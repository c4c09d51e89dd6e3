"""A checkpoint is resumed only where its tensors mean what they meant: scales, targets and base of adapters, and the
model's configuration, are compared with those of the run that wrote it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from sample_groups import make_groups, published_bits, train_batch  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.messages import SaveCheckpoint  # noqa: E402
from streamrl.learning.state.tensor_meaning import other_meanings  # noqa: E402
from streamrl.recipe.sections import Lora, LoraSync  # noqa: E402

pytestmark = pytest.mark.torch
StartTrainer = Callable[..., Any]
TARGETS = ("q_proj", "down_proj")
SAVED = {"rank": 4, "alpha": 8.0, "targets": TARGETS}


def saved(start_trainer: StartTrainer, directory: Path, **options: Any) -> dict[str, Any]:
    """Write a checkpoint after a step; returns the bits that were published."""
    trainer = start_trainer(**options)
    train_batch(trainer, make_groups(0, [4, 4]), 1)
    trainer.save_checkpoint(SaveCheckpoint(directory=str(directory), policy_version=1))
    return published_bits(trainer)


def edited(model: str, copy: Path, change: Callable[[dict[str, Any]], object]) -> str:
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.seconds(8)
def test_adapters_with_another_meaning_are_refused_by_their_key(
    start_trainer: StartTrainer, tiny_model: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    bits = saved(start_trainer, checkpoint, lora=Lora(**SAVED))
    refusals: dict[str, dict[str, Any]] = {
        "lora.alpha: 16.0, and the checkpoint has 8": {"lora": Lora(**SAVED | {"alpha": 16.0})},
        "lora.rslora: true": {"lora": Lora(**SAVED, rslora=True)},
        "lora.dora: true": {"lora": Lora(**SAVED, dora=True)},
        "lora.rank: 8": {"lora": Lora(**SAVED | {"rank": 8})},
        "lora.rank: 0, and the checkpoint has adapters of rank 4": {},
        "lora.targets: this run lacks the adapters on 2 modules": {"lora": Lora(**SAVED | {"targets": ("q_proj",)})},
        "lora.targets: this run has adapters of its own on 2 modules": {
            "lora": Lora(**SAVED | {"targets": (*TARGETS, "v_proj")})
        },
        "model.path: the adapters of checkpoint": {"lora": Lora(**SAVED), "model_path": str(checkpoint / "hf")},
        "model.path: its config.json has rms_norm_eps = 0.01, and the checkpoint was trained with 1e-6": {
            "lora": Lora(**SAVED),
            "model_path": edited(tiny_model, tmp_path / "eps", lambda c: c.update(rms_norm_eps=0.01)),
        },
    }
    for message, options in refusals.items():
        with pytest.raises(StreamRLError) as refused:
            start_trainer(**options, resume_from=str(checkpoint))
        assert str(refused.value).startswith(message), str(refused.value)
    same = (
        {"lora": Lora(**SAVED)},
        {"lora": Lora(**SAVED | {"targets": (r".*\.(q|down)_proj",)})},  # the same modules in other words
        {
            "lora": Lora(**SAVED),
            "model_path": edited(tiny_model, tmp_path / "ends", lambda c: c.update(eos_token_id=5, use_cache=False)),
        },
    )
    for options in same:
        again = published_bits(start_trainer(**options, resume_from=str(checkpoint)))
        assert all((again[name] == values).all() for name, values in bits.items())


@pytest.mark.seconds(8)
def test_all_weights_are_no_adapter_and_a_served_one_is(start_trainer: StartTrainer, tmp_path: Path) -> None:
    saved(start_trainer, tmp_path / "all")
    with pytest.raises(StreamRLError, match=r"^lora.rank: 4, and the checkpoint has all weights and no adapters: set"):
        start_trainer(lora=Lora(**SAVED), resume_from=str(tmp_path / "all"))
    apart = Lora(**SAVED, sync=LoraSync.ADAPTER)
    saved(start_trainer, tmp_path / "apart", lora=apart)
    assert start_trainer(lora=Lora(**SAVED), resume_from=str(tmp_path / "apart")).policy_version == 1
    with pytest.raises(StreamRLError, match=r"^lora.alpha: 2.0"):
        start_trainer(lora=Lora(**SAVED | {"alpha": 2.0}), resume_from=str(tmp_path / "apart"))


def test_the_dry_run_reads_the_same_without_loading_anything(
    start_trainer: StartTrainer, tiny_model: str, tmp_path: Path
) -> None:
    """Every reason at once; a checkpoint that an older streamrl wrote, without a sum over its base, too."""
    saved(start_trainer, tmp_path / "checkpoint", lora=Lora(**SAVED))
    other = Lora(rank=2, alpha=4.0, rslora=True, targets=TARGETS)
    keys = [problem.partition(":")[0] for problem in other_meanings(tmp_path / "checkpoint", other, tiny_model)]
    assert keys == ["lora.rank", "lora.alpha", "lora.rslora"]
    assert not list(other_meanings(tmp_path / "checkpoint", Lora(**SAVED), tiny_model))
    rope = edited(tiny_model, tmp_path / "rope", lambda c: c.update(rope_parameters={"rope_theta": 5.0}))
    found = list(other_meanings(tmp_path / "checkpoint", Lora(**SAVED), rope))
    assert len(found) == 2 and "rope_parameters.rope_theta = 5.0" in found[0], found


def test_an_adapter_names_repository_and_commit_of_its_base(
    start_trainer: StartTrainer, tiny_model: str, tmp_path: Path
) -> None:
    """The folder of this user's cache is on no other machine."""
    folder = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0123456789" * 4)
    shutil.copytree(tiny_model, folder)
    for path, expected in ((folder, ("org/tiny", folder.name)), (Path(tiny_model), (tiny_model, None))):
        checkpoint = tmp_path / expected[0].replace("/", "-")
        saved(start_trainer, checkpoint, lora=Lora(**SAVED), model_path=str(path))
        config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["revision"]) == expected
