"""Entry of `torchrun --nproc-per-node N -m megappo.train CONFIG [key=value ...]`: one rank of a run."""

import runpy

if __name__ == "__main__":
    runpy.run_module("megappo.commands.train", run_name="__main__", alter_sys=True)
