#!/usr/bin/env bash
# What local.sh and torchrun_node.sh, which source it, know of this machine: $python, of the environment that fits it,
# and $nproc, how many processes to start: one per visible GPU, in .venv-gpu; without a GPU 2, in .venv. NPROC goes
# before both numbers.

# Files of the working folder must not hide modules, by their names or by an empty part of PYTHONPATH.
export PYTHONSAFEPATH=1
PYTHONPATH=$(tr ':' '\n' <<<"${PYTHONPATH-}" | sed '/^$/d' | paste -sd :)
[[ -n $PYTHONPATH ]] && export PYTHONPATH || unset PYTHONPATH

refuse() {
    echo "$name: $*" >&2
    exit 2
}

# usage: whole NAME LEAST MOST: the variable NAME, which is set, must be such a number
whole() {
    [[ ${!1} =~ ^(0|[1-9][0-9]{0,5})$ && ${!1} -ge $2 && ${!1} -le $3 ]] ||
        refuse "the variable $1 is '${!1}': expected a whole number from $2 to $3"
}

# The oldest driver that CUDA 13 supports; the check is skipped where nvidia-smi gives no version.
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
source "$repository/launch/gpus.sh"
source "$repository/launch/waiting.sh"
gpus=$(num_gpus)
if [[ $gpus -eq 0 && ! ${CUDA_VISIBLE_DEVICES--1} =~ ^(-1|none|void|NoDevFiles)?$ ]]; then
    echo "$name: CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' names no GPU: using the CPU" >&2
fi
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
python=${MEGAPPO_PYTHON:-$python}  # set by `megappo quickstart`
if [[ ! -x $python ]]; then
    echo "$name: $python does not exist; $remedy" >&2
    exit 1
fi
[[ -z ${NPROC:-} ]] || whole NPROC 1 100000
nproc=${NPROC:-$((gpus > 0 ? gpus : 2))}
