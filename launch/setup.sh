#!/usr/bin/env bash
# Creates .venv at the repository root and installs the pinned packages into it. A second run returns at once.
# usage: bash launch/setup.sh [cpu|gpu]     default: what .venv already holds, else gpu where nvidia-smi finds one
# environment: PYTHON names the interpreter (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/setup-stamp
log=.venv/setup.log

say() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
}

kind_of_machine() {
    if [[ -f $stamp ]]; then
        cut -d ' ' -f 1 "$stamp"
    elif nvidia-smi -L >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "found no Python 3.11 or newer with the venv module. Install it (Debian: apt-get install python3 python3-venv)" \
        "or name one: PYTHON=/path/to/python3.11 bash launch/setup.sh"
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile "$@" >>"$log" 2>&1 || {
        tail -n 15 "$log" >&2
        fail "pip failed, see above and $log. Check the network, pip's configuration and the free disk (3 GB), then run again:" \
            "what is installed already stays"
    }
}

compile_all() {
    say "compiling them to bytecode"
    # On all cores, where pip would use one. Packages hold a few files for other Pythons, whose errors do not matter.
    .venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true
}

# The CUDA version torch was built for, or None; read without importing torch, which fails where CUDA's libraries lack.
torch_cuda() {
    .venv/bin/python -c '
import importlib.util, pathlib, runpy
print(runpy.run_path(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py"))["cuda"])'
}

install_cpu() {
    say "installing about 140 packages for a CPU (1 to 3 minutes; log: $log)"
    pip_install --no-deps -r requirements.txt -r requirements-cpu.txt -r requirements-dev.txt
    [[ $(torch_cuda) == None ]] || fail "pip chose a torch built for CUDA, expected the CPU build. Point pip at PyTorch's" \
        "CPU wheels (PIP_EXTRA_INDEX_URL; pytorch.org, 'Get Started', names the index), delete .venv and run again"
}

install_gpu() {
    say "installing the CUDA packages (10 to 20 minutes; log: $log)"
    pip_install -c requirements-gpu.txt -r requirements.txt -r requirements-dev.txt sglang torch pybind11 ninja wheel
    [[ $(torch_cuda) != None ]] || fail "pip chose a CPU build of torch, expected one for CUDA. Take PyTorch's CPU wheels out of" \
        "pip's configuration (PIP_EXTRA_INDEX_URL), delete .venv and run again"
    say "building TransformerEngine"
    # It compiles against the torch just installed, hence no build isolation.
    (pip_install --no-build-isolation -c requirements-gpu.txt transformer-engine{,-cu13,-torch}) ||
        say "WARNING: continuing without TransformerEngine: model.layer_spec auto takes the slower torch layers." \
            "To have it, install nvcc and cuDNN, delete $stamp and run again"
}

main() {
    exec 9<.
    flock 9 || fail "cannot lock this folder"
    local kind wanted
    kind=${1:-$(kind_of_machine)}
    [[ $kind == cpu || $kind == gpu ]] || fail "expected cpu or gpu, found '$kind'"
    wanted="$kind $(cat setup.py requirements.txt requirements-dev.txt "requirements-$kind.txt" | sha256sum | cut -d ' ' -f 1)"
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return

    local python clear=()
    python=$(find_python)
    # The two kinds share no torch: start over when the kind changes.
    [[ -f $stamp && $(cut -d ' ' -f 1 "$stamp") != "$kind" ]] && clear=(--clear)
    say "creating .venv with $("$python" --version)"
    "$python" -m venv "${clear[@]}" .venv
    rm -f "$stamp"
    "install_$kind"
    compile_all
    pip_install --no-deps --no-build-isolation -e .
    echo "$wanted" >"$stamp"
    say "done"
}

main "$@"
