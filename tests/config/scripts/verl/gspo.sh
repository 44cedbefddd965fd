PARAMS=(
    algorithm.adv_estimator=grpo  # group advantages
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.rollout.n=16
    data.train_files=math.parquet
)
python -m verl.trainer.main_ppo "${PARAMS[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8
