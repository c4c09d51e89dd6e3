"""Turns the objects that a script hands to a trainer of TRL (model, rewards, GRPOConfig, datasets, LoraConfig) into
settings and files of rows and rewards. ``trl_trainers`` calls it in the process of the user's script. It imports
neither trl nor peft: the objects come from modules that the script has imported."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import json, to_builtins

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import JsonObject
from streamrl.cli.dialects.setting_files import Foreign
from streamrl.recipe.cells.cell_code import source_of
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.dialects.foreign_keys import defaults_of

WriteFile = Callable[[str, str, bytes], str]
"""From a name, an ending such as ``.py`` and the content to the path of the file that was written."""
_COMPUTED = {
    "bf16", "disable_tqdm", "accelerator_config", "debug", "dataloader_pin_memory", "pad_to_multiple_of",
    "include_for_metrics",
}  # fmt: skip
"""Fields without an effect here to which TRL itself gives another value than their default."""


def foreign_of_trainer(method: str, name: str, objects: Mapping[str, Any], write: WriteFile) -> Foreign:
    """Return the settings of a trainer. Rows and rewards are written with ``write``.

    ``method``: GRPO or RLOO;
    ``name``: name of the script;
    ``objects``: arguments of the constructor by name.

    Raises ``RecipeError`` with all objects that another process cannot have, each by its name."""
    settings: JsonObject = {"trainer": method.lower()}
    problems = []
    readers: dict[str, Callable[[Any], Mapping[str, Any]]] = {
        "args": functools.partial(_settings_of_args, method),
        "model": _settings_of_model,
        "reward_funcs": functools.partial(_settings_of_rewards, write),
        "train_dataset": lambda rows: {"train_dataset": _file_of_rows(rows, "train", "train_dataset", write)},
        "eval_dataset": lambda rows: {"eval_dataset": _file_of_rows(rows, "held_out", "eval_dataset", write)},
        "processing_class": functools.partial(_check_tokenizer, objects.get("model")),
        "peft_config": _settings_of_adapter,
    }
    for argument, value in objects.items():
        if value is None or (argument == "optimizers" and tuple(value) == (None, None)):
            continue
        try:
            settings |= readers[argument](value) if argument in readers else {argument: _text(value)}
        except RecipeError as error:
            problems += error.problems
    raise_problems(problems)
    rewards = {"reward_funcs": settings.pop("reward_funcs")} if "reward_funcs" in settings else {}
    return Foreign("TRL", name, dict(leaves("", settings)) | rewards, method=method)


def _text(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _settings_of_args(method: str, args: Any) -> JsonObject:
    """Return the fields of a ``GRPOConfig`` that differ from TRL's defaults. Fields of a subclass are the script's
    own."""
    base = next((kind for kind in type(args).__mro__ if kind.__name__ == f"{method}Config"), None)
    if base is None:
        raise RecipeError(f"args is a {type(args).__name__}, and {method}Trainer takes a {method}Config: give one")
    if getattr(args, "world_size", 1) > 1:
        raise RecipeError(
            f"the script runs in {args.world_size} processes: start it once, with python, and training.ranks says how "
            "many processes train"
        )
    known = defaults_of("TRL", method)
    written = {}
    for field in dataclasses.fields(base):
        value = getattr(args, field.name)
        if field.name not in _COMPUTED and value != known.get(field.name, field.default):
            written[field.name] = _plain(value)
    return written


def _plain(value: Any) -> Any:
    return to_builtins(value, order="deterministic", str_keys=True, enc_hook=str)


def _settings_of_model(model: Any) -> JsonObject:
    if isinstance(model, str | Path):
        return {"model": str(model)}
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "")
    if not name:
        raise RecipeError(f"model is a {type(model).__name__} that was not loaded: give its directory, or its name")
    settings = {"model": name, "model_object": type(model).__name__}
    if getattr(config, "quantization_config", None) is not None:
        settings["quantization_config"] = type(config.quantization_config).__name__
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return settings
    trained = any("lora_B" in name and weight.any() for name, weight in model.named_parameters())
    if trained or len(adapters) > 1:
        raise RecipeError("model has several adapters, or one that is trained: merge it, and give the saved directory")
    return settings | _settings_of_adapter(*adapters.values())


def _settings_of_adapter(adapter: Any) -> JsonObject:
    """Return the fields of a ``LoraConfig`` that differ from peft's defaults, and always its rank, scale and
    modules."""
    if type(adapter).__name__ != "LoraConfig":
        raise RecipeError(f"peft_config is a {type(adapter).__name__}: adapters are of low rank, give a LoraConfig")
    fresh = type(adapter)()
    written = {"r": adapter.r, "lora_alpha": adapter.lora_alpha}
    for field in dataclasses.fields(adapter):
        value = getattr(adapter, field.name)
        if value is not None and value != getattr(fresh, field.name):
            written[field.name] = _plain(value)
    if adapter.target_modules is None:
        raise RecipeError(
            "peft_config.target_modules is not set, and peft chooses them by the type of the model: write them"
        )
    return {"peft_config": written}


def _settings_of_rewards(write: WriteFile, rewards: Any) -> JsonObject:
    tables = []
    labels = set()
    for place, reward in enumerate(rewards if isinstance(rewards, list | tuple) else [rewards]):
        if isinstance(reward, str):
            tables.append({"function": "reward_model", "name": f"reward_model_{place}", "options": {"path": reward}})
            continue
        if not callable(reward) or isinstance(reward, type):
            raise RecipeError(f"reward_funcs has {reward!r}: give functions, or objects that can be called")
        label = _label(reward, place)
        if label in labels:
            label = f"{label}_{place}"
        labels.add(label)
        try:
            file = write(label, ".py", source_of(label, reward).encode())
        except RecipeError as error:
            raise RecipeError(*(f"reward_funcs: {problem}" for problem in error.problems)) from error
        tables.append({"function": f"{file}:{label}"})
    return {"reward_funcs": tables}


def _label(reward: Any, place: int) -> str:
    """Return a name for a reward: its own, or that of the function of a partial, or of its class."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    name = getattr(reward, "__name__", type(reward).__name__.lower())
    return name if name.isidentifier() else f"reward_{place}"


