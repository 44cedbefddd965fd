"""Entry of `torchrun --nproc-per-node N -m megappo.sft CONFIG [key=value ...]`: megappo.train with trainer.kind=sft."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.append("trainer.kind=sft")
    runpy.run_module("megappo.commands.train", run_name="__main__", alter_sys=True)
