"""PPO for large language models. Every command imports this first."""

import sys
from importlib.util import find_spec

NEEDED = ("httpx", "psutil", "pydantic", "safetensors", "torch", "transformers", "yaml")

if lacking := [name for name in NEEDED if find_spec(name) is None]:  # one line, where an import would be a traceback
    sys.exit(
        f"error: this Python ({sys.executable}) lacks {', '.join(lacking)}: use .venv/bin/python, which "
        "launch/setup.sh makes (on GPUs .venv-gpu/bin/python)"
    )
