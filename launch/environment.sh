#!/usr/bin/env bash
# What local.sh and torchrun_node.sh, which source it, know of this machine: $python, of the environment that fits it,
# and $nproc, how many processes to start: one per visible GPU, in .venv-gpu; without a GPU 2, in .venv. NPROC goes
# before both numbers.

num_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
    else
        { nvidia-smi -L 2>/dev/null || true; } | wc -l
    fi
}

# The driver that CUDA 13 needs; without a word where nvidia-smi gives no version.
least_driver=580
check_driver() {
    local driver
    driver=$({ nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true; } | head -n 1)
    [[ $driver =~ ^([0-9]+)\. && ${BASH_REMATCH[1]} -lt $least_driver ]] || return 0
    echo "$name: the driver of this machine's GPUs is $driver, but CUDA 13 needs $least_driver or newer: update it; or, to" \
        "use the CPU, hide them: CUDA_VISIBLE_DEVICES= bash launch/$name ..." >&2
    exit 1
}

name=$(basename "$0")
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
gpus=$(num_gpus)
if [[ $gpus -eq 0 ]]; then
    python=$repository/.venv/bin/python
    remedy="run: bash launch/setup.sh"
else
    check_driver
    # Tensor parallelism overlaps communication and computation only in this order of kernels.
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    python=$repository/.venv-gpu/bin/python
    remedy="to use the $gpus GPUs that are visible, run: bash launch/setup.sh gpu; to use the CPU, hide them:"
    remedy+=" CUDA_VISIBLE_DEVICES= bash launch/$name ..."
fi
if [[ ! -x $python ]]; then
    echo "$name: $python does not exist; $remedy" >&2
    exit 1
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
