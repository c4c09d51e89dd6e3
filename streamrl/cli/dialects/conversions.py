"""Conversions of values of other systems that take arithmetic, or another of their keys, to become values of a recipe.
``translation`` calls them for the settings of a file or of a trainer's objects, in the process of the command or of the
user's script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.base.types import JsonObject
from streamrl.recipe.dialects.foreign_keys import switches
from streamrl.recipe.sections import Training


class ForeignSettings(dict[str, Any]):
    """Settings of another system by their whole dotted keys, with its defaults for those that nobody wrote.
    ``defaults``: keys whose values are defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.defaults: set[str] = set()

    def value(self, name: str) -> Any:
        """Return the value of the first key that is ``name`` or ends with it; None where there is none."""
        return next((value for key, value in self.items() if f".{key}".endswith(f".{name}")), None)

    def reason_without_effect(self, key: str) -> str:
        """Return why the key of a row has no effect beside the others; empty where it has one."""
        switch, _, needed = switches().get(key, "").partition("=")
        if switch and str(self.value(switch)).lower() != needed:
            return f"{switch} is not {needed}"
        return self.reason_without_effect(switch) if switch else ""


Effect = str | JsonObject
Conversion = Callable[[Any, ForeignSettings], Effect]
"""From a value and all settings to values by their keys here, or to an effect as the table has it (foreign_keys.toml);
empty: the effect of the row.
``TypeError``, ``ValueError``, ``ArithmeticError``, ``LookupError``: the other system does not take the value."""

OVERLONG = "get_soft_overlong_punishment"


def _listed(value: Any, _: ForeignSettings) -> Effect:
    return {"lora.targets": value if isinstance(value, list) else [value]}


def prompts_of_data_set(path: str, name: Any, split: Any = "train", config: Any = None) -> Effect:
    """Return the key ``path`` with the source of rows for a data set's name on the Hub, or for a file."""
    text = str(name)
    if text.startswith(("/", ".", "~", "$")) or text.endswith((".parquet", ".jsonl", ".json")) or text.count("/") != 1:
        return {path: text}
    part = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", str(split))
    if part is None:
        return f'~{path} = "hf:{text}?split=NAME&limit=N": {split} is no split with a number of first rows'
    options = f"split={part[1]}"
    if part[2]:
        options += f"&limit={part[2]}"
    if config:
        options = f"config={config}&{options}"
    return {path: f"hf:{text}?{options}"}


def _run_name(value: Any, _: ForeignSettings) -> Effect:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value))[:45].strip("-")
    return {"run.name": name} if name and "$" not in str(value) else "~run.name"


def _dual_clip(value: Any, settings: ForeignSettings) -> Effect:
    clipped = settings.value("loss_mode") in (None, "vanilla", "gspo") and settings.value("adv_estimator") != "rloo"
    return {"objective.dual_clip": value} if clipped else "=its surrogate has no dual clip"


def _epochs(steps: str, value: Any, settings: ForeignSettings) -> Effect:
    return f"={steps} counts" if (settings.value(steps) or 0) > 0 else {"training.epochs": value}


def _warmup(steps: str, share: Any, settings: ForeignSettings) -> Effect:
    whole = settings.value(steps) or 0
    if not share:
        return "=no warm-up"
    return {"training.warmup_steps": round(share * whole)} if whole > 0 else "~training.warmup_steps: share x run.steps"


