trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/DeepMath-103K \
    --reward_funcs accuracy_reward my_lib.rewards.brief --reward_weights 1.0 0.1 \
    --output_dir grpo-out --learning_rate=1e-5 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \
    --num_generations 4 --max_completion_length 1024 --loss_type dr_grpo --beta 0.04 --num_iterations 2 \
    --use_peft --lora_target_modules "q_proj", "v_proj" --use_vllm --vllm_mode colocate --report_to none --max_steps 200
