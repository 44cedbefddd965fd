"""Supervised fine-tuning of the actor, one process per GPU (or, without GPUs, per rank):

torchrun --nproc-per-node N -m megappo.sft CONFIG [key=value ...]

It is megappo.train with trainer.kind=sft.
"""

import runpy
import sys
from collections.abc import Sequence

from megappo.arguments import sft_arguments
from megappo.table import resolved

KIND = "trainer.kind=sft"
START = "megappo.local:start"
"""Imported only by `megappo sft`: the ranks begin with what megappo.train sets up."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a config and start its ranks on this node; return 2 for a config that cannot work."""
    args = sft_arguments(arguments)
    code: int = resolved(START)(args.config, [*args.overrides, KIND], args.nproc)
    return code


if __name__ == "__main__":
    sys.argv.append(KIND)
    runpy.run_module("megappo.train", run_name="__main__", alter_sys=True)
