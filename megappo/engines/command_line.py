"""SGLang's own command line, as the process that serves reads it; its defaults can be others, where there is no GPU."""

import argparse
import socket
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    """Tells an error in a line: SGLang's usage has hundreds."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists SGLang's arguments)\n")


def parse(command_line: list[str], defaults: dict[str, Any]) -> Any:
    """SGLang's ServerArgs.

    Args:
        command_line: as for `sglang serve`.
        defaults: by the ServerArgs' names; the command line overrides them.
    Raises:
        SystemExit: with 0 after --help, with 2 where the command line is at fault or the port is taken.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = _Parser(
        usage=".venv/bin/python -m megappo.serve HF_FOLDER [SGLang's arguments]",
        description="Serves a Hugging Face folder by stock SGLang, whose arguments follow; --model-path is the folder.",
    )
    ServerArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    if "--config" in command_line:
        command_line = ConfigArgumentMerger(parser).merge_config_with_args(command_line)
    arguments = parser.parse_args(command_line)
    _check_port(parser, arguments.host, arguments.port)
    return ServerArgs.from_cli_args(arguments)


def _check_port(parser: argparse.ArgumentParser, host: str, port: int) -> None:
    """Now, and not after the model has been loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", error)
            parser.exit(2, f"error: cannot listen on {host}:{port} ({reason}): choose another --port or --host\n")
