"""Keys of TRL 1.16, verl, prime-rl, vLLM and PEFT: their names in a recipe, or why a recipe has no such key."""

from __future__ import annotations

from streamrl.recipe.fields import as_written
from streamrl.recipe.sections import Recipe

BATCH = "rollout.prompts_per_batch (x rollout.group_size = trajectories of a step)"
STEPS = "run.steps (optimizer steps; prompts are drawn again, epoch after epoch)"
PLACED = "training.ranks, engines.count and engines.tensor_parallel_size"
PACKED = "training.micro_batch_tokens (rows are packed by tokens)"
TRACKER = "-ten lines of Python hand the metrics socket to a tracker (docs/metrics.md); RUN/metrics.jsonl has them too"
STOPS = "-a completion ends with the model's end-of-sequence tokens or at sampling.max_tokens"
NUCLEUS = "-sampling has temperature and top_p, which the trainer reproduces exactly"
CONSTANT = "-the rate is constant after training.warmup_steps"
SLEEP = "-engines and trainer have GPUs of their own, or a share of one: engines.gpu_memory_utilization"
MIXED = "training.compute_dtype and engines.dtype"
COLUMN = 'part of prompts.train ("FILE?prompt=COLUMN")'
FULL = "-weights are trained and served as the model directory has them; lora.rank trains adapters"

