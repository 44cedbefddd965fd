"""A rank's last words about what comes from outside: a line with the path and the remedy, not a traceback."""

import errno
import os
import resource
import tempfile
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.batch.rows_file import RowsFile
from megappo.config.config_error import ConfigError
from megappo.engines.generations import checked
from megappo.errors import ActionableError
from megappo.runtime.failure import report


def a_folder():
    Path("/").read_text()


def without_a_path():
    os.write(os.open("/dev/full", os.O_WRONLY), b"x")


def wrapped():
    try:
        without_a_path()
    except OSError as error:
        raise RuntimeError("writing failed") from error


def stale():
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/data/prompts.jsonl")


def no_response():
    checked({"error": "?"})


def rows_cut_short():
    path = Path(tempfile.mkdtemp(), "step_1.safetensors")
    path.write_bytes(b"\x10")
    RowsFile(path)


EXPECTED = {
    a_folder: ("Is a directory: /",),
    without_a_path: ("No space left on device: in without_a_path, ", "make room on that disk"),
    wrapped: ("No space left on device: in without_a_path, ", "(RuntimeError: writing failed)"),
    stale: ("Stale file handle: /data/prompts.jsonl", "mount it again"),
    rows_cut_short: ("/", "step_1.safetensors"),
    no_response: ("the engine's reply is no response", "{'error': '?'}"),
}


@pytest.mark.parametrize("fault", EXPECTED, ids=lambda fault: fault.__name__)
def test_errors_from_outside_take_one_line(fault, capsys):
    with pytest.raises(Exception) as caught:
        fault()
    assert report(caught.value, dist.HashStore(), 0) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error (rank 0): {EXPECTED[fault][0]}") and all(words in line for words in EXPECTED[fault])


def test_running_out_of_descriptors_is_reported_without_one(capsys):
    for thread in threading.enumerate():
        if thread.name == "memory-sampler":  # of another test: it would miss descriptors, too
            thread.join(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/dev/null") as highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno() + 1, hard))
    try:
        with pytest.raises(OSError) as caught:
            kept: list = []
            while True:
                kept.append(open("/dev/null"))  # noqa: SIM115
        code = report(caught.value, dist.HashStore(), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        del kept, caught
    assert code == 1
    assert "Too many open files: /dev/null: raise the number of open files" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(capsys):
    with pytest.raises(ZeroDivisionError) as caught:
        1 // 0  # noqa: B018
    report(caught.value, dist.HashStore(), 0)
    assert "Traceback" in capsys.readouterr().err


def test_commands_to_a_terminal_are_escaped(capsys):
    report(ActionableError("the server answered: \x1b[2J gone\nits log ends:"), dist.HashStore(), 0)
    assert capsys.readouterr().err == "error (rank 0): the server answered: \\x1b[2J gone\nits log ends:\n"
    report(MemoryError("no room\r\u2028here"), dist.HashStore(), 0)
    assert capsys.readouterr().err == "error (rank 0): no room\\r\\u2028here\n"


def test_a_rank_that_fails_later_leaves_the_word_and_the_exit_code_to_the_first(capsys):
    store = dist.HashStore()
    assert report(ConfigError("wrong"), store, 0) == 2
    assert report(ValueError("too"), store, 1) == 2
    assert capsys.readouterr().err == "error: wrong\n"


def test_a_rank_that_lost_another_is_silent_if_a_launcher_reports(capsys, monkeypatch):
    monkeypatch.setattr("megappo.runtime.failure.REPORT_SECONDS", 0.1)
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:4")
    monkeypatch.setenv("MEGAPPO_LAUNCHER", "1")
    assert report(lost, dist.HashStore(), 0) == 3
    assert not capsys.readouterr().err
    monkeypatch.delenv("MEGAPPO_LAUNCHER")
    assert report(lost, dist.HashStore(), 0) == 1
    assert capsys.readouterr().err.startswith("error (rank 0): another rank exited without an error message")
