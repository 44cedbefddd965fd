"""An output folder has one run at a time."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from megappo.config.config_error import ConfigError
from megappo.preflight.folder_lock import LOCK, check_lock, in_use, lock

HOLDER = """
import sys, time
from pathlib import Path
from megappo.preflight.folder_lock import lock
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


LINKS = {"symbolic": Path.symlink_to, "hard": Path.hardlink_to}


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_is_not_followed(kind, tmp_path):
    target, run = tmp_path / "notes", tmp_path / "run"
    target.write_text("mine")
    run.mkdir()
    LINKS[kind](run / LOCK, target)
    with pytest.raises(ConfigError, match="cannot write and lock a file in .*run"):
        lock(run)
    assert target.read_text() == "mine" and "cannot write and lock" in in_use(run)


def test_a_file_that_is_removed_lets_nobody_in(tmp_path):
    with lock(tmp_path):
        (tmp_path / LOCK).unlink()
        assert "is in use by a run (unknown)" in in_use(tmp_path)
        with pytest.raises(ConfigError, match="is in use by a run"):
            lock(tmp_path)
    assert in_use(tmp_path) == ""


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_file_that_is_removed_or_replaced_is_noticed_at_the_next_save(is_taken, tmp_path, monkeypatch, capsys):
    real = fcntl.flock

    def without_folders(file, kind):  # as some network file systems have it
        if isinstance(file, int) and os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", without_folders)
    with lock(tmp_path), ExitStack() as other:
        check_lock(tmp_path)
        (tmp_path / LOCK).unlink()
        if is_taken:
            command = [sys.executable, "-c", HOLDER, str(tmp_path)]
            holder = other.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            other.callback(holder.kill)
            assert holder.stdout.readline() == "taken\n"
            with pytest.raises(ConfigError, match=f"is in use by a run .*pid {holder.pid}"):
                check_lock(tmp_path)
            check_lock(tmp_path)  # the lock is lost: nothing to check any more
        else:
            check_lock(tmp_path)
            check_lock(tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("WARNING") == 1 and ".lock was removed or replaced" in printed


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
