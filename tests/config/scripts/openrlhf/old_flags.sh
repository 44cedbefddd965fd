python3 -m openrlhf.cli.train_ppo_ray --pretrain meta-llama/Llama-3.2-1B --prompt_data data/prompts.jsonl \
   --remote_rm_url rewards.py --save_path out --advantage_estimator group_norm --n_samples_per_prompt 4 \
   --rollout_batch_size 64 --train_batch_size 64 --actor_learning_rate 1e-6 --init_kl_coef 0 \
   --colocate_all_models --actor_num_gpus_per_node 2 --vllm_tensor_parallel_size 1 --num_episodes 2
