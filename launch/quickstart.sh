#!/usr/bin/env bash
# From a fresh clone to a trained model: set-up, a small dataset and checkpoint, then PPO on this machine: on its CPU,
# or, where the first word is gpu, on two of its GPUs, or its only one.
# usage: bash launch/quickstart.sh [gpu] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    echo "usage: bash launch/quickstart.sh [gpu] [key=value ...]"
    echo "all keys, after a first run: .venv/bin/megappo plan --keys"
    exit
fi
source launch/gpus.sh
source launch/waiting.sh
remember bash launch/quickstart.sh "$@"
# The config places everything on two ranks.
export NPROC=${NPROC:-2}
settings=()
if [[ ${1:-} == gpu ]]; then
    shift
    venv=.venv-gpu
    gpus=$(num_gpus)
    if [[ $gpus -eq 1 ]]; then
        NPROC=1
        settings=(placement.actor,critic=0 actor.parallel.tensor=1 critic.parallel.pipeline=1)
    elif [[ $gpus -lt $NPROC ]]; then
        echo "quickstart.sh: expected $NPROC visible GPUs, found $gpus; on the CPU: bash launch/quickstart.sh" >&2
        exit 1
    fi
    # SGLang computes in 16 bits there, and the model's heads are too small for its faster attention.
    settings+=(model.dtype=bf16 rollout.sync.probe_tolerance=0.05 rollout.server_args.attention_backend=triton)
    kind=gpu
else
    venv=.venv
    export CUDA_VISIBLE_DEVICES=
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # with more, a model as small as this is slower
    kind=
fi
# Before the minutes that the set-up takes.
for word in "$@"; do
    if [[ $word != [a-z]*=* ]]; then
        echo "quickstart.sh: found $word, expected key=value, such as trainer.total_steps=10" >&2
        exit 2
    fi
done
# `megappo quickstart` names its own Python, in which all is installed.
python=${MEGAPPO_PYTHON:-$venv/bin/python}
[[ -n ${MEGAPPO_PYTHON:-} ]] || bash launch/setup.sh $kind
check() { "$python" -m megappo plan --world-size "$NPROC" configs/quickstart.yaml "${settings[@]}" "$@" >/dev/null; }
if [[ ! -d outputs/quickstart/model || ! -f outputs/quickstart/val.jsonl ]]; then
    # Report errors in the arguments before making the files that the config names.
    errors=$(check "$@" 2>&1 | grep "^error: " | grep -v " outputs/quickstart/") || true
    if [[ -n $errors ]]; then
        echo "$errors" >&2
        exit 2
    fi
    "$python" tools/make_quickstart.py --output outputs/quickstart --force
fi
# An interrupted run resumes; a finished one makes room for the next.
run=outputs/quickstart/run
if grep -qs '"status": "finished"' "$run/run.json" && [[ " $*" != *" trainer.output_dir="* ]]; then
    kept=$run-$(date -r "$run/run.json" +%Y%m%d-%H%M%S)
    # Report errors in the arguments before moving anything; without a finished run, local.sh reports them.
    waiting "checking configs/quickstart.yaml" check "$@" "trainer.output_dir=$kept"
    flock --nonblock --conflict-exit-code 75 "$run/.lock" mv "$run" "$kept" || {
        [[ $? -ne 75 ]] || echo "quickstart.sh: a run is at work in $run" >&2
        exit 1
    }
    echo "the last run is kept in $kept"
fi
exec bash launch/local.sh configs/quickstart.yaml "${settings[@]}" "$@"
