"""Entry of the command `megappo`, which environments have installed under this name."""

from megappo.commands.cli import main as main
