"""The SGLang engine's process: `python -m megappo.rollout.server`, its settings as JSON on standard input.

SGLang kills the children, and after a crash the parent, of the process it runs in: this one has no other relatives than
SGLang's. Settings (not on the command line, where every user of the machine could read the API key):
{"server_args": {ServerArgs by name}}. Its parent, a keeper, has it end with itself.
"""

import difflib
import gc
import inspect
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megappo.lifetime import die_with
from megappo.rollout import cpu

cpu.install()


def main() -> None:
    """Serve until killed."""
    settings = json.load(sys.stdin)
    _import_sglang()
    try:
        serve(server_args(settings["server_args"]))
    finally:
        for child in multiprocessing.active_children():
            child.kill()  # else the interpreter would wait for it before it ends


def server_args(arguments: dict[str, Any]) -> Any:
    """SGLang's ServerArgs.

    Raises:
        SystemExit: a name that this SGLang does not know.
    """
    import sglang
    from sglang.srt.server_args import ServerArgs

    known = list(inspect.signature(ServerArgs).parameters)
    unknown = [name for name in arguments if name not in known]
    if unknown:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        hints = "; ".join(f"{name} (nearest: {found[0]})" if found else name for name, found in near.items())
        sys.exit(f"error: rollout.server_args has names that SGLang {sglang.__version__} does not know: {hints}")
    return ServerArgs(**arguments)


def _import_sglang() -> None:
    """Import the engine's modules, without the garbage collector, which would take a quarter of the time."""
    gc.disable()
    import sglang.srt.entrypoints.http_server  # noqa: F401

    gc.freeze()
    gc.enable()


def serve(arguments: Any) -> None:
    """SGLang's launch_server, with an Engine class of our own, as its sglang.srt.ray.http_server does it."""
    from sglang.srt.entrypoints import engine, http_server

    tokenizer_manager, templates, ports, schedulers, watchdog, _ = _engine_class()._launch_subprocesses(
        server_args=arguments,
        init_tokenizer_manager_func=engine.init_tokenizer_manager,
        run_scheduler_process_func=engine.run_scheduler_process,
        run_detokenizer_process_func=engine.run_detokenizer_process,
    )
    _link_shared_memory()
    http_server._setup_and_run_http_server(
        arguments, tokenizer_manager, templates, ports, schedulers.scheduler_infos, watchdog
    )


def _engine_class() -> Any:
    """SGLang's Engine; on a CPU with forked children, which saves most of the start time and half the memory.

    Forking is safe there: nothing has started a thread or computed anything yet.
    """
    from sglang.srt.entrypoints.engine import Engine

    class ForkingEngine(Engine):
        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return Engine if torch.cuda.is_available() else ForkingEngine


def _link_shared_memory() -> None:
    """Link SGLang's shared-memory files into the temporary folder, so that the owner can remove them after a kill."""
    maps = "".join(Path(f"/proc/{child.pid}/maps").read_text() for child in multiprocessing.active_children())
    for path in {line.split()[5] for line in maps.splitlines() if "/dev/shm/sgl" in line}:
        Path(tempfile.gettempdir(), Path(path).name).symlink_to(path)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a spawned child: SGLang would ask for this only after its imports
    die_with(multiprocessing.parent_process().pid)
