"""Train a small model on this machine in a few minutes, with this Python: launch/quickstart.sh without its set-up.

    megappo quickstart [key=value ...]

It takes two of the visible GPUs, or the only one, or the CPU. An interrupted run resumes; a finished one is kept under
another name.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.runtime.machine import PACKAGE_ROOT, num_gpus

SCRIPT = PACKAGE_ROOT / "launch" / "quickstart.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replace this process by the script; return 2 where it is not installed."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("megappo quickstart", description=__doc__, formatter_class=layout)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys that win over configs/quickstart.yaml")
    overrides = parser.parse_args(arguments).overrides
    if not SCRIPT.is_file():
        print(f"error: no {SCRIPT}: the quickstart needs a clone of the repository", file=sys.stderr)
        return 2
    device = ["gpu"] if num_gpus() else []
    variables = os.environ | {"MEGAPPO_PYTHON": sys.executable}
    os.execvpe("bash", ["bash", str(SCRIPT), *device, *overrides], variables)


if __name__ == "__main__":
    sys.exit(main())
