"""TransformerEngine's own Python code, as pinned for GPUs, on a CPU: only its compiled extension is replaced."""

import enum
import functools
import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist

from megappo.runtime import megatron_setup, platform

FOLDER = Path(sys.prefix) / "contract"


class Absent(types.ModuleType):
    """Stand-in for a missing module.

    Capitalised names are enumerations that have any member; other names are functions that do nothing.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, enum.Enum(cls.__name__, [name])[name])
        return getattr(cls, name)


def install() -> None:
    """Make `transformer_engine` importable in this process, before megatron-core is imported."""
    if not FOLDER.is_dir():
        raise FileNotFoundError(
            f"there is no {FOLDER}: run launch/setup.sh, which puts TransformerEngine's Python there"
        )
    sys.path.append(str(FOLDER))
    for name in ("transformer_engine_torch", "onnx", "onnxscript"):
        sys.modules[name] = Absent(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    sys.modules["transformer_engine_torch"].get_cudnn_version = lambda: 92400
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # no look for CUDA's libraries
    spec = importlib.util.find_spec("transformer_engine")
    package = sys.modules["transformer_engine"] = importlib.util.module_from_spec(spec)
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda framework: None
    asks_for_cuda = patch.object(torch.cuda, "is_available", lambda: True)
    with asks_for_cuda:
        layers = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
        spec.loader.exec_module(package)
    layers.__init__ = asks_for_cuda(layers.__init__)


@functools.cache
def server() -> subprocess.Popen[str]:
    """Return a process that has TransformerEngine, for the whole test run; it ends with this one."""
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def call(check: Callable[..., None], *args: object) -> None:
    """Call a top-level function of a test module in a fork of a process that has TransformerEngine, with one rank."""
    words = [str(sys.modules[check.__module__].__file__), check.__name__, *map(str, args)]
    print(json.dumps(words), file=server().stdin, flush=True)
    error = json.loads(server().stdout.readline())
    assert not error, error[-6000:]


def serve() -> None:
    """Answer each line of the standard input, a call, by a line: "" or the error output of the fork that made it."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            fork = os.fork()
            if not fork:
                os.dup2(output.fileno(), 2)
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
                file, function, *arguments = json.loads(line)
                runpy.run_path(file)[function](*arguments)
                os._exit(0)
            failed = os.waitpid(fork, 0)[1] != 0
            output.seek(0)
            print(json.dumps(output.read() or "it ended" if failed else ""), file=replies, flush=True)


if __name__ == "__main__":
    install()
    megatron_setup.install()
    platform.has_transformer_engine = lambda: True
    importlib.import_module("megappo.trainer.main")
    serve()
