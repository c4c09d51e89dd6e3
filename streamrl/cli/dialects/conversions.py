"""Values of other systems that take arithmetic, or another of their keys, to become values of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from streamrl.recipe.sections import Training


class Given(dict[str, Any]):
    """Settings of another system by their whole dotted keys, with its defaults for those that are not set."""

    def of(self, name: str) -> Any:
        """Return the value of the first key that is ``name`` or ends with it; None where there is none."""
        return next((value for key, value in self.items() if f".{key}".endswith(f".{name}")), None)

    def reason_without_effect(self, key: str) -> str:
        """Return why the key of a row has no effect beside the others; empty where it has one."""
        switch, _, wanted = SWITCHES.get(key, "").partition("=")
        found = self.of(switch) if switch else None
        return f"{switch} is not {wanted}" if switch and str(found).lower() != wanted else ""


Effect = str | dict[str, Any]
Conversion = Callable[[Any, Given], Effect]
"""From a value and all settings to values by their keys here, or to an effect as the table has it (foreign_keys.toml).
``TypeError``, ``ValueError``, ``ArithmeticError``, ``LookupError``: the value is none that the other system takes."""

SWITCHES = {
    **dict.fromkeys(("kl_loss_coef", "kl_loss_type"), "use_kl_loss=true"),
    "kl_coef": "use_kl_in_reward=true",
    **dict.fromkeys(("lam", "gamma", "cliprange_value", "critic.optim.lr", "critic.model.path"), "adv_estimator=gae"),
    **dict.fromkeys(("overlong_tokens", "overlong_penalty_factor"), "overlong_reward_penalty=true"),
}
for _buffer in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
    SWITCHES |= dict.fromkeys((f"{_buffer}.len", f"{_buffer}.penalty_factor"), f"{_buffer}.enable=true")
"""Keys that count only where another has a value."""
OVERLONG = "get_soft_overlong_punishment"
REWARDS = {
    "think_format_reward": ("regex", {"pattern": r"<think>(?!.*<think>)(.*?)</think>.*", "whole": True}),
    **dict.fromkeys(("accuracy_reward", "reasoning_accuracy_reward"), ("math", {"column": "solution"})),
}
"""TRL's own."""


def _listed(value: Any, _: Given) -> Effect:
    return {"lora.targets": value if isinstance(value, list) else [value]}


def of_the_hub(name: Any, split: Any = "train", config: Any = None) -> str:
    """Return the source of prompts for a data set's name on the Hub, or for a path."""
    text = str(name)
    if text.startswith(("/", ".", "~", "$")) or text.endswith((".parquet", ".jsonl", ".json")) or text.count("/") != 1:
        return text
    if text.lower() == "openai/gsm8k":
        return f"hf:{text}?config=main&split={split}&prompt=question&chat=true"
    return f"hf:{text}?{f'config={config}&' if config else ''}split={split}"


def _run_name(value: Any, _: Given) -> Effect:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value))[:45].strip("-")
    return {"run.name": name} if name and "$" not in str(value) else "~run.name"


def _dual_clip(value: Any, given: Given) -> Effect:
    clipped = given.of("loss_mode") in (None, "vanilla", "gspo") and given.of("adv_estimator") != "rloo"
    return {"objective.dual_clip": value} if clipped else "=its surrogate has no dual clip"


def _epochs(steps: str, value: Any, given: Given) -> Effect:
    return f"={steps} counts" if (given.of(steps) or 0) > 0 else {"training.epochs": value}


def _warmup(steps: str, share: Any, given: Given) -> Effect:
    whole = given.of(steps) or 0
    if not share:
        return "=no warm-up"
    return {"training.warmup_steps": round(share * whole)} if whole > 0 else "~training.warmup_steps: share x run.steps"


