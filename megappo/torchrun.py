"""Entry of `python -m megappo.torchrun TORCHRUN_ARGUMENTS`: the launcher of a node's ranks."""

import runpy

if __name__ == "__main__":
    runpy.run_module("megappo.commands.torchrun", run_name="__main__", alter_sys=True)