def _trl_batch(_: Any, settings: ForeignSettings) -> Effect:
    group = settings.value("num_generations")
    accumulated = settings.value("gradient_accumulation_steps")
    micro = settings.value("per_device_train_batch_size") * settings.value("num_processes")
    whole = settings.value("generation_batch_size")
    passes = whole // micro if whole else settings.value("steps_per_generation") or accumulated
    # Batches that are sampled with the same weights, for one optimizer step, are one batch here.
    passes = max(passes, accumulated)
    if passes % accumulated:
        return (
            f"~rollout.prompts_per_batch: gradient_accumulation_steps = {accumulated} is no divisor of the {passes} "
            "passes of a batch"
        )
    if micro * passes % group:
        return (
            f"~rollout.prompts_per_batch: {micro * passes} completions are no whole groups of num_generations = {group}"
        )
    updates = passes // accumulated
    return {"rollout.prompts_per_batch": micro * passes // group, "training.updates_per_batch": updates}


def _trl_updates(settings: ForeignSettings) -> int:
    """Return the number of TRL's steps, which are optimizer steps, in one step here, which is a batch."""
    batch = _trl_batch(None, settings)
    updates = batch["training.updates_per_batch"] if isinstance(batch, dict) else 1
    return int(updates * (settings.value("num_iterations") or 1))


def _trl_steps(path: str, value: Any, settings: ForeignSettings) -> Effect:
    if value <= 0:
        return "=num_train_epochs counts" if path == "run.steps" else {path: 0}
    if value < 1:
        return f"~{path}: write a number of steps, not a share of them"
    return {path: -(-int(value) // _trl_updates(settings))}


def _trl_warmup(value: Any, settings: ForeignSettings) -> Effect:
    """Convert ``warmup_ratio`` or ``warmup_steps``, which below 1 is a share of all steps."""
    if value >= 1:
        return _trl_steps("training.warmup_steps", value, settings)
    return _warmup("max_steps", value / _trl_updates(settings), settings)


def _trl_epsilon(value: Any, settings: ForeignSettings) -> Effect:
    if settings.value("loss_type") == "cispo":
        return "=the weights of cispo have an upper bound alone: epsilon_high"
    if settings.value("loss_type") == "sapo":
        return "=sapo has a gate in place of a clip"
    return ""


def _trl_loss(value: Any, settings: ForeignSettings) -> Effect:
    if str(value) == "cispo" and settings.value("epsilon_high") is None:
        return "~objective.clip_high: cispo needs epsilon_high, the largest weight"
    return ""


def _trl_trainer(value: Any, settings: ForeignSettings) -> Effect:
    if value == "rloo" and _trl_updates(settings) > 1:
        return "-several updates of a batch: TRL's RLOO clips the ratio of a whole sequence, and no surrogate here does"
    return ""


def _trl_evaluation(value: Any, settings: ForeignSettings) -> Effect:
    samples = settings.value("num_generations_eval") or settings.value("num_generations")
    return {"evaluation.prompts": value, "evaluation.samples": samples}


def _trl_trackers(value: Any, _: ForeignSettings) -> Effect:
    names = [str(name) for name in (value if isinstance(value, list | tuple) else [value])]
    known = ("tensorboard", "wandb", "trackio")
    unknown = [name for name in names if name not in (*known, "none")]
    if unknown:
        return f"~metrics.report_to, for {', '.join(known)} or a plug-in: {', '.join(unknown)} is none of them"
    chosen = [name for name in names if name != "none"]
    return {"metrics.report_to": chosen} if chosen else "=there is no tracker unless metrics.report_to names one"


def _least_rate(value: Any, settings: ForeignSettings) -> Effect:
    share = value / (settings.value("learning_rate") or Training().learning_rate)
    return {"training.schedule_options.min_lr_rate": float(f"{share:.6g}")}


def _trl_rewards(value: Any, _: ForeignSettings) -> Effect:
    """Convert rewards: names of TRL's own or of modules, or tables of a recipe."""
    rewards = value if isinstance(value, list) else [value]
    values: JsonObject = {}
    for place, reward in enumerate(rewards):
        if isinstance(reward, str):
            if reward == OVERLONG or not re.fullmatch(r"\w+(\.\w+)*|[\w./-]+:\w+", reward):
                return f"~rewards.N.function: {reward}: write it as a function with this name in reward.py"
            name = reward if "." in reward or ":" in reward else f"trl.rewards.{reward}"
            reward = {"function": name if ":" in name else ":".join(name.rsplit(".", 1))}
        values |= {f"rewards.{place}.{key}": part for key, part in reward.items()}
    return values


def _trl_dataset(value: Any, settings: ForeignSettings) -> Effect:
    split = settings.value("dataset_train_split") or "train"
    return prompts_of_data_set("prompts.train", value, split, settings.value("dataset_config"))


def _divided(path: str, whole: str, value: Any, settings: ForeignSettings) -> Effect:
    """``whole`` / ``value``, where it is an integer."""
    dividend = settings.value(whole)
    if dividend % value:
        return f"~{path}: {whole} = {dividend} is no multiple of {value}"
    return {path: dividend // value}


def _verl_files(path: str, value: Any, settings: ForeignSettings) -> Effect:
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        sets = ", ".join(f'{Path(str(file)).stem} = "{file}"' for file in files)
        return f"~{path}: {len(files)} files: join them, or give each a share, which is 1 in {path} = {{{sets}}}"
    column = settings.value("prompt_key") or "prompt"
    return {path: str(files[0]) + ("" if column == "prompt" else f"?prompt={column}")}


def _prime_batch(value: Any, settings: ForeignSettings) -> Effect:
    size = settings.value("rollouts_per_example") or settings.value("orchestrator.group_size")
    if value % size:
        return f"~rollout.prompts_per_batch: {value} rollouts are no whole groups of {size}"
    return {"rollout.prompts_per_batch": value // size}


CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {
    "TRL": {
        **dict.fromkeys(
            (
                "generation_batch_size",
                "per_device_train_batch_size",
                "steps_per_generation",
                "gradient_accumulation_steps",
            ),
            _trl_batch,
        ),
        "lora_target_modules": _listed,
        "target_modules": _listed,
        "run_name": _run_name,
        "report_to": _trl_trackers,
        "loss_type": _trl_loss,
        "trainer": _trl_trainer,
        "epsilon": _trl_epsilon,
        "epsilon_high": lambda value, settings: {
            "objective.clip_high": round(value - (settings.value("loss_type") == "cispo"), 12)
        },
        "reward_funcs": _trl_rewards,
        "use_bias_correction_kl": lambda _, settings: "" if settings.value("beta") else "=beta is 0: there is no KL",
        "reward_weights": lambda weights, _: {
            f"rewards.{place}.weight": float(weight) for place, weight in enumerate(weights)
        },
        "max_steps": partial(_trl_steps, "run.steps"),
        "save_steps": partial(_trl_steps, "checkpoint.every"),
        "eval_steps": partial(_trl_steps, "evaluation.every"),
        "eval_dataset": _trl_evaluation,
        "num_train_epochs": partial(_epochs, "max_steps"),
        **dict.fromkeys(("lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.lr_end"), _least_rate),
        **dict.fromkeys(("warmup_ratio", "warmup_steps"), _trl_warmup),
        "dataset_name": _trl_dataset,
    },
    "verl": {
        "ppo_mini_batch_size": partial(_divided, "training.updates_per_batch", "train_batch_size"),
        "target_modules": _listed,
        "experiment_name": _run_name,
        "clip_ratio_c": _dual_clip,
        "train_files": partial(_verl_files, "prompts.train"),
        "val_files": partial(_verl_files, "evaluation.prompts"),
        "custom_reward_function.path": lambda file, settings: {
            "rewards.0.function": f"{file}:{settings.value('custom_reward_function.name') or 'compute_score'}"
        },
        "optim.betas": lambda pair, _: {"training.beta1": float(pair[0]), "training.beta2": float(pair[1])},
        "total_epochs": partial(_epochs, "trainer.total_training_steps"),
        "lr_warmup_steps_ratio": partial(_warmup, "trainer.total_training_steps"),
    },
    "prime-rl": {
        "batch_size": _prime_batch,
        "run.name": _run_name,
        "wandb.name": _run_name,
        "monitors.wandb.name": _run_name,
        "eval.num_examples": lambda value, _: {"evaluation.limit": max(value, 0)},
        "num_infer_gpus": lambda value, settings: {
            "engines.count": max(1, value // (settings.value("tensor_parallel_size") or 1))
        },
    },
    "AReaL": {
        "train_dataset.path": lambda name, _: prompts_of_data_set("prompts.train", name),
        "valid_dataset.path": lambda name, _: prompts_of_data_set("evaluation.prompts", name, "test"),
        "target_modules": _listed,
        "experiment_name": _run_name,
        "total_train_epochs": partial(_epochs, "total_train_steps"),
        "warmup_steps_proportion": partial(_warmup, "total_train_steps"),
    },
}
"""By the system and the key of its row."""
