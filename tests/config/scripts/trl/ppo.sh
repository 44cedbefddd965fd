accelerate launch --config_file zero2.yaml --num_processes 4 \
    examples/scripts/ppo/ppo_tldr.py \
    --dataset_name trl-lib/tldr \
    --output_dir models/ppo_tldr \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 4 \
    --num_mini_batches 2 \
    --total_episodes 1000000 \
    --sft_model_path my/sft \
    --reward_model_path my/reward \
    --missing_eos_penalty 1.0 \
    --eval_strategy steps \
    --eval_steps 100
