python3 -m verl.trainer.main_ppo data.train_files=train.jsonl data.val_files=val.jsonl data.train_batch_size=8 \
    data.max_prompt_length=16 data.max_response_length=16 actor_rollout_ref.model.path=model critic.model.path=model \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    critic.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 custom_reward_function.path=mine.py \
    trainer.n_gpus_per_node=4 trainer.total_training_steps=3 trainer.logger=console
