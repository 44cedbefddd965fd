#!/usr/bin/env bash
# Sets up .venv, then checks style, types and behaviour, on the CPU. Arguments go to pytest.
# What needs a GPU: bash launch/setup.sh gpu, then .venv-gpu/bin/python -m pytest tests/gpu
# usage: bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    echo "usage: bash launch/test.sh [pytest arguments]"
    echo "one folder: tests/ppo; the slow tests, skipped by default: -m slow; all arguments: .venv/bin/python -m pytest --help"
    exit
fi
bash launch/setup.sh
# Tests spawn several processes on few cores.
export OMP_NUM_THREADS=1
# Else the CPU's environment refuses to start ranks where there are GPUs.
export CUDA_VISIBLE_DEVICES=
ours="megappo tests tools configs docs/site.py setup.py"  # and not what users keep here
.venv/bin/python -m ruff check $ours
.venv/bin/python -m ruff format --check --quiet $ours
# Types are checked beside the tests, which wait (for processes to start) more than they compute.
.venv/bin/python -m mypy & types=$!
trap 'kill "$types" 2>/dev/null || true' EXIT
# Two at a time, those that share a costly fixture together.
.venv/bin/python -m pytest --numprocesses 2 --dist loadgroup "$@"
wait "$types" || { echo "error: mypy failed; its output is above" >&2; exit 1; }
