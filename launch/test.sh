#!/usr/bin/env bash
# Sets up .venv, then checks style, types and behaviour, on the CPU. Arguments go to pytest.
# What needs a GPU: bash launch/setup.sh gpu, then .venv-gpu/bin/python -m pytest tests/gpu
# usage: bash launch/test.sh [--all | pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    echo "usage: bash launch/test.sh [--all | pytest arguments]"
    echo "one folder: tests/ppo; the slow tests, skipped by default: -m slow; all arguments: .venv/bin/python -m pytest --help"
    echo "--all: the suite, then all slow tests, file by file: hours. Started again, it skips files that have passed"
    exit
fi
with_slow=false
[[ $* == --all ]] && with_slow=true && shift
bash launch/setup.sh

# Tests of the reports drive a browser that CHROMIUM or PATH names. Without one they are skipped, with the reason.
install_chromium() {
    [[ -z ${CHROMIUM:-} ]] || return 0
    command -v chromium google-chrome >/dev/null && return
    if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
        echo "test: found no chromium: the tests of reports in a browser are skipped. Install it (Debian: apt-get install chromium)"
        return
    fi
    echo "test: installing chromium for the tests of reports in a browser"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium; } >/dev/null ||
        echo "test: apt-get did not install chromium: the tests of reports in a browser are skipped"
}
install_chromium
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
# Two at a time; tests that share a costly fixture run in one process.
.venv/bin/python -m pytest --numprocesses 2 --dist loadgroup "$@"
wait "$types" || { echo "error: mypy failed; its output is above" >&2; exit 1; }
if $with_slow; then .venv/bin/python tests/slow_runs.py; fi
