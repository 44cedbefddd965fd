"""The SGLang engine's process: `python -m megappo.engines.server`, its settings as JSON on standard input.

SGLang kills the children, and after a crash the parent, of the process it runs in: this one has no other relatives than
SGLang's. Settings (not on the command line, where every user of the machine could read the API key):
{"server_args": {ServerArgs by name}}, or {"command_line": [SGLang's own arguments], "cpu_arguments": {their defaults
where there is no GPU, by name}}. Its parent, a keeper, has it end with itself.
"""

import argparse
import json
import logging
import multiprocessing
import os
import secrets
import socket
import sys
from typing import Any, NoReturn

import torch

from megappo.engines import sglang_patches
from megappo.engines.served_folder import served_folder
from megappo.runtime.keeper import die_with
from megappo.runtime.listening import bind_stores
from megappo.runtime.platform import gc_disabled

sglang_patches.hide_megatron()
sglang_patches.prepare_import()
bind_stores()  # the scheduler's; in its process, forked or spawned, too


class _Parser(argparse.ArgumentParser):
    """Prints an error in one line: SGLang's usage has hundreds."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists SGLang's arguments)\n")


def main() -> None:
    """Run SGLang's `sglang serve` until killed."""
    settings = json.load(sys.stdin)
    try:
        with gc_disabled():
            arguments = server_arguments(settings)
            if arguments.enable_lora or arguments.lora_paths:
                sglang_patches.pin_no_memory()
            from sglang import launch_server

            sglang_patches.install_hooks(of_run="server_args" in settings)
        launch_server.run_server(arguments)
    finally:
        for child in multiprocessing.active_children():
            child.kill()  # else the interpreter would wait for it before it ends


def server_arguments(settings: dict[str, Any]) -> Any:
    """Return SGLang's ServerArgs, from a run's settings or from a command line of `sglang serve`.

    Raises:
        SystemExit: with 0 after --help, with 2 where the command line is wrong or the port is taken.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    if "server_args" in settings:
        own = settings["server_args"]
        return ServerArgs(**{**own, "model_path": _served(own["model_path"])})
    parser = _Parser(
        usage="megappo serve MODEL [SGLang's arguments]",
        description="Serves a Hugging Face folder by stock SGLang, whose arguments follow; --model-path is the folder.",
    )
    ServerArgs.add_cli_args(parser)
    parser.set_defaults(log_level="error", log_level_http="info")  # uvicorn prints the address, and each request
    if not torch.cuda.is_available():
        parser.set_defaults(**settings["cpu_arguments"])
    command_line = settings["command_line"]
    if "--config" in command_line:
        command_line = ConfigArgumentMerger(parser).merge_config_with_args(command_line)
    arguments = parser.parse_args(command_line)
    logging.getLogger("sglang").setLevel(arguments.log_level.upper())  # SGLang sets it once it has read its arguments
    _check_port(parser, arguments.host, arguments.port)
    arguments.served_model_name = arguments.served_model_name or arguments.model_path
    arguments.model_path = _served(arguments.model_path)
    if not arguments.api_key:  # else every user of the machine could write profiles and change the weights or the log
        arguments.admin_api_key = arguments.admin_api_key or secrets.token_urlsafe(32)
    return ServerArgs.from_cli_args(arguments)


def _served(model_path: str) -> str:
    """Return the folder that SGLang gets for a model."""
    folder = served_folder(model_path)
    if folder != model_path:
        sglang_patches.allow_torch_attention()
    return folder


def _check_port(parser: argparse.ArgumentParser, host: str, port: int) -> None:
    """Refuse a taken port now, not after the model has been loaded."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", error)
            parser.exit(2, f"error: cannot listen on {host}:{port} ({reason}): choose another --port or --host\n")


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned child: SGLang would ask for this only after its imports
    die_with(os.getppid())  # multiprocessing.parent_process() is None until this import is over
