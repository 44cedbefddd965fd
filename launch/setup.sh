#!/usr/bin/env bash
# Creates an environment at the repository root and installs the pinned packages into it: .venv, which runs everything
# on the CPU, or .venv-gpu, for CUDA. The two stand side by side. A second run returns at once.
# usage: bash launch/setup.sh [cpu|gpu]     default: cpu
# environment:
#   PYTHON         the interpreter (3.11 or newer)
#   PYTORCH_INDEX  a mirror of PyTorch's package index, with its folders cpu and cu130. It is used for torch and the
#                  packages built with it only, and only where pip, as configured, finds no suitable build
#   TRANSFORMER_ENGINE=no   gpu without it: the slower torch layers; by default, failing to build it is an error
#   CUDA_HOME      a CUDA 13 toolkit, with nvcc, to build it with (default: pip's own, in .venv-gpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pytorch_index=${PYTORCH_INDEX:-https://download.pytorch.org/whl}
kind=${1:-cpu}
if [[ $kind == -h || $kind == --help ]]; then
    sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' launch/setup.sh
    exit
fi
build_te=${TRANSFORMER_ENGINE:-yes}
venv=.venv
[[ $kind == gpu ]] && venv=.venv-gpu
stamp=$venv/setup-stamp
torchvision_hook=megappo/runtime/torchvision_on_cpu.py
log=$venv/setup.log
# Containers pin the torch they ship by it; this environment has its own pins.
unset PIP_CONSTRAINT
# Else pip looks itself up as well.
export PIP_DISABLE_PIP_VERSION_CHECK=1

source launch/waiting.sh

log() { echo "setup: $*"; }

