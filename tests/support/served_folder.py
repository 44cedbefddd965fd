"""`megappo serve`, running, and folders that it serves."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from ports import free_port
from program import REPOSITORY
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

COMMAND = [sys.executable, "-m", "megappo", "serve"]
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyzABCD"  # as many as the shared checkpoint's vocabulary has


def save_character_tokenizer(folder: Path) -> None:
    """Write a tokenizer of characters, as transformers saves one."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def served(folder: Path, home: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """Start the command, as the leader of a session; yield it, serving, and a client.

    Args:
        home: its temporary folder.
    """
    port = free_port()
    command = [*COMMAND, folder, "--port", str(port), "--max-total-tokens", "2048"]
    environment = os.environ | {"TMPDIR": str(home), "OMP_NUM_THREADS": "1"}
    with (home / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _wait_until_it_serves(process, client, home / "output.txt")
            yield process, client
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_serves(process: subprocess.Popen, client: httpx.Client, output: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"it does not serve:\n{output.read_text()}")
