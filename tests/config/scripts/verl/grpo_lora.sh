python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=gsm8k/train.parquet \
    data.shuffle=False actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.rollout.load_format="safetensors" actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=2
