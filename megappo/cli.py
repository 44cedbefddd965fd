"""Entry of the command `megappo`: installed environments refer to it as `megappo.cli:main`."""

from megappo.commands.cli import main as main
