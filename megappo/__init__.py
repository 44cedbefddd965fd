"""PPO for large language models. Every command imports this first."""

import os
import sys
from importlib import import_module
from importlib.util import find_spec

PUBLIC = {
    "load_config": "megappo.commands.train:load_run_config",
    "Trainer": "megappo.commands.train:RunContext",
    "code": "megappo.lab.graders.code:code",
    "code_label": "megappo.lab.graders.code:code_label",
    "http": "megappo.lab.graders.remote:http",
    "engine": "megappo.lab.graders.remote:engine",
    "judge": "megappo.lab.graders.remote:judge",
}
"""Name -> "module:name", imported when the name is used. All but the first two are reward functions."""
NEEDED = ("httpx", "psutil", "pydantic", "safetensors", "torch", "transformers", "yaml")

if lacking := [name for name in NEEDED if find_spec(name) is None]:  # one line, where an import would be a traceback
    sys.exit(
        f"error: this Python ({sys.executable}) lacks {', '.join(lacking)}: use .venv/bin/python, which "
        "launch/setup.sh makes (on GPUs .venv-gpu/bin/python)"
    )

# A command that was started without python -P: neither in it nor in what it starts may files of the working folder hide
# what is installed. While `python -m NAME` looks for NAME, the arguments begin with -m.
named = sys.orig_argv[-len(sys.argv)].removeprefix("-m") if sys.argv[:1] == ["-m"] else ""
if named.split(".")[0] == "megappo" and not sys.flags.safe_path:
    del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def __getattr__(name: str) -> object:
    """Import one of PUBLIC."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'megappo' has no attribute {name!r}")
    module, _, inside = PUBLIC[name].partition(":")
    return getattr(import_module(module), inside)
