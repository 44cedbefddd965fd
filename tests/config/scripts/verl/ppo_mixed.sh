# two data sets, whose names are variables
gsm8k=$HOME/data/gsm8k/train.parquet
math="$HOME/data/math/train.parquet"
train_files="['$gsm8k', '$math']"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.gamma=0.99 \
    data.train_files="$train_files" data.train_batch_size=1024 data.return_raw_chat=True \
    actor_rollout_ref.model.path="$HOME/models/Qwen2-7B-Instruct" \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    actor_rollout_ref.rollout.name=sglang \
    critic.ppo_max_token_len_per_gpu=98304 critic.cliprange_value=0.2 \
    algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.type=adaptive \
    algorithm.kl_ctrl.kl_coef=0.01 \
    reward_model.enable=True reward_model.model.path=$HOME/models/RM \
    trainer.logger=console trainer.n_gpus_per_node=4 trainer.nnodes=2 trainer.total_training_steps=100
