"""Serve a Hugging Face folder, such as a run's hf_actor, by stock SGLang over HTTP: on GPUs, or without any on a CPU.

    megappo serve HF_FOLDER [SGLang's own arguments]

It listens on 127.0.0.1:30000 by default, and computes in fp32 by default on a CPU. Ctrl-C ends it, with its processes
and their shared memory.
"""

import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.architecture.model_folder import CONFIG_FILE, named_architecture, no_model, other_kind
from megappo.commands.arguments import serve_arguments
from megappo.config.hub import cached_model
from megappo.config.text_files import TextFileError
from megappo.table import resolved

CRITIC = "ForTokenClassification"
PORT = 30000
"""SGLang's default."""
SERVE, UNSEEN_GPUS = "megappo.engines.foreground_server:serve", "megappo.runtime.platform:unseen_gpus"


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal, or until the server has ended; return 2 where the command is wrong."""
    serve_arguments(arguments)
    if {"-h", "--help"} & set(arguments):
        return resolved(SERVE)(["--help"])
    folder, *rest = cached_model(arguments[0]), *arguments[1:]
    fault = served_folder_fault(Path(folder)) or port_fault(rest) or resolved(UNSEEN_GPUS)()
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    print("importing torch and SGLang", file=sys.stderr, flush=True)
    return resolved(SERVE)(["--model-path", folder, *rest])


def served_folder_fault(folder: Path) -> str | None:
    """Return why a folder cannot be served, judged by its files' names and its architecture; None if it can."""
    if not folder.is_dir():
        return no_model(folder, "a Hugging Face folder, such as the hf_actor in a run's trainer.output_dir")
    if kind := other_kind(folder):
        return f"{folder} {kind}"
    for pattern in (CONFIG_FILE, "*.safetensors"):
        if not any(folder.glob(pattern)):
            return f"{folder} is not a complete Hugging Face folder: it has no {pattern}"
    try:
        named = named_architecture(folder) or ""
    except TextFileError as error:
        return str(error)
    if named.endswith(CRITIC):
        return f"{folder} is a critic ({named}), which SGLang does not serve: name a language model, such as hf_actor"
    return None


def port_fault(words: Sequence[str]) -> str | None:
    """Return an error if the port in SGLang's arguments is in use, which SGLang finds after a minute; else None."""
    named = re.search(r"--port[= ](\d+)", " ".join(words))
    port = int(named[1]) if named else PORT
    with socket.socket() as probe:
        is_used = port < 2**16 and probe.connect_ex(("127.0.0.1", port)) == 0
    if is_used:
        return f"port {port} is in use: end the server that listens on it, or choose another port, --port N"
    return None
