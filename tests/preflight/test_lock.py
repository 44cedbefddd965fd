"""An output folder has one run at a time."""

import errno
import fcntl
import signal
import subprocess
import sys

import pytest

from megappo.config.config_error import ConfigError
from megappo.preflight.output_folder import LOCK, in_use, lock

HOLDER = """
import sys, time
from pathlib import Path
from megappo.preflight.output_folder import lock
held = lock(Path(sys.argv[1]))
print("taken", flush=True)
time.sleep(600)
"""


def test_another_process_is_named_and_kept_out_until_it_is_killed(tmp_path):
    run = tmp_path / "new" / "run"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "taken\n"
            with pytest.raises(ConfigError) as caught:
                lock(run)
            [line] = caught.value.errors
            assert line == in_use(run)
            assert line.startswith(f"trainer.output_dir: {run} is in use by a run (")
            assert f", pid {holder.pid}, since 2" in line
            assert line.endswith("): wait for its end, or choose another folder")
        finally:
            holder.send_signal(signal.SIGKILL)
    assert in_use(run) == ""
    lock(run).close()


def test_children_do_not_keep_it(tmp_path):
    with lock(tmp_path):
        child = subprocess.Popen(["sleep", "600"])
    try:
        assert in_use(tmp_path) == ""
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("content", [b"", b"\xff\x00\n", b"\x1b[2J\n", b"x" * 100_000])
def test_whatever_the_file_holds(tmp_path, content):
    with lock(tmp_path):
        (tmp_path / LOCK).write_bytes(content)
        assert in_use(tmp_path).isprintable() and len(in_use(tmp_path)) < 500


def test_where_nothing_can_be_written_or_locked(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match="trainer.output_dir: cannot write and lock a file in .*: name a folder where"
    ):
        lock(tmp_path / "file" / "run")

    def refuses(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    for call in (lambda: lock(tmp_path), lambda: pytest.fail(in_use(tmp_path))):
        with pytest.raises(
            (ConfigError, pytest.fail.Exception), match="cannot write and lock a file in .*No locks available"
        ):
            call()
