#!/bin/bash
WORK_DIR=$(cd "$(dirname "$0")/../.." && pwd)
MODEL_PATH="Qwen/Qwen3-4B-Thinking-2507"
ROLLOUT_ARGS=(
   --data.prompt_dataset dapo/math.parquet
   # --reward.remote_url other.py
   --data.label_key label
   --rollout.batch_size 128
   --rollout.n_samples_per_prompt 8
   --train.batch_size 1024
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.0 1.0
)
python3 -m openrlhf.cli.train_ppo_ray ${ROLLOUT_ARGS[@]} \
   --actor.model_name_or_path ${MODEL_PATH} --ckpt.output_dir ${WORK_DIR}/exp \
   --train.agent_func_path agent.py --train.colocate_all --actor.num_gpus_per_node 4 \
   --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --ds.ring_attn_size 2 \
   --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 \
   --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
   --actor.eps_clip_low_high 0.2 0.27 --eval.steps -1 --logger.wandb.key KEY
