"""`python -m megappo`, which is the command `megappo`."""

import sys

from megappo.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
