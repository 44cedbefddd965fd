#!/usr/bin/env bash
# Trains on several nodes without SLURM: run it on each of them at about the same time, with the same CONFIG and
# variables except NODE_RANK. Like local.sh, it starts one process per visible GPU; NPROC, the same on all, overrides it.
# Variables that are not set default to torchrun's own: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
# usage: NODE_RANK=0 NNODES=2 MASTER_ADDR=HEAD [MASTER_PORT=29500] [NPROC=n] bash launch/torchrun_node.sh CONFIG [key=value ...]
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    echo "usage: NODE_RANK=0 NNODES=2 MASTER_ADDR=HEAD [MASTER_PORT=29500] [NPROC=n]" \
        "bash launch/torchrun_node.sh CONFIG [key=value ...]" >&2
    exit $(($# < 1 ? 2 : 0))
fi
require() {  # VARIABLE MEANING
    local of_torchrun=PET_$1
    export "$1=${!1:-${!of_torchrun:-}}"
    [[ -z ${!1} ]] || return 0
    echo "torchrun_node.sh: the variable $1 is not set: $2" \
        "${SLURM_JOB_ID:+(in a job of Slurm: sbatch launch/slurm.sbatch, or NNODES=\$SLURM_NNODES NODE_RANK=\$SLURM_NODEID)}" >&2
    exit 2
}
require NNODES "how many nodes the run has"
require NODE_RANK "the number of this node, from 0, the head, to NNODES - 1"
require MASTER_ADDR "the head node's name or address, by which all nodes reach it"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
MASTER_PORT=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}
whole NNODES 1 100000
whole NODE_RANK 0 $((NNODES - 1))
whole MASTER_PORT 1 65535
[[ ! $MASTER_ADDR =~ /|^[^:]*:[0-9]+$ ]] ||
    refuse "the variable MASTER_ADDR is '$MASTER_ADDR': expected a name or an address; MASTER_PORT has the port"

# On each node: one that saw that the config is wrong would end, and the others would wait for it.
echo "checking $1"
check() { "$python" -m megappo plan --download --world-size $((NNODES * nproc)) --nodes "$NNODES" "$@" > /dev/null; }
waiting "checking $1" check "$@"
remember NODE_RANK="$NODE_RANK" NNODES="$NNODES" MASTER_ADDR="$MASTER_ADDR" bash launch/torchrun_node.sh "$@"
# exec: a signal to this script reaches torchrun, which ends its own ranks.
exec "$python" -m megappo.torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" \
    --master-port "$MASTER_PORT" --nproc-per-node "$nproc" -m megappo.train "$@"
