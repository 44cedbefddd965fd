#!/usr/bin/env bash
# A teacher's KL in the advantages, without the task's reward.
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl data.val_files=val.jsonl \
    data.train_batch_size=8 data.max_prompt_length=16 data.max_response_length=16 \
    actor_rollout_ref.model.path=student actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    distillation.enabled=True distillation.num_workers=8 distillation.teacher_model.model_path=teacher \
    distillation.teacher_model.inference.tensor_model_parallel_size=2 \
    distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True \
    distillation.distillation_loss.use_task_rewards=False distillation.distillation_loss.distillation_loss_coef=0.5 \
    trainer.n_gpus_per_node=4 trainer.total_training_steps=3 trainer.logger=console
