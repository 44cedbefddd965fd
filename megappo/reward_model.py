"""Training of a reward model, one process per GPU (or, without GPUs, per rank):

torchrun --nproc-per-node N -m megappo.reward_model CONFIG [key=value ...]

It is megappo.train with trainer.kind=reward_model.
"""

import runpy
import sys
from collections.abc import Sequence

from megappo.arguments import reward_model_arguments
from megappo.sft import START
from megappo.table import resolved

KIND = "trainer.kind=reward_model"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a config and start its ranks on this node; return 2 for a config that cannot work."""
    args = reward_model_arguments(arguments)
    code: int = resolved(START)(args.config, [*args.overrides, KIND], args.nproc)
    return code


if __name__ == "__main__":
    sys.argv.append(KIND)
    runpy.run_module("megappo.train", run_name="__main__", alter_sys=True)
