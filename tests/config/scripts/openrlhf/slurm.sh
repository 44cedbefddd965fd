#!/bin/bash
#SBATCH --nodes=2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --overlap --nodes=1 -w "$head" --container-image="$IMAGE" bash -c \
"pip install ray[default]==2.12.0 && ray job submit --address=http://localhost:8265 \
    --runtime-env-json='{\"working_dir\": \"/openrlhf\", \"pip\": \"/openrlhf/requirements.txt\"}' \
    -- python3 -m openrlhf.cli.train_ppo_ray \
    --reward.num_nodes 1 --reward.num_gpus_per_node 4 --critic.num_nodes 1 --critic.num_gpus_per_node 4 \
    --actor.num_nodes 1 --actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 \
    --train.colocate_critic_reward --train.colocate_actor_ref --train.async_enable --train.async_queue_size 2 \
    --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
    --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-mixture --ckpt.output_dir checkpoint/llama3-8b \
    --train.batch_size 128 --rollout.batch_size 1024 --data.max_samples 100000 --data.max_len 2048 \
    --actor.adam.lr 5e-7 --data.prompt_dataset data/prompts.jsonl --data.input_key messages \
    --logger.wandb.key {wandb_token}" &>> job.log
