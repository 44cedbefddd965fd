#!/usr/bin/env bash
# Trains on this node: with one process per GPU that is visible, in the environment .venv-gpu; without a GPU with NPROC
# processes (default 2), in .venv.
# usage: [NPROC=n] [CUDA_VISIBLE_DEVICES=...] bash launch/local.sh CONFIG [key=value ...]
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    echo "usage: [NPROC=n] bash launch/local.sh CONFIG [key=value ...]; all keys: .venv/bin/megappo plan --keys" >&2
    exit $(($# < 1 ? 2 : 0))
fi
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

remember ${NPROC:+NPROC="$NPROC"} bash launch/local.sh "$@"
# exec: a signal to this script reaches torchrun, which ends its own ranks.
exec "$python" -m megappo train --nproc "$nproc" "$@"
