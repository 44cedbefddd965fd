#!/usr/bin/env bash
# Trains on several nodes without SLURM: run it on each of them at about the same time, with the same CONFIG and
# variables, but for NODE_RANK. As local.sh, it starts one process per visible GPU; NPROC, the same on all, overrides it.
# usage: NODE_RANK=0 NNODES=2 MASTER_ADDR=HEAD [MASTER_PORT=29500] [NPROC=n] bash launch/torchrun_node.sh CONFIG [key=value ...]
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
    echo "usage: NODE_RANK=0 NNODES=2 MASTER_ADDR=HEAD [MASTER_PORT=29500] [NPROC=n]" \
        "bash launch/torchrun_node.sh CONFIG [key=value ...]" >&2
    exit $(($# < 1 ? 2 : 0))
fi
require() {  # VARIABLE MEANING
    [[ -z ${!1:-} ]] || return 0
    echo "torchrun_node.sh: the variable $1 is not set: $2" >&2
    exit 2
}
require NNODES "how many nodes the run has"
require NODE_RANK "the number of this node, from 0, the head, to NNODES - 1"
require MASTER_ADDR "the head node's name or address, by which all nodes reach it"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# On each node: one that saw that the config is wrong would end, and the others would wait for it.
echo "checking $1"
"$python" -m megappo.plan --world-size $((NNODES * nproc)) --nodes "$NNODES" "$@" > /dev/null
# exec: a signal to this script reaches torchrun, which ends its own ranks.
exec "$python" -m megappo.torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" \
    --master-port "${MASTER_PORT:-29500}" --nproc-per-node "$nproc" -m megappo.train "$@"
