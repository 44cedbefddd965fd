"""Commands that a shell script starts, with their arguments as bash passes them: bash runs the script in a jail, where
commands are recorded and none is started."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from glob import glob
from itertools import islice
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

from megappo.config.config_error import ConfigError
from megappo.config.sources import LARGEST_FILE
from megappo.config.text_files import TextFileError, read_text
from megappo.lab.graders.jail import EXECUTE, READ_DIR, READ_FILE, REFUSED, Unprotected, confine

PREAMBLE = Path(__file__).with_name("bash_preamble.sh")
TOOLS = (
    *("awk", "basename", "cat", "cut", "date", "dirname", "expr", "grep", "head", "mkdir", "mktemp", "paste"),
    *("realpath", "sed", "seq", "sort", "tail", "tee", "tr", "uname", "uniq", "wc"),
)
"""Programs that are started, as scripts call them for their output. The jail keeps them from all else."""
KNOWN_COMMANDS = ("accelerate", "deepspeed", "nvidia-smi", "ray", "torchrun", "trl")
"""Commands that `command -v` finds, besides TOOLS and Python."""
STARTS = ("fork", "vfork", "clone", "execve")
"""System calls of REFUSED that start a process."""
GROUPS = "setpgid 109 154, setsid 112 157"
"""System calls by which a process leaves the group with which it is killed."""
LOADERS = "/lib*/ld-*.so*"
MEMORY_BYTES, FILE_BYTES = 2**30, 2**20
MAX_SECONDS = 10
POLL_SECONDS = 0.02
MAX_FILES = 64
"""Files that a script writes."""
MAX_PROCESSES = 64
"""Processes of a script at a time. They are counted, as the kernel's own limit does not hold for root."""
SHORTEN = "shorten it to what starts the training"
MAX_RUNS = 100
STARTED = time.time()
"""Seconds since 1970 that all runs of a script see."""
_PROBLEM = re.compile(r"[^\n]*?: line (\d+): (.+)")
_UNSET = re.compile(r"(\w+)(?:\[\w+\])?: unbound variable")
_PLACE = re.compile(r"([\w.~@+-]*/[\w/.~@+-]*): (?:No such file or directory|Permission denied)")
_TEST = re.compile(r"(?:^|[\s;(!])(?:\[\[?|test|case)\s")


class RecordedCommand(NamedTuple):
    """A command that was not started, and the line that names it."""

    line: int
    words: list[str]


