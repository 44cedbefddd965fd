"""Try on a node what needs several GPUs, and print a table: for the first node of eight that is there.

    .venv-gpu/bin/python tests/gpu/kit/node.py [--seconds N] [--output FOLDER] [STAGE ...]

The stages run one after another and take two GPUs each, and the doctor and `communicators` all of them. Without a GPU
two ranks of the CPU rehearse them. run.py has the stages for one GPU.
"""

import sys

from run import Stages, main, stage

RUNS = ("quickstart", "layout", "engine_tp2", "broadcast", "context", "experts", "killed_engine", "resumed")
RANKS = ("communicators", "overlap", "sleeping_engine")
NODE_STAGES: Stages = {
    "doctor": (["-m", "megappo", "doctor"], 240),
    **{f"several_{name}": stage("several_ranks", name, limit=300) for name in RANKS},
    **{f"several_{name}": stage("several_runs", name, limit=420) for name in RUNS},
}

if __name__ == "__main__":
    sys.exit(main(NODE_STAGES, __doc__, seconds=3600, prints_table=True))