fail() {
    echo "setup: $*" >&2
    exit 1
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

run_logged() { "$@" >>"$log" 2>&1; }

# pip fetches all packages, then installs them.
describe_wait() {
    local fetched installed all
    [[ $1 == packages ]] || { echo "setup: $1" && return; }
    fetched=$(grep -c '^Collecting ' "$log" 2>/dev/null) || true
    installed=$(compgen -G "$venv/lib/python*/site-packages/*.dist-info" | wc -l)
    all=$(cat requirements.txt "requirements-$kind.txt" requirements-dev.txt | grep -c '^[a-z].*==')
    echo "setup: $1 ($fetched of $all fetched, $installed installed)"
}

pip_install() {
    waiting packages run_logged "$venv/bin/python" -m pip install --progress-bar off --no-compile "$@" || {
        tail -n 15 "$log" >&2
        fail "pip failed, see above and $log. Check the network, pip's configuration and the free disk (3 GB), then run again:" \
            "what is installed already stays"
    }
}

compile_all() {
    # On all cores, where pip would use one. Packages hold a few files for other Pythons, whose errors do not matter.
    waiting bytecode run_logged "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" || true
}

# The version that this kind's requirements pin.
pin() { sed -n "s/^$1==//p" "requirements-$kind.txt"; }

# Packages for GPUs whose Python code tests on a CPU read.
contract() { grep -E '^(transformer-engine|sgl-deep-ep)==' requirements-gpu.txt; }

# usage: finds NAME VERSION [pip options]: whether pip finds that very build, for this machine; soon where no index answers.
finds() {
    local answer
    answer=$(PIP_QUIET=0 "$venv/bin/python" -m pip index versions "$1" --retries 1 --timeout 5 "${@:3}" 2>>"$log") || return
    sed -n 's/^Available versions: //p' <<<"$answer" | tr -d ' ' | tr ',' '\n' | grep -xF "$2" >/dev/null
}

# True if an earlier set-up installed it: then no index is queried again.
has_torch() {
    local name version
    for name in torch torchvision; do
        version=$(pin $name)
        compgen -G "$venv/lib/python*/site-packages/$name-${version%+cpu}*.dist-info" >/dev/null || return
    done
}

# usage: install_from_pytorch FOLDER NAME==VERSION...: the first of them is torch
install_from_pytorch() {
    local index=$pytorch_index/$1 version=${2#torch==}
    shift
    finds torch "$version" --index-url "$index" ||
        fail "found no torch $version for $("$venv/bin/python" --version), neither where pip is configured to look ('pip config list'," \
            "PIP_INDEX_URL) nor at $index; their output is in $log. Check the network. Behind a firewall set PYTORCH_INDEX" \
            "to a mirror of $pytorch_index, or PIP_FIND_LINKS to a folder that holds the wheel"
    log "taking torch $version from $index"
    pip_install --no-deps --index-url "$index" "$@"
}

install_cpu_torch() {
    local torch vision
    torch=$(pin torch) vision=$(pin torchvision)
    if ! finds torch "$torch"; then
        install_from_pytorch cpu "torch==$torch" "torchvision==$vision"
    elif finds torchvision "$vision"; then
        pip_install --no-deps "torch==$torch" "torchvision==$vision"
    else
        vision=${vision%+cpu}
        log "pip finds no CPU build of torchvision $vision: taking the one for CUDA, which also works here"
        pip_install --no-deps "torch==$torch" "torchvision===$vision"
    fi
}

install_cpu() {
    log "installing about 140 packages for a CPU (1 to 3 minutes; log: $log)"
    { has_torch && ! is_torch_for_cuda; } || install_cpu_torch
    pip_install --no-deps -r requirements.txt -r <(grep -Ev '^(torch|torchvision)==' requirements-cpu.txt) -r requirements-dev.txt
    install_torchvision_hook
    # Their Python alone, in a folder that no run looks in: tests hold the program against it.
    rm -rf "$venv/contract"
    pip_install --no-deps --target "$venv/contract" -r <(contract)
}

# Lets every process import a torchvision for CUDA beside a torch for a CPU.
install_torchvision_hook() {
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$torchvision_hook" "$site/"
    echo "import torchvision_on_cpu; torchvision_on_cpu.define_torchvision_operators()" >"$site/torchvision_on_cpu.pth"
}

# Read without importing torch, which fails where CUDA's libraries lack.
is_torch_for_cuda() {
    "$venv/bin/python" -c '
import importlib.util, pathlib, runpy, sys
version = runpy.run_path(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py"))
sys.exit(version["cuda"] is None)'
}

install_cuda_torch() {
    local name plain=() cuda=()
    for name in torch torchvision torchaudio; do
        # PyPI's builds for CUDA have plain versions. === takes these alone, where pip may be configured for CPU wheels.
        plain+=("$name===$(pin $name)") cuda+=("$name==$(pin $name)+cu130")
    done
    if finds torch "$(pin torch)"; then
        pip_install --no-deps "${plain[@]}"
        is_torch_for_cuda && return
        log "the torch that pip finds is built for a CPU"
    fi
    install_from_pytorch cu130 "${cuda[@]}"
}

# usage: refuse MISSING...: ends the set-up, unless nothing is
refuse() {
    (($# == 0)) || fail "this machine cannot run what $venv is for:$(printf '\n  %s' "$@")"
}

# usage: require_machine PYTHON: what SGLang's wheels, the build, and kernels that are compiled at run time need.
require_machine() {
    local missing=() glibc
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2) || true
    printf '2.34\n%s\n' "${glibc:-none}" | sort -VC ||
        missing+=("expected glibc 2.34 or newer, found ${glibc:-none}: take Ubuntu 22.04, Debian 12, RHEL 9 or a later one")
    command -v "${CXX:-c++}" >/dev/null ||
        missing+=("no C++ compiler ${CXX:-c++}: apt-get install g++ (RHEL: dnf install gcc-c++), or name one: CXX=/path/to/g++")
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        missing+=("no Python.h for $1: apt-get install python3-dev (RHEL: dnf install python3-devel), or name another: PYTHON=")
    "$1" -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || command -v "${CARGO:-cargo}" >/dev/null ||
        missing+=("no wheel of outlines_core for $("$1" --version), and no Rust to build it: PYTHON=python3.12, or install cargo")
    refuse "${missing[@]}"
}

any_file() {
    local path
    for path; do [[ -f $path ]] && return; done
    return 1
}

nvidia_wheels() {
    "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")'
}

# Kernels that SGLang compiles at run time are linked with lib64/libcudart.so, which pip's toolkit calls otherwise, and
# with lib64/stubs/libcuda.so, which it lacks: an empty library by the name of the driver's, found when they are loaded.
link_cuda_runtime() {
    local home
    home=$(nvidia_wheels)/cu13
    [[ -d $home/lib ]] || return 0
    ln -sfn lib "$home/lib64"
    ln -sf libcudart.so.13 "$home/lib/libcudart.so"
    mkdir -p "$home/lib/stubs"
    "${CXX:-c++}" -shared -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so" -x c++ /dev/null ||
        fail "${CXX:-c++} cannot link a shared library: see above"
}

# Where TransformerEngine's build, which looks into one folder at most, finds headers that pip keeps in three.
find_cuda() {
    local wheels header missing=() folders
    wheels=$(nvidia_wheels)
    export CUDA_HOME=${CUDA_HOME:-$wheels/cu13}
    export CPLUS_INCLUDE_PATH=${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$wheels/cu13/include
    CPLUS_INCLUDE_PATH+=:$wheels/cudnn/include:$wheels/nccl/include
    [[ -x $CUDA_HOME/bin/nvcc ]] ||
        missing+=("no nvcc in $CUDA_HOME/bin: name a CUDA 13 toolkit: CUDA_HOME=/usr/local/cuda-13.0")
    IFS=: read -ra folders <<<"$CUDA_HOME/include:$CPLUS_INCLUDE_PATH"
    for header in cuda_runtime.h cudnn.h nccl.h; do
        any_file "${folders[@]/%//$header}" ||
            missing+=("no $header in ${folders[*]}: name a folder that has it: CPLUS_INCLUDE_PATH=/path/to/include")
    done
    ((${#missing[@]} == 0)) || missing+=("or do without TransformerEngine: TRANSFORMER_ENGINE=no bash launch/setup.sh gpu")
    refuse "${missing[@]}"
}

install_gpu() {
    log "installing the CUDA packages (10 to 20 minutes; log: $log)"
    { has_torch && is_torch_for_cuda; } || install_cuda_torch
    # With torch there, whichever build of it, pip keeps it.
    pip_install -c requirements-gpu.txt -r requirements.txt -r requirements-dev.txt sglang fla-core pybind11 ninja wheel
    link_cuda_runtime
    if [[ $build_te == no ]]; then
        log "leaving out TransformerEngine, as requested: model.layer_spec auto takes the slower torch layers"
        return
    fi
    find_cuda
    log "building TransformerEngine with $CUDA_HOME/bin/nvcc"
    # It compiles against the torch just installed, hence no build isolation.
    (pip_install --no-build-isolation -c requirements-gpu.txt transformer-engine{,-cu13,-torch}) ||
        fail "TransformerEngine was not built. To do without it, with slower layers:" \
            "TRANSFORMER_ENGINE=no bash launch/setup.sh gpu"
}

main() {
    exec 9<.
    flock 9 || fail "cannot lock this folder"
    [[ $kind == cpu || $kind == gpu ]] || fail "expected cpu or gpu, found '$kind'"
    local wanted
    wanted="$kind $(cat setup.py "$torchvision_hook" requirements.txt requirements-dev.txt "requirements-$kind.txt" <(contract) | sha256sum | cut -d ' ' -f 1)"
    [[ $build_te == no ]] && wanted+=" without TransformerEngine"
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return

    local python clear=()
    python=$(find_python)
    [[ $kind == cpu ]] || require_machine "$python"
    # The two kinds share no torch: start over where .venv is for CUDA, as it once could be.
    [[ -f $stamp && $(cut -d ' ' -f 1 "$stamp") != "$kind" ]] && clear=(--clear)
    log "creating $venv with $("$python" --version)"
    "$python" -m venv "${clear[@]}" "$venv"
    rm -f "$stamp"
    "install_$kind"
    compile_all
    pip_install --no-deps --no-build-isolation -e .
    echo "$wanted" >"$stamp"
    log "done"
}

main
