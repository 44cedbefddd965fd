"""The SGLang engine's process: `python -m megappo.engines.server`, its settings as JSON on standard input.

SGLang kills the children, and after a crash the parent, of the process it runs in: this one has no other relatives than
SGLang's. Settings (not on the command line, where every user of the machine could read the API key):
{"server_args": {ServerArgs by name}}, or {"command_line": [SGLang's own arguments], "cpu_arguments": {their defaults
where there is no GPU, by name}}. Its parent, a keeper, has it end with itself.
"""

import functools
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megappo.engines import command_line, cpu
from megappo.engines.server_keeper import shared_memory
from megappo.runtime.imports import without_collector
from megappo.runtime.lifetime import die_with
from megappo.runtime.listening import bind_stores

KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Of the arguments, those that nobody may read."""

# SGLang's dumper, a tool of its developers, would import what it finds of the trainer's.
sys.modules["megatron"] = None
cpu.install()
bind_stores()  # the scheduler's; in its process, forked or spawned, too


def main() -> None:
    """Serve until killed."""
    settings = json.load(sys.stdin)
    try:
        with without_collector():
            arguments = _arguments(settings)
            if arguments.enable_lora or arguments.lora_paths:
                cpu.pin_no_memory()
            import sglang.srt.entrypoints.http_server  # noqa: F401
        serve(arguments)
    finally:
        for child in multiprocessing.active_children():
            child.kill()  # else the interpreter would wait for it before it ends


def _arguments(settings: dict[str, Any]) -> Any:
    if "command_line" in settings:
        defaults = {} if torch.cuda.is_available() else settings["cpu_arguments"]
        return command_line.parse(settings["command_line"], defaults)
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**settings["server_args"])


def serve(arguments: Any) -> None:
    """SGLang's `sglang serve`, with an Engine class of our own."""
    from sglang import launch_server
    from sglang.srt.entrypoints import http_server

    http_server.Engine = _engine_class()
    _link_load_snapshots()
    if arguments.skip_server_warmup:
        # It is a request to the server, which may not listen yet where no warm-up has waited for it.
        http_server._freeze_gc_after_server_warmup = lambda server_args: None
    _refuse_empty_prompts()
    _log_no_keys()
    launch_server.run_server(arguments)


def _engine_class() -> Any:
    """SGLang's Engine; on a CPU with forked children, which saves most of the start time and half the memory.

    Forking is safe there: nothing has started a thread or computed anything yet.
    """
    from sglang.srt.entrypoints.engine import Engine

    class OwnEngine(Engine):
        @classmethod
        def _launch_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
            launched = super()._launch_subprocesses(*args, **kwargs)
            _link_shared_memory()
            return launched

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            if not torch.cuda.is_available():
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return OwnEngine


def _refuse_empty_prompts() -> None:
    """Answer a prompt without a token with an error: it would end SGLang's scheduler, and with it the server."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    validate = TokenizerManager._validate_one_request

    @functools.wraps(validate)
    def validate_not_empty(self: Any, request: Any, input_ids: list[int] | None) -> None:
        if input_ids is not None and len(input_ids) == 0:
            raise ValueError("the prompt has no token: it is empty, or the tokenizer knows none of it")
        validate(self, request, input_ids)

    TokenizerManager._validate_one_request = validate_not_empty


def _log_no_keys() -> None:
    """Have the arguments that SGLang logs (at log_level info) without the keys among them."""
    from sglang.srt.entrypoints import engine

    for_logging = engine._server_args_for_logging

    @functools.wraps(for_logging)
    def without_keys(server_args: Any) -> dict[str, Any]:
        return {name: "***" if value and name in KEYS else value for name, value in for_logging(server_args).items()}

    engine._server_args_for_logging = without_keys


def _link_load_snapshots() -> None:
    """Link the file for the schedulers' loads before they make it: one that fails while it starts leaves it behind."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def init_new_linked(*args: Any, **kwargs: Any) -> PortArgs:
        port_args = init_new(*args, **kwargs)
        _link(Path(shm_path_for(port_args.instance_id)))
        return port_args

    PortArgs.init_new = staticmethod(init_new_linked)


def _link_shared_memory() -> None:
    """Link SGLang's shared-memory files into the temporary folder, so that the owner can remove them after a kill."""
    for child in multiprocessing.active_children():
        for path in shared_memory(child.pid):
            _link(path)


def _link(path: Path) -> None:
    link = Path(tempfile.gettempdir(), path.name)
    if not link.is_symlink():
        link.symlink_to(path)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned child: SGLang would ask for this only after its imports
    die_with(os.getppid())  # multiprocessing.parent_process() is None until this import is over
