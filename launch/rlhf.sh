#!/usr/bin/env bash
# Reinforcement learning from human feedback on this machine's CPU, from a fresh clone: supervised fine-tuning on
# demonstrations, a reward model on preferences, PPO on its scores with and without a KL penalty, and at the end the
# rule behind the preferences as the judge. Repeat the command to resume; remove outputs/rlhf to begin again.
# usage: bash launch/rlhf.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -gt 0 ]]; then
    echo "usage: bash launch/rlhf.sh; the settings are in configs/rlhf_{sft,reward_model,ppo}.yaml"
    [[ $1 == --help || $1 == -h ]]
    exit
fi
source launch/waiting.sh
remember bash launch/rlhf.sh
export NPROC=2 CUDA_VISIBLE_DEVICES=
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # with more, a model as small as this is slower
python=.venv/bin/python
bash launch/setup.sh
[[ -d outputs/rlhf ]] || "$python" tools/make_rlhf.py --output outputs/rlhf
"$python" -m megappo sft configs/rlhf_sft.yaml
"$python" -m megappo reward-model configs/rlhf_reward_model.yaml
"$python" -m megappo train configs/rlhf_ppo.yaml
without_kl="algorithm.kl_ctrl.kl_coef=0 trainer.output_dir=outputs/rlhf/ppo_without_kl"
"$python" -m megappo train configs/rlhf_ppo.yaml $without_kl
"$python" tools/show_rlhf.py outputs/rlhf