FOREIGN_KEYS: dict[str, str] = {
    # TRL
    "num_generations": "rollout.group_size",
    "generation_batch_size": BATCH,
    "per_device_train_batch_size": PACKED,
    "gradient_accumulation_steps": PACKED,
    "steps_per_generation": "training.updates_per_batch",
    "num_iterations": "training.epochs_per_batch",
    "num_ppo_epochs": "training.epochs_per_batch",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "-prompts are never cut; engines.max_model_len bounds prompt and completion together",
    "beta": "objective.kl_coefficient",
    "epsilon": "objective.clip_low and objective.clip_high",
    "epsilon_high": "objective.clip_high",
    "delta": "objective.dual_clip",
    "loss_type": "objective.algorithm, or objective.loss_normalization alone",
    "scale_rewards": "objective.advantages",
    "importance_sampling_level": 'objective.surrogate ("sequence_clip")',
    "use_bias_correction_kl": "objective.kl_estimator",
    "mask_truncated_completions": "objective.train_truncated",
    "entropy_coef": "objective.entropy_coefficient",
    "reward_weights": "rewards.N.weight",
    "reward_funcs": "rewards.N.function",
    "vllm_importance_sampling_correction": "off_policy.correct_mismatch",
    "vllm_importance_sampling_mode": "off_policy.truncate and off_policy.mask",
    "vllm_gpu_memory_utilization": "engines.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "engines.tensor_parallel_size",
    "vllm_mode": SLEEP,
    "use_vllm": "engines.kind",
    "log_completions": "-every run keeps some: streamrl samples RUN",
    "report_to": TRACKER,
    "logging_steps": "-every step is written",
    "lr": "training.learning_rate",
    "lr_scheduler_type": CONSTANT,
    "warmup_ratio": "training.warmup_steps",
    "num_train_epochs": STEPS,
    "max_steps": "run.steps",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "run.directory",
    "resume_from_checkpoint": "checkpoint.resume_from (a new run), or streamrl resume RUN (the same run)",
    "optim": "training.optimizer",
    "adam_beta1": "training.beta1",
    "adam_beta2": "training.beta2",
    "gradient_checkpointing": "training.activation_checkpointing",
    "bf16": MIXED,
    "fp16": MIXED,
    "torch_dtype": MIXED,
    "load_in_4bit": FULL,
    "load_in_8bit": FULL,
    "model_name_or_path": "model.path",
    "dataset_name": "prompts.train",
    "column": COLUMN,
    "eval_steps": "evaluation.every",
    "push_to_hub": "-RUN/checkpoints/step-N/hf is a Hugging Face directory to upload",
    # verl
    "n": "rollout.group_size",
    "train_batch_size": BATCH,
    "ppo_mini_batch_size": "training.updates_per_batch",
    "ppo_micro_batch_size_per_gpu": PACKED,
    "ppo_max_token_len_per_gpu": PACKED,
    "ppo_epochs": "training.epochs_per_batch",
    "max_response_length": "sampling.max_tokens",
    "train_files": "prompts.train",
    "prompt_key": COLUMN,
    "val_files": "evaluation.prompts",
    "adv_estimator": "objective.algorithm, or objective.advantages alone",
    "norm_adv_by_std_in_grpo": "objective.advantages",
    "use_kl_loss": "objective.kl_coefficient",
    "kl_loss_coef": "objective.kl_coefficient",
    "kl_coef": 'objective.kl_coefficient, with objective.kl_in = "reward"',
    "use_kl_in_reward": "objective.kl_in",
    "kl_loss_type": "objective.kl_estimator",
    "clip_ratio": "objective.clip_low and objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_c": "objective.dual_clip",
    "entropy_coeff": "objective.entropy_coefficient",
    "loss_agg_mode": "objective.loss_normalization",
    "loss_mode": "objective.surrogate",
    "critic.model.path": 'objective.value_model ("own"), a copy of model.path',
    "critic.optim.lr": "objective.value_learning_rate",
    "lam": "objective.gae_lambda",
    "gamma": "objective.discount",
    "cliprange_value": "objective.value_clip",
    "rollout_is": "off_policy.truncate",
    "rollout_is_threshold": "off_policy.cap",
    "rollout_rs": "off_policy.mask",
    "filter_groups": "rollout.dynamic_sampling",
    "custom_reward_function": "rewards.N.function",
    "tensor_model_parallel_size": "engines.tensor_parallel_size",
    "n_gpus_per_node": PLACED,
    "nnodes": PLACED,
    "total_epochs": STEPS,
    "total_training_steps": "run.steps",
    "test_freq": "evaluation.every",
    "save_freq": "checkpoint.every",
    "val_before_train": "evaluation.at_start",
    "default_local_dir": "run.directory",
    "experiment_name": "run.name",
    "project_name": "run.name",
    "logger": TRACKER,
    "free_cache_engine": SLEEP,
    "param_offload": 'training.optimizer ("adamw_offloaded")',
    "optimizer_offload": 'training.optimizer ("adamw_offloaded")',
    # prime-rl
    "rollouts_per_example": "rollout.group_size",
    "batch_size": BATCH,
    "max_async_level": 'rollout.max_staleness, with rollout.rounds = "continuous"',
    "max_off_policy_steps": "rollout.max_staleness",
    "seq_len": "engines.max_model_len",
    "wandb": TRACKER,
    # vLLM
    "pipeline_parallel_size": "-an engine is tensor-parallel on one host: engines.tensor_parallel_size, engines.count",
    "data_parallel_size": "engines.count",
    "enforce_eager": "-on a CPU engines are eager, on CUDA they use graphs",
    "quantization": FULL,
    "kv_cache_dtype": "-the KV cache has engines.dtype",
    "enable_prefix_caching": "-always on: the siblings of a group share their prompt",
    "max_new_tokens": "sampling.max_tokens",
    "stop": STOPS,
    "stop_token_ids": STOPS,
    "top_k": NUCLEUS,
    "min_p": NUCLEUS,
    "repetition_penalty": NUCLEUS,
    # PEFT
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    "lora_dropout": "-adapters are trained without dropout: the policy that is trained is the policy that sampled",
}
"""By the last part of a key, or the last parts. An answer that begins with ``-`` says why there is no such key."""


def foreign_answer(key: str) -> str:
    """Return the name of another system's key here, or why there is none; empty for a key that no system has."""
    parts = key.replace("-", "_").lower().split(".")
    names = (".".join(parts[start:]) for start in range(len(parts)))  # the whole key first: critic.optim.lr is no lr
    answer = next((FOREIGN_KEYS[name] for name in names if name in FOREIGN_KEYS), "")
    answer = as_written(Recipe, answer)
    if answer.startswith("-"):
        return f"there is no such key here: {answer[1:]}"
    return f"that is {answer} here" if answer else ""
