"""Constructors of 42 public TRL scripts, as objects, through ``streamrl.trl``: each argument is translated or refused
by name, none in silence.

    python -m campaigns trl_scripts        # one line a script; exit code 1 where an argument is lost in silence

Arguments are those of the scripts, with values in place of their variables; models, data and rewards are small ones of
this file. Needs trl and peft."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.base.errors import RecipeError
from streamrl.cli.dialects.translation import BY_HAND, NOT_READ, WITHOUT, translated
from streamrl.cli.dialects.trl_objects import foreign_of_trainer

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*QKVO, "gate_proj", "up_proj", "down_proj"]
UNSLOTH = {
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "optim": "adamw_8bit",
    "logging_steps": 1,
    "max_grad_norm": 0.1,
}
"""Settings that most notebooks of unsloth have."""


class Script(NamedTuple):
    """Arguments of a script. ``config``: of its GRPOConfig or RLOOConfig; ``lora``: of its LoraConfig; ``trainer``:
    further ones of the trainer."""

    name: str
    config: Mapping[str, Any]
    lora: Mapping[str, Any] | None = None
    trainer: Mapping[str, Any] = {}
    method: str = "GRPO"


class Outcome(NamedTuple):
    """Result of one script: arguments that were translated, those that were refused, and those that were lost."""

    translated: tuple[str, ...]
    refused: tuple[str, ...]
    lost: tuple[str, ...]
    unknown_to_trl: tuple[str, ...]


class Callback:
    """A callback of a trainer."""


def rollout(prompts: list[str], trainer: object) -> dict[str, Any]:
    """A rollout function of TRL."""
    return {}


SCRIPTS = (
    Script("documentation, quick start", {"output_dir": "Qwen2-0.5B-GRPO"}),
    Script("documentation, logging", {"output_dir": "Qwen2-0.5B-GRPO", "logging_steps": 10}),
    Script("documentation, two steps with vLLM", {
        "output_dir": "Qwen2-0.5B-GRPO", "logging_steps": 1, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": 1, "vllm_gpu_memory_utilization": 0.3, "max_prompt_length": 512,
        "max_completion_length": 1024, "max_steps": 2, "num_generations": 4, "num_train_epochs": 1,
        "per_device_train_batch_size": 4, "push_to_hub": False, "report_to": None}),
    Script("a cluster's smoke test", {"output_dir": "output/Llama", "logging_steps": 2}),
    Script("documentation, GSPO", {
        "importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "epsilon": 3e-4,
        "epsilon_high": 4e-4, "gradient_accumulation_steps": 1, "steps_per_generation": 4}),
    Script("the market maker", {
        "output_dir": "grpo_out", "max_steps": 200, "per_device_train_batch_size": 8, "num_generations": 8,
        "learning_rate": 5e-6, "logging_steps": 10, "save_steps": 500, "save_total_limit": 3, "bf16": True,
        "max_prompt_length": 1024, "max_completion_length": 80, "temperature": 0.9, "report_to": "wandb",
        "run_name": "grpo-stage1"}),
    Script("GSM8K with mlflow", UNSLOTH | {
        "output_dir": "out", "bf16": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
        "num_generations": 4, "max_prompt_length": 256, "max_completion_length": 768, "num_train_epochs": 1,
        "save_steps": 100, "log_on_each_node": False, "report_to": "mlflow"}, {"r": 16, "lora_alpha": 16}),
    Script("the judge's test", {
        "output_dir": "test_long_clean", "save_steps": 5, "learning_rate": 1e-4, "lr_scheduler_type": "cosine",
        "logging_steps": 1, "max_steps": 10000, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 21,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}, "bf16": True,
        "max_grad_norm": 1.0, "num_train_epochs": 1, "max_completion_length": 1024, "num_generations": 3,
        "beta": 0.001}),
    Script("four prompts a step", {
        "output_dir": "out", "num_train_epochs": 1, "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-5, "logging_steps": 5, "save_steps": 25,
        "max_steps": 300, "num_generations": 4}, {
        "r": 16, "lora_alpha": 32, "target_modules": ALL_LINEAR, "lora_dropout": 0.05, "bias": "none",
        "task_type": "CAUSAL_LM"}),
    Script("Qwen3 and mathematics", {
        "output_dir": "./grpo_qwen3_math", "use_vllm": True, "num_generations": 4, "max_completion_length": 1024,
        "num_train_epochs": 2, "learning_rate": 2e-5, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4, "fp16": True, "bf16": False, "logging_steps": 5, "save_steps": 50,
        "unsloth_grpo_mini_batch": 1, "report_to": "none"}),
    Script("after a reward model", {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_train_epochs": 1, "learning_rate": 1e-6, "logging_steps": 10, "max_completion_length": 256,
        "save_strategy": "no", "num_generations": 4, "do_eval": True, "eval_strategy": "epoch", "report_to": "wandb",
        "loss_type": "bnpo", "beta": 0.04, "importance_sampling_level": "sequence"},
        trainer={"eval_dataset": [{"prompt": "9"}]}),
    Script("an actor of its own", {
        "output_dir": "checkpoints", "use_vllm": False, "report_to": "none", "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1, "learning_rate": 5e-6, "num_train_epochs": 5, "max_steps": -1,
        "save_steps": 100, "logging_steps": 10, "num_generations": 4, "bf16": False,
        "gradient_checkpointing": True}),
    Script("two rollouts", {
        "output_dir": "grpo-qwen-training", "use_vllm": True, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3, "max_steps": 100, "num_generations": 2, "per_device_train_batch_size": 2,
        "logging_steps": 5, "learning_rate": 5e-6, "save_steps": 50}, {
        "task_type": "CAUSAL_LM", "inference_mode": False, "r": 8, "lora_alpha": 16, "lora_dropout": 0.1}),
    Script("chess", {
        "output_dir": "qwen3-1.7b-chess-wdl-grpo", "per_device_train_batch_size": 8, "num_generations": 8,
        "gradient_accumulation_steps": 4, "max_completion_length": 256, "learning_rate": 1e-5,
        "lr_scheduler_type": "constant", "warmup_steps": 10, "temperature": 1.0, "beta": 0.02, "max_steps": 400,
        "logging_steps": 1, "save_steps": 1000, "bf16": True, "use_vllm": True, "report_to": "none"},
        trainer={"callbacks": [Callback()]}),
    Script("a head of its own", {
        "output_dir": "out", "max_steps": 100, "num_generations": 4, "max_completion_length": 512, "use_vllm": False,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "learning_rate": 5e-6,
        "lr_scheduler_type": "cosine", "bf16": True, "gradient_checkpointing": True, "beta": 0.0,
        "enable_correctness_head": True, "logging_steps": 1, "save_steps": 200, "save_total_limit": 3,
        "report_to": "wandb", "run_name": "qwen3-grpo-gnosis-stepwise"}, {
        "r": 16, "lora_alpha": 16, "target_modules": ALL_LINEAR, "modules_to_save": ["stop_head"],
        "lora_dropout": 0.05, "task_type": "CAUSAL_LM"}),
    Script("symbols", {
        "output_dir": "ckpt", "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "logging_steps": 1,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "num_generations": 4,
        "max_completion_length": 64, "max_steps": 60, "save_steps": 20, "save_total_limit": 3, "seed": 13,
        "weight_decay": 0.01, "optim": "paged_adamw_8bit", "report_to": "none"}, trainer={"callbacks": [Callback()]}),
    Script("on a laptop", {
        "output_dir": "out", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4,
        "num_train_epochs": 1, "max_steps": 8, "learning_rate": 1e-5, "generation_batch_size": 4,
        "num_generations": 4, "logging_steps": 10, "save_steps": 100, "report_to": [], "bf16": False}),
    Script("countdown", {
        "learning_rate": 5e-6, "max_steps": 500, "logging_steps": 1, "per_device_train_batch_size": 16,
        "num_generations": 16, "bf16": True, "report_to": "wandb", "remove_unused_columns": False,
        "max_completion_length": 1024, "max_grad_norm": 0.1,
        "chat_template_kwargs": {"truncation": True, "max_length": 1024}}),
    Script("a prisoner's dilemma", {
        "output_dir": "iter_01", "seed": 3, "learning_rate": 1e-5, "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_completion_length": 8, "num_generations": 8,
        "temperature": 0.7, "top_p": 0.9, "remove_unused_columns": False, "logging_steps": 1, "save_steps": 0,
        "model_init_kwargs": {"trust_remote_code": True, "torch_dtype": "bfloat16"}}),
    Script("25 steps on an A100", {
        "learning_rate": 1e-4, "optim": "adamw_torch", "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2, "max_steps": 25, "bf16": True, "num_generations": 2}),
    Script("unsloth, DPO settings left", UNSLOTH | {
        "output_dir": "out", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8,
        "num_generations": 8, "max_completion_length": 512, "beta": 0.04, "num_train_epochs": 1, "max_steps": 500,
        "save_steps": 100, "report_to": "none"}, {
        "r": 32, "target_modules": ALL_LINEAR, "lora_alpha": 32, "lora_dropout": 0, "bias": "none"}),
    Script("a blackout", {
        "output_dir": "out", "learning_rate": 5e-6, "lr_scheduler_type": "cosine", "logging_steps": 5,
        "max_steps": 120, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 150, "temperature": 0.9, "bf16": True, "optim": "adamw_8bit",
        "report_to": "none"}),
    Script("refunds", {
        "output_dir": "gauntlet_grpo_output", "num_train_epochs": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4, "learning_rate": 2e-5, "logging_steps": 1, "save_steps": 100,
        "max_completion_length": 256, "report_to": "none"}),
    Script("a rate", UNSLOTH | {
        "seed": 3407, "learning_rate": 5e-5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
        "num_generations": 8, "max_completion_length": 500, "num_train_epochs": 10, "save_steps": 10,
        "report_to": "none", "output_dir": "a", "save_strategy": "steps", "save_total_limit": 5, "beta": 0.005,
        "use_vllm": True}, trainer={"callbacks": [Callback()]}),
    Script("sequence tokens", {
        "output_dir": "out", "learning_rate": 0.1, "per_device_train_batch_size": 3, "num_generations": 3,
        "max_completion_length": 8, "num_iterations": 2, "importance_sampling_level": "sequence_token",
        "report_to": "none"}),
    Script("an environment by rollouts", {
        "num_generations": 2, "max_completion_length": 8, "use_vllm": True, "vllm_mode": "colocate",
        "gradient_accumulation_steps": 64, "per_device_train_batch_size": 1, "report_to": "trackio"},
        trainer={"rollout_func": rollout}),
    Script("fifty steps", {"output_dir": "out", "max_steps": 50}),
    Script("early stopping", {
        "output_dir": "out", "max_steps": 1000, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
        "learning_rate": 5e-6, "lr_scheduler_type": "cosine", "num_generations": 4, "max_completion_length": 256,
        "logging_steps": 10, "save_steps": 50, "save_total_limit": 5, "bf16": True, "report_to": "wandb",
        "run_name": "grpo", "seed": 42}, trainer={"callbacks": [Callback()]}),
    Script("a surgeon of data", {
        "output_dir": "outputs/dataforge-surgeon", "num_generations": 4, "max_completion_length": 128,
        "temperature": 0.5, "beta": 0.01, "learning_rate": 2e-5, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2, "num_train_epochs": 3, "logging_steps": 5, "save_steps": 25,
        "report_to": "none", "max_steps": 100, "bf16": False, "fp16": True}),
    Script("a sweep of the KL", {
        "output_dir": "sweeps/kl_0p04", "beta": 0.04, "loss_type": "dr_grpo", "scale_rewards": False,
        "learning_rate": 1e-6, "lr_scheduler_type": "constant", "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16, "num_generations": 8, "max_completion_length": 1024,
        "num_train_epochs": 1, "bf16": True, "epsilon": 0.2, "epsilon_high": 0.2, "temperature": 1.0, "top_p": 1.0,
        "use_vllm": True, "vllm_mode": "colocate", "logging_steps": 5, "save_strategy": "epoch",
        "report_to": "none"}),
    Script("a monitor as an environment", {
        "output_dir": "safety-monitor-grpo", "num_train_epochs": 1, "learning_rate": 1e-6,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "warmup_steps": 5, "num_generations": 4,
        "max_completion_length": 512, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
        "chat_template_kwargs": {"enable_thinking": False}, "logging_steps": 1, "save_steps": 25,
        "log_completions": True, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "push_to_hub": False},
        trainer={"callbacks": [Callback()], "environment_factory": Callback}),
    Script("a voice", {
        "output_dir": "vocalino", "learning_rate": 1e-5, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "num_generations": 4, "max_completion_length": 1536, "temperature": 0.8,
        "bf16": True, "report_to": "wandb", "remove_unused_columns": False, "use_vllm": True,
        "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 2560,
        "vllm_tensor_parallel_size": 1, "vllm_enable_sleep_mode": True, "top_p": 0.95,
        "generation_kwargs": {"stop_token_ids": [1, 2]}}),
    Script("stops of a text", {
        "output_dir": "out", "logging_steps": 1, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 25,
        "report_to": ["tensorboard"], "log_completions": True, "num_completions_to_print": 0, "use_vllm": True,
        "generation_kwargs": {"stop": ["\nProblem:", "\n\n\n"]}, "vllm_mode": "colocate",
        "vllm_max_model_length": 1024, "vllm_enable_sleep_mode": False}, {
        "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear",
        "bias": "none"}, {"eval_dataset": [{"prompt": "9"}]}),
    Script("molecules", {
        "num_generations": 4, "max_completion_length": 160, "learning_rate": 5e-6, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4}),
    Script("a P100", {
        "output_dir": "out", "num_train_epochs": 1, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "learning_rate": 5e-6, "max_completion_length": 512, "num_generations": 4,
        "logging_steps": 10, "save_steps": 200, "save_total_limit": 2, "bf16": False, "fp16": True,
        "lr_scheduler_type": "cosine", "report_to": "none"}, {
        "r": 16, "lora_alpha": 32, "target_modules": QKVO, "lora_dropout": 0.05, "bias": "none",
        "task_type": "CAUSAL_LM"}),
    Script("a grid world", {
        "output_dir": "./grpo", "run_name": "grpo_qwen2_1.5B", "per_device_train_batch_size": 8,
        "num_train_epochs": 1, "learning_rate": 1e-6, "logging_steps": 1, "gradient_accumulation_steps": 1,
        "save_strategy": "steps", "save_steps": 100, "save_total_limit": 3, "report_to": "wandb",
        "remove_unused_columns": False, "log_completions": True, "num_generations": 8, "temperature": 0.9,
        "max_completion_length": 16, "seed": 1, "beta": 0.1, "loss_type": "grpo", "dataloader_num_workers": 0,
        "wandb_log_unique_prompts": True, "bf16": True, "gradient_checkpointing": True, "weight_decay": 0.01,
        "max_grad_norm": 1.0}),
    Script("tools by sequence", {
        "output_dir": "out", "per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 2048,
        "max_tool_calling_iterations": 10, "learning_rate": 1e-5, "logging_steps": 1, "max_steps": 50,
        "save_strategy": "no", "report_to": [], "bf16": True, "model_init_kwargs": {"dtype": "bfloat16"},
        "gradient_checkpointing": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.55, "vllm_max_model_length": 4096, "temperature": 1.0,
        "loss_type": "dr_grpo", "importance_sampling_level": "sequence", "beta": 0.01,
        "chat_template_kwargs": {"enable_thinking": True}}, {
        "r": 32, "lora_alpha": 64, "lora_dropout": 0.0, "target_modules": ALL_LINEAR, "task_type": "CAUSAL_LM"},
        {"tools": [rollout]}),
    Script("retrieval", {
        "loss_type": "dr_grpo", "gradient_accumulation_steps": 2, "epsilon": 0.1, "output_dir": "out",
        "num_generations": 8, "per_device_train_batch_size": 64, "logging_steps": 5, "save_steps": 25,
        "num_train_epochs": 2, "label_names": ["labels"], "beta": 0.0, "eval_on_start": False, "report_to": "wandb",
        "run_name": "r", "torch_empty_cache_steps": 1, "reward_weights": [0.5], "temperature": 1.0,
        "generation_kwargs": {"temperature": 1.0}, "learning_rate": 3e-5}),
    Script("a reference that moves", {
        "gradient_accumulation_steps": 4, "gradient_checkpointing": False, "learning_rate": 1e-6,
        "weight_decay": 0.1, "adam_beta2": 0.95, "adam_epsilon": 1e-8, "max_grad_norm": 1, "max_steps": 100,
        "lr_scheduler_type": "cosine", "beta": 1, "num_iterations": 4, "epsilon": 0.2,
        "importance_sampling_level": "sequence", "reward_weights": [1], "loss_type": "dr_grpo",
        "mask_truncated_completions": True, "use_vllm": False, "sync_ref_model": True, "ref_model_mixup_alpha": 0.6,
        "disable_dropout": True, "torch_compile": False, "max_completion_length": 256,
        "generation_batch_size": 32}),
    Script("a hammer", {
        "output_dir": "out", "save_total_limit": 8, "num_train_epochs": 10, "weight_decay": 0.0,
        "learning_rate": 1e-5, "loss_type": "dapo", "beta": 0.0, "num_iterations": 1,
        "importance_sampling_level": "sequence", "scale_rewards": "none", "max_completion_length": 128,
        "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 2.0}),
    Script("RLOO with weights", {
        "output_dir": "out", "learning_rate": 0.1, "per_device_train_batch_size": 3, "num_generations": 3,
        "max_completion_length": 8, "report_to": "none", "reward_weights": [0.7]}, method="RLOO"),
    Script("RLOO in short", {
        "output_dir": "rloo_output", "per_device_train_batch_size": 2, "learning_rate": 1e-5,
        "num_train_epochs": 1}, method="RLOO"),
)  # fmt: skip


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Reward short completions."""
    return [-float(len(text)) for text in completions]