def _trl_batch(_: Any, given: Given) -> Effect:
    group = given.of("num_generations")
    accumulated = given.of("gradient_accumulation_steps")
    micro = given.of("per_device_train_batch_size") * given.of("num_processes")
    whole = given.of("generation_batch_size")
    passes = whole // micro if whole else given.of("steps_per_generation") or accumulated
    completions = whole or micro * passes
    if completions % group:
        return f"~rollout.prompts_per_batch: {completions} completions are no whole groups of num_generations = {group}"
    updates = max(1, passes // accumulated)
    return {"rollout.prompts_per_batch": completions // group, "training.updates_per_batch": updates}


def _trl_steps(value: Any, given: Given) -> Effect:
    batch = _trl_batch(None, given)
    updates = batch["training.updates_per_batch"] if isinstance(batch, dict) else 1
    steps = updates * (given.of("num_iterations") or 1)
    return {"run.steps": -(-value // steps)} if value > 0 else "=num_train_epochs counts"


def _least_rate(value: Any, given: Given) -> Effect:
    share = value / (given.of("learning_rate") or Training().learning_rate)
    return {"training.schedule_options.min_lr_rate": float(f"{share:.6g}")}


def _trl_rewards(value: Any, _: Given) -> Effect:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if unnamed := [name for name in names if not re.fullmatch(r"[\w./-]+(:\w+)?", name)]:
        return f"~rewards.N.function: {', '.join(unnamed)}: write a function with a name in reward.py"
    values: dict[str, Any] = {"objective.overlong_buffer": 256} if OVERLONG in names else {}
    for place, name in enumerate(name for name in names if name != OVERLONG):
        reward, options = REWARDS.get(name, (name if ":" in name else ":".join(name.rsplit(".", 1)), {}))
        values |= {f"rewards.{place}.function": reward} | ({f"rewards.{place}.options": options} if options else {})
    return values


def _trl_dataset(value: Any, given: Given) -> Effect:
    split = given.of("dataset_train_split") or "train"
    return {"prompts.train": of_the_hub(value, split, given.of("dataset_config"))}


def _divided(path: str, whole: str, value: Any, given: Given) -> Effect:
    """``whole`` / ``value``, where it is an integer."""
    if given.of(whole) % value:
        return f"~{path}: {whole} = {given.of(whole)} is no multiple of {value}"
    return {path: given.of(whole) // value}


def _verl_files(path: str, value: Any, given: Given) -> Effect:
    files = value if isinstance(value, list) else [value]
    if len(files) != 1:
        return f"~{path}: {len(files)} files: join them, or write a function that yields the rows of all"
    column = given.of("prompt_key") or "prompt"
    return {path: str(files[0]) + ("" if column == "prompt" else f"?prompt={column}")}


def _prime_batch(value: Any, given: Given) -> Effect:
    size = given.of("rollouts_per_example") or given.of("orchestrator.group_size")
    if value % size:
        return f"~rollout.prompts_per_batch: {value} rollouts are no whole groups of {size}"
    return {"rollout.prompts_per_batch": value // size}


def _parallel(value: Any, letter: str) -> int:
    """Data (``d``), tensor (``t``), pipeline (``p``) or context (``c``) parallelism out of ``sglang:d4p1t2``, or of the
    first part of ``megatron:(attn:d4t2|ffn:d2e2)``."""
    found = re.search(rf":.*{letter}(\d+)", str(value).partition("|")[0])
    return int(found[1]) if found else 1


def _areal_ranks(text: Any, _: Given) -> Effect:
    data, tensor, context, stages = (_parallel(text, letter) for letter in "dtcp")
    split = {f"training.{name}_parallel_size": n for name, n in (("tensor", tensor), ("context", context)) if n > 1}
    return {"training.ranks": data * tensor * context * stages} | split


CONVERSIONS: Mapping[str, Mapping[str, Conversion]] = {
    "TRL": {
        "generation_batch_size": _trl_batch,
        "per_device_train_batch_size": _trl_batch,
        "steps_per_generation": _trl_batch,
        "gradient_accumulation_steps": _trl_batch,
        "lora_target_modules": _listed,
        "target_modules": _listed,
        "run_name": _run_name,
        "report_to": lambda names, _: {"metrics.report_to": [names] if isinstance(names, str) else names},
        "epsilon_high": lambda value, given: {"objective.clip_high": value - (given.of("loss_type") == "cispo")},
        "reward_funcs": _trl_rewards,
        "reward_weights": lambda value, _: {f"rewards.{at}.weight": float(one) for at, one in enumerate(value)},
        "max_steps": _trl_steps,
        "num_train_epochs": partial(_epochs, "max_steps"),
        **dict.fromkeys(("lr_scheduler_kwargs.min_lr", "lr_scheduler_kwargs.lr_end"), _least_rate),
        "warmup_ratio": partial(_warmup, "max_steps"),
        "dataset_name": _trl_dataset,
        "use_peft": lambda on, given: {"lora.rank": 16} if on and not given.of("lora_r") else "=lora.rank > 0 is that",
    },
    "verl": {
        "ppo_mini_batch_size": partial(_divided, "training.updates_per_batch", "train_batch_size"),
        "target_modules": _listed,
        "experiment_name": _run_name,
        "clip_ratio_c": _dual_clip,
        "train_files": partial(_verl_files, "prompts.train"),
        "val_files": partial(_verl_files, "evaluation.prompts"),
        "custom_reward_function.path": lambda value, given: {
            "rewards.0.function": f"{value}:{given.of('custom_reward_function.name') or 'compute_score'}"
        },
        "optim.betas": lambda pair, _: {"training.beta1": float(pair[0]), "training.beta2": float(pair[1])},
        "total_epochs": partial(_epochs, "total_training_steps"),
        "lr_warmup_steps_ratio": partial(_warmup, "total_training_steps"),
    },
    "prime-rl": {
        "batch_size": _prime_batch,
        "run.name": _run_name,
        "wandb.name": _run_name,
        "monitors.wandb.name": _run_name,
        "eval.num_examples": lambda value, _: {"evaluation.limit": max(value, 0)},
        "num_infer_gpus": lambda value, given: {
            "engines.count": max(1, value // (given.of("tensor_parallel_size") or 1))
        },
    },
    "AReaL": {
        "train_dataset.path": lambda name, _: {"prompts.train": of_the_hub(name)},
        "valid_dataset.path": lambda name, _: {"evaluation.prompts": of_the_hub(name, "test")},
        "actor.backend": _areal_ranks,
        "rollout.backend": lambda text, _: {
            "engines.count": _parallel(text, "d"),
            "engines.tensor_parallel_size": _parallel(text, "t"),
            **({"engines.args.pipeline_parallel_size": stages} if (stages := _parallel(text, "p")) > 1 else {}),
        },
        "target_modules": _listed,
        "experiment_name": _run_name,
        "total_train_epochs": partial(_epochs, "total_train_steps"),
        "warmup_steps_proportion": partial(_warmup, "total_train_steps"),
    },
}
"""By the system and the key of its row."""
