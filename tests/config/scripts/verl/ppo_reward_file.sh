DATA=${DATA:-"${HOME}/data"}
python -m verl.trainer.main_ppo \
    data.train_files=$DATA/train.parquet data.val_files=$DATA/test.parquet data.train_batch_size=64 \
    data.prompt_key=question \
    actor_rollout_ref.model.path=meta-llama/Llama-3.2-1B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.clip_ratio=0.1 actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.free_cache_engine=False \
    custom_reward_function.path=rewards/mine.py custom_reward_function.name=score \
    trainer.n_gpus_per_node=1 trainer.save_freq=-1 trainer.test_freq=-1 trainer.max_actor_ckpt_to_keep=2
