"""Entry of `torchrun --nproc-per-node N -m megappo.reward_model CONFIG [key=value ...]`: megappo.train with
trainer.kind=reward_model."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.append("trainer.kind=reward_model")
    runpy.run_module("megappo.commands.train", run_name="__main__", alter_sys=True)