@dataclass
class ShellScript:
    """A script, and what is around it.

    Attributes:
        arguments: arguments of the script.
        variables: variables of its environment. One that it misses is added as `$NAME`, or as "" where the script tests
            it.
        is_protected: False: bash runs without a jail.
        last_line: last line that it printed.
    """

    path: Path
    arguments: Sequence[str] = ()
    variables: dict[str, str] = field(default_factory=dict)
    is_protected: bool = True
    last_line: str = ""
    _places: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.variables = dict(self.variables)

    @cached_property
    def text(self) -> str:
        """The script's text.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return read_text(self.path, LARGEST_FILE)
        except TextFileError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    def commands(self, status: int = 0) -> list[RecordedCommand]:
        """Return the commands that the script starts.

        Args:
            status: the exit code that they have for the script.
        Raises:
            ConfigError: bash reports a problem, takes too long or cannot be confined.
        """
        lines = self.text.splitlines()
        for _ in range(MAX_RUNS):
            commands, problems = self._run(status)
            if not [text for line, text in problems if self._learn(lines[line - 1 : line], text)]:
                break
        if problems and not status:
            remedy = "change the line, or give what it lacks behind the script: NAME=VALUE, or the script's arguments"
            raise ConfigError(*(f"{self.path}:{line}: bash reports: {text}: {remedy}" for line, text in problems))
        return commands

    def _learn(self, lines: Sequence[str], text: str) -> bool:
        """Return True if the next run solves the problem of some lines, as it knows a variable or a command."""
        if (unset := _UNSET.fullmatch(text)) and unset[1] not in self.variables and not unset[1].isdigit():
            self.variables[unset[1]] = "" if any(map(_TEST.search, lines)) else f"${unset[1]}"
            return True
        if (place := _PLACE.fullmatch(text)) and place[1] not in self._places:
            self._places |= {place[1], Path(place[1]).name}
            return True
        return False

    def _run(self, status: int) -> tuple[list[RecordedCommand], list[tuple[int, str]]]:
        """Run the script once; return its commands, and line and text of each problem."""
        with tempfile.TemporaryDirectory(prefix="megappo_import_") as folder, open(f"{folder}/record", "w+b") as record:
            folder = os.path.realpath(folder)
            room = f"{folder}/room"
            Path(folder, "tools").mkdir()
            _mirror(Path.cwd(), Path(room), f"{self.text} {self.path.resolve()}")
            programs = [place for name in ("bash", *TOOLS) if (place := shutil.which(name))]
            if not shutil.which("bash"):
                raise ConfigError(f"{self.path}: bash runs it, and is not installed here: install bash")
            for place in programs:
                Path(folder, "tools", Path(place).name).symlink_to(place)
            environment = self.variables | {
                "HOME": self.variables.get("HOME", "~"),
                "PATH": f"{folder}/tools",
                "LC_ALL": "C",
                "TMPDIR": room,
                "BASH_ENV": str(PREAMBLE),
                "IMPORT_RECORD": str(record.fileno()),
                "IMPORT_STATUS": str(status),
                "IMPORT_TIME": str(int(STARTED)),
                "IMPORT_TOOLS": " ".join(TOOLS),
                "IMPORT_COMMANDS": " ".join([*KNOWN_COMMANDS, *sorted(self._places)]),
                "IMPORT_PYTHON": sys.executable,
            }
            printed = self._printed(folder, [*programs, sys.executable, *glob(LOADERS)], environment, record.fileno())
            record.seek(0)
            fields = record.read().decode(errors="replace").replace(room, str(Path.cwd())).split("\0")
            try:
                commands = list(_commands(fields))
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"{self.path}: writes into the record of its commands: remove that") from error
        problems = [(int(one[1]), one[2]) for one in map(_PROBLEM.fullmatch, printed) if one]
        self.last_line = next(filter(None, reversed(printed)), "")
        return commands, list(dict.fromkeys(problems))

    def _printed(self, folder: str, programs: Sequence[str], environment: dict[str, str], record: int) -> list[str]:
        """Run bash, the first of some programs, in the room of a folder; return the lines that it printed."""
        room = f"{folder}/room"
        place = self.path.absolute()
        if place.is_relative_to(Path.cwd()):
            place = Path(room, place.relative_to(Path.cwd()))
        programs = [os.path.realpath(place) for place in programs]
        readable = [folder, str(PREAMBLE.parent), str(self.path.resolve().parent), str(Path.cwd())]
        with open(f"{folder}/printed", "w+b") as printed:
            try:
                process = subprocess.Popen(
                    [programs[0], str(place), *self.arguments],
                    cwd=room,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=[record],
                    start_new_session=True,
                    preexec_fn=partial(_confine, room, programs, readable) if self.is_protected else None,
                )
            except (OSError, subprocess.SubprocessError) as error:
                printed.seek(0)
                reason = printed.read().decode() or error
                remedy = "import it on another machine, or with --unprotected if you trust it"
                raise ConfigError(f"{self.path}: bash cannot be confined here: {reason}: {remedy}") from error
            try:
                self._wait(process, room)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, SIGKILL)
                process.wait()
            printed.seek(0)
            return printed.read().decode(errors="replace").splitlines()

    def _wait(self, process: subprocess.Popen[bytes], room: str) -> None:
        """Wait for the script's end."""
        ending = time.monotonic() + MAX_SECONDS
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            num_files = len(list(islice(Path(room).rglob("*"), MAX_FILES + 1)))
            if time.monotonic() > ending:
                raise ConfigError(f"{self.path}: it has not ended after {MAX_SECONDS} s: {SHORTEN}")
            if num_files > MAX_FILES:
                raise ConfigError(f"{self.path}: it writes more than {MAX_FILES} files: {SHORTEN}")
            if _num_processes(process.pid) > MAX_PROCESSES:
                raise ConfigError(f"{self.path}: it has more than {MAX_PROCESSES} processes: {SHORTEN}")


def _confine(room: str, programs: Sequence[str], folders: Sequence[str]) -> None:
    """Confine this process and the processes that it starts."""
    refused = [rule for rule in REFUSED.split(",") if rule.split()[0] not in STARTS]
    try:
        confine(
            room,
            memory_bytes=MEMORY_BYTES,
            cpu_seconds=MAX_SECONDS,
            file_bytes=FILE_BYTES,
            refused=",".join([GROUPS, *refused]),
            files=dict.fromkeys(programs, READ_FILE | EXECUTE) | dict.fromkeys(folders, READ_FILE | READ_DIR),
        )
    except Unprotected as error:
        os.write(2, str(error).encode())
        raise


def _mirror(folder: Path, copy: Path, text: str) -> None:
    """Make a folder with links to the files in another that a text names, and with the folders that it names."""
    copy.mkdir()
    for entry in filter(lambda entry: entry.name in text, os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False) and os.access(entry, os.R_OK | os.X_OK):
            _mirror(Path(entry), copy / entry.name, text)
        else:
            (copy / entry.name).symlink_to(entry)


def _num_processes(group: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(ProcessLookupError):
            count += os.getpgid(int(name)) == group
    return count


def _commands(fields: list[str]) -> Iterator[RecordedCommand]:
    """Yield the commands of a record: for each the number of its words, its line, and the words.

    Raises:
        ValueError, RuntimeError: it is none.
    """
    rest = iter(fields[:-1])
    for count in rest:
        yield RecordedCommand(int(next(rest)), list(islice(rest, int(count))))