def outcome(script: Script, folder: Path) -> Outcome:
    """Give the objects of a script to the translation, and return the outcome of each of its arguments."""
    import peft
    import trl

    kind = getattr(trl, f"{script.method}Config")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    known = {name: value for name, value in script.config.items() if name in fields}
    objects: dict[str, Any] = {
        "model": "org/tiny",
        "reward_funcs": reward,
        "train_dataset": [{"prompt": str(number)} for number in range(32)],
        "args": kind(**{"bf16": False, "use_cpu": True} | known | {"bf16": False}),
        **script.trainer,
    }
    if script.lora is not None:
        objects["peft_config"] = peft.LoraConfig(**{"target_modules": QKVO} | dict(script.lora))

    def write(name: str, ending: str, content: bytes) -> str:
        (folder / f"{name}{ending}").write_bytes(content)
        return str(folder / f"{name}{ending}")

    arguments = {*known, *(script.lora or ()), *script.trainer}
    defaults = {name: fields[name].default for name in known}
    defaults |= {name: getattr(peft.LoraConfig(), name) for name in script.lora or ()}
    unknown = tuple(sorted(set(script.config) - set(known)))
    try:
        made = translated(foreign_of_trainer(script.method, script.name, objects, write))
    except RecipeError as error:
        text = " ".join(error.problems)
        refused = {name for name in arguments if name in text}
        return Outcome((), tuple(sorted(refused)), () if refused else ("everything",), unknown)
    parts: set[str] = set()
    refused = set()
    for setting in made.settings:
        names = {*setting.key.split(".")}
        parts |= names
        if setting.outcome in (BY_HAND, WITHOUT, NOT_READ):
            refused |= names & arguments
    lost = arguments - parts
    values = dict(known) | dict(script.lora or {})
    lost = {name for name in lost if values.get(name) != defaults.get(name, ...) and name not in ("bf16", "report_to")}
    return Outcome(tuple(sorted(arguments - refused - lost)), tuple(sorted(refused)), tuple(sorted(lost)), unknown)


def outcomes() -> Iterator[tuple[Script, Outcome]]:
    """Yield each script with its outcome."""
    with tempfile.TemporaryDirectory() as name:
        for script in SCRIPTS:
            yield script, outcome(script, Path(name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the campaign (none), and its work."""
    parser.set_defaults(work=run)


def run(_: argparse.Namespace) -> int:
    """Print the outcomes; 1 where an argument was lost."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    lost = 0
    for script, result in outcomes():
        lost += len(result.lost)
        refused = f"; refused: {', '.join(result.refused)}" if result.refused else ""
        unknown = f"; not of this TRL: {', '.join(result.unknown_to_trl)}" if result.unknown_to_trl else ""
        print(f"{script.name}: {len(result.translated)} translated{refused}{unknown}")
        if result.lost:
            print(f"  LOST: {', '.join(result.lost)}")
    return int(lost > 0)
