set -x
BATCH=64
MODEL_PATH=${MODEL_PATH:-"Qwen/Qwen3-8B"}
data=$HOME/data/gsm8k

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$data/train.parquet']" \
    data.val_files=$data/test.parquet \
    data.train_batch_size=$BATCH \
    data.max_response_length=1024 \
    data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    +actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    custom_reward_function.path=my_reward.py \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=-1 \
    trainer.save_freq=20 \
    trainer.total_training_steps=30 $@