def _file_of_rows(rows: Any, name: str, argument: str, write: WriteFile) -> str:
    """Write rows as JSON lines and return the path of the file."""
    if isinstance(rows, Mapping) or not hasattr(rows, "__len__"):
        raise RecipeError(
            f"{argument} is a {type(rows).__name__}, which another process cannot read, and not again after a resume: "
            "give one split of a datasets.Dataset, or a list of rows"
        )
    lines = []
    for number, row in enumerate(rows):
        if "prompt" not in row:
            raise RecipeError(f'{argument}: row {number} has no column "prompt": it has {", ".join(row)}')
        if "chat_template_kwargs" in row:
            raise RecipeError(f"{argument}: column chat_template_kwargs: write into the prompts what it would add")
        try:
            lines.append(json.encode(row) + b"\n")
        except TypeError as error:
            raise RecipeError(f"{argument}: row {number} cannot be written as JSON ({error}): convert it") from error
    return write(name, ".jsonl", b"".join(lines))


def _check_tokenizer(model: Any, tokenizer: Any) -> JsonObject:
    """Raise ``RecipeError`` for a tokenizer that is not the one of the model's directory, as it was loaded."""
    own = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", "")
    name = getattr(tokenizer, "name_or_path", "")
    remedy = "save it into the model's directory, and give that as the model"
    if str(name) != str(own):
        raise RecipeError(f"processing_class is the tokenizer of {name or 'no directory'}, not of {own}: {remedy}")
    try:
        fresh = type(tokenizer).from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"processing_class cannot be compared with the tokenizer of {own} ({error})") from error
    if len(tokenizer) != len(fresh) or tokenizer.chat_template != fresh.chat_template:
        raise RecipeError(f"processing_class has other tokens or another chat template than {own}: {remedy}")
    return {}
