export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
PP=${PP:-2}
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \
    algorithm.adv_estimator=gae data.train_files=math/train.parquet data.train_batch_size=256 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.actor.megatron.use_dist_checkpointing=True \
    actor_rollout_ref.actor.megatron.dist_checkpointing_path=$HOME/dist/actor \
    critic.megatron.use_dist_checkpointing=False critic.megatron.dist_checkpointing_path=$HOME/dist/critic \
    actor_rollout_ref.actor.megatron.param_offload=True \
    actor_rollout_ref.actor.megatron.grad_offload=True \
    actor_rollout_ref.actor.megatron.optimizer_offload=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    critic.megatron.tensor_model_parallel_size=$TP critic.megatron.optimizer_offload=True \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    +algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    +algorithm.rollout_correction.rollout_rs_threshold="0.999_1.001" \
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    trainer.logger=['console'] trainer.n_gpus_per_node=8 trainer.default_local_dir=$HOME/runs/megatron
