"""An agent that is a command: a process for each episode, in a worker process."""

import asyncio
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megappo.runtime.keeper import KILL_TIMEOUT_SECONDS, REMOVED, ask_to_end, signal_of
from megappo.runtime.machine import PACKAGE_ROOT, PYTHON, search_path
from megappo.userland.user_code import JsonObject

OUTPUT_BYTES = 2**16
"""The end of a command's output that is kept."""
SHOWN_CHARACTERS = 2000
"""The end of a command's errors that a message shows."""
READ_BYTES = 2**16
LOGGER = logging.getLogger(__name__)
UNREWARDED = itertools.count()
"""Commands of this process without a reward in their output: the first one is logged."""
FAILURES = itertools.count()
"""Counts commands with exit code 1. The first one is logged, as it may have crashed."""


class CommandLost(Exception):
    """A command ended without a result."""


async def run_command(
    command: Sequence[str],
    is_scored: bool,
    base_url: str,
    api_key: str,
    row: JsonObject,
) -> JsonObject:
    """Run a command; end it and all processes that it started, even if this call is cancelled.

    Args:
        is_scored: a reward function scores episodes, so that no reward is needed.
    Returns:
        "exit_code", and "reward": a number in the last line of the output, or {"reward": number} there. Without such a
        line it is 1 for exit code 0, and 0 for exit code 1.
    Raises:
        CommandLost: the exit code is neither 0 nor 1.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json", delete=False) as file:
        json.dump(row, file)
    try:
        output, errors, code = await _finished(command, base_url, api_key, file.name)
    finally:
        with suppress(FileNotFoundError):  # the keeper has removed it, if it was started
            os.unlink(file.name)
    if code not in (0, 1):
        end = signal_of(code) or f"exit code {code}"
        raise CommandLost(f"ended with {end}; the end of its errors: {errors[-SHOWN_CHARACTERS:] or 'none'}")
    if code == 1 and next(FAILURES) == 0:
        LOGGER.warning("the command ended with exit code 1; the end of its errors: %s", errors[-SHOWN_CHARACTERS:])
    result = _last_line(output) if code == 0 else None
    if result is None and not is_scored:
        result = {"reward": 1.0 - code}
        if code == 0 and next(UNREWARDED) == 0:
            LOGGER.warning("the last line of the command's output is no reward: exit code 0 counts as 1, 1 as 0")
    return {**(result or {}), "exit_code": code}


async def _finished(command: Sequence[str], base_url: str, api_key: str, row_file: str) -> tuple[str, str, int]:
    """Run a command under a keeper; return the ends of its output and errors, and the keeper's exit code."""
    process = await asyncio.create_subprocess_exec(
        *(*PYTHON, "-m", "megappo.runtime.keeper", str(os.getpid())),
        *("env", f"PATH={search_path()}", f"PYTHONPATH={_python_path()}", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **_endpoint_variables(base_url, api_key), "MEGAPPO_ROW": row_file, REMOVED: row_file},
        start_new_session=True,
    )
    try:
        return await asyncio.gather(_end(process.stdout), _end(process.stderr), process.wait())
    finally:
        await _make_sure_it_ends(process)


def _python_path() -> str:
    """Return PYTHONPATH without this package, which a command with packages of its own must not import."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder != str(PACKAGE_ROOT))


def _endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return the variables in which clients of OpenAI and Anthropic look for their endpoint."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


async def _end(stream: asyncio.StreamReader) -> str:
    """Read a stream; return its end."""
    kept = b""
    while part := await stream.read(READ_BYTES):
        kept = (kept + part)[-OUTPUT_BYTES:]
    return kept.decode(errors="replace").strip()


async def _make_sure_it_ends(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            ask_to_end(process)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 2 * KILL_TIMEOUT_SECONDS)
    if process.returncode is None:
        process.kill()


def _last_line(output: str) -> JsonObject | None:
    """Return the reward, and other numbers, in the last line; None if it has none."""
    line = output.rpartition("\n")[2].strip()
    with suppress(ValueError):
        return {"reward": float(line)}
    with suppress(ValueError, RecursionError):
        found: Any = json.loads(line)
        return found if isinstance(found, dict) and "reward" in found else None
    return None
