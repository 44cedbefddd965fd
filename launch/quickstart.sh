#!/usr/bin/env bash
# From a fresh clone to a trained model: set-up, a small dataset and checkpoint, then PPO on this machine.
# usage: bash launch/quickstart.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
if [[ ! -d outputs/quickstart/model || ! -f outputs/quickstart/val.jsonl ]]; then
    .venv/bin/python tools/make_quickstart.py --output outputs/quickstart --force
fi
# An interrupted run goes on; a finished one makes room for the next.
run=outputs/quickstart/run
# Before anything is moved: what is wrong with the arguments, or --help.
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec .venv/bin/python -m megappo.plan --help
fi
if [[ -f $run/report.html && " $*" != *" trainer.output_dir="* ]]; then
    .venv/bin/python -m megappo.plan --world-size "${NPROC:-2}" configs/quickstart.yaml "$@" > /dev/null
    kept=$run-$(date -r "$run/report.html" +%Y%m%d-%H%M%S)
    mv "$run" "$kept"
    echo "the last run is kept in $kept"
fi
# The config places everything on two ranks.
NPROC=${NPROC:-2} exec bash launch/local.sh configs/quickstart.yaml "$@"
