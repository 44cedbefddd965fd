python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo data.train_files=gsm8k/train.parquet \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.rollout.n=4 \
    algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 critic.optim.lr=1e-5 \
    actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=8 trainer.test_freq=5 trainer.colour=red
