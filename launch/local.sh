#!/usr/bin/env bash
# Trains on this node: with one process per GPU that is visible, in the environment .venv-gpu; without a GPU with NPROC
# processes (default 2), in .venv.
# usage: [NPROC=n] [CUDA_VISIBLE_DEVICES=...] bash launch/local.sh CONFIG [key=value ...]
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    echo "usage: [NPROC=n] bash launch/local.sh CONFIG [key=value ...]; all keys: python -m megappo.plan --help" >&2
    exit $(($# < 1 ? 2 : 0))
fi

num_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
    else
        { nvidia-smi -L 2>/dev/null || true; } | wc -l
    fi
}

gpus=$(num_gpus)
if [[ $gpus -eq 0 ]]; then
    # One thread a rank: ranks and the engine share the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    python=$repository/.venv/bin/python
    remedy="run: bash launch/setup.sh"
else
    # Tensor parallelism overlaps communication and computation only in this order of kernels.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    python=$repository/.venv-gpu/bin/python
    remedy="to use the $gpus GPUs that are visible, run: bash launch/setup.sh gpu; to use the CPU, hide them:"
    remedy+=" CUDA_VISIBLE_DEVICES= bash launch/local.sh ..."
fi
if [[ ! -x $python ]]; then
    echo "local.sh: $python does not exist; $remedy" >&2
    exit 1
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}

# What is wrong with config, data or reward function is told now, not after every rank has imported the program.
echo "checking $1"
"$python" -m megappo.plan --world-size "$nproc" "$@" > /dev/null
# exec: a signal to this script reaches torchrun, which ends its own ranks.
exec "$python" -m megappo.torchrun --standalone --nproc-per-node "$nproc" -m megappo.train "$@"
