"""Start the whole program as a user does, and check that it leaves nothing behind when it has ended."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
POLL_SECONDS = 0.1
GONE_SECONDS = 10.0
START_SECONDS = 180.0
OF_CLOCKS = "^(timing_s|memory|sync)/|/mfu$|^time$|^rollout/(tokens_per_second|running_requests|cached_prompt_frac)$"
"""Metrics that are not the same in two runs alike."""
OF_ENGINES = re.compile(f"{OF_CLOCKS}|^val/|^rollout/(log_prob_diff/warnings|engine_restarts)$")

ONE_RANK_EACH = ("placement.actor=0", "placement.critic=0", "actor.parallel.tensor=1", "critic.parallel.pipeline=1")
"""Settings of the quickstart and the tiny run that place actor and critic on the first rank, unsharded."""
ENDLESS = ("trainer.total_steps=100000", "trainer.eval_interval=0", "trainer.save_interval=0")


class Program:
    """torchrun with two ranks, the leader of a session as under a terminal's shell; usable as a context manager.

    Its processes are noted while it runs, and found by an environment variable too, which all of them inherit.

    Args:
        folder: gets the output, output.txt, and a temporary folder.
        arguments: arguments of megappo.train: CONFIG key=value ...
        launcher: module that starts the ranks.
        environment: further variables.
        prefix: words before the command.
        options: further ones of the launcher.
        command: what starts the ranks in place of the launcher, and ends up as it.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        launcher: str = "megappo.torchrun",
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        command: Sequence[str] = (),
    ):
        self.launcher = launcher
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.output_file = folder / "output.txt"
        self.marker = uuid.uuid4().hex
        self.seen: set[psutil.Process] = set()
        self.shared_memory: set[Path] = set()
        variables = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "PROGRAM_UNDER_TEST": self.marker}
        two_ranks = (sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", "2", *options)
        self.started = time.time()
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                [*prefix, *(command or (*two_ranks, "-m", "megappo.train")), *map(str, arguments)],
                cwd=REPOSITORY,
                env=os.environ | variables | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self._note()
        for process in {*self.seen, *self._marked()}:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    @property
    def output(self) -> str:
        """Return the output so far."""
        return self.output_file.read_text(errors="replace")

    @property
    def ranks(self) -> list[psutil.Process]:
        """Return the ranks' processes, in order."""
        ranks = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended since
                if "megappo.train" in child.cmdline():
                    ranks[child.environ()["RANK"]] = child
        return [ranks[rank] for rank in sorted(ranks)]

    @property
    def listening(self) -> dict[str, str]:
        """Return the addresses on which its processes listen: address -> one of these processes."""
        self._note()
        return {socket.laddr.ip: _described(p) for p in self.seen for socket in _sockets(p)}

    def wait_until(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait until a condition holds while the program runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended with exit code {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"nothing within {seconds} s:\n{self.output}"
            self._note()
            time.sleep(POLL_SECONDS)
        self._note()

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Return the exit code, 128 + n after signal n; check that it ends in time and leaves nothing behind."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"not ended within {seconds} s:\n{self.output}"
            self._note()
            time.sleep(POLL_SECONDS)
        self.check_gone()
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the foreground process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)

    def check_gone(self) -> None:
        """Check that no process, shared memory or temporary file remains, or that they go within seconds."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := self._left():
            assert time.monotonic() < deadline, f"still there: {left}\n{self.output}"
            time.sleep(POLL_SECONDS)

    def _left(self) -> list[str]:
        processes = [_described(process) for process in {*self.seen, *self._marked()} if _is_alive(process)]
        memory = [str(path) for path in {*self.shared_memory, *self._named_shared_memory()} if path.exists()]
        kept = ("torchinductor_",) if self.launcher == "megappo.torchrun" else ("torchinductor_", "torchelastic_")
        return processes + memory + [str(p) for p in self.temporary.iterdir() if not p.name.startswith(kept)]

    def _named_shared_memory(self) -> set[Path]:
        """Return the shared memory named after one of the processes, without an earlier process's of its id."""
        pids = {str(process.pid) for process in self.seen}
        named = [path for path in Path("/dev/shm").iterdir() if pids & set(re.findall(r"\d+", path.name))]
        return {path for path in named if _last_change(path) >= self.started}

    def _note(self) -> None:
        """Remember the processes of the tree, and the shared memory that they have mapped."""
        if self.process.poll() is None:
            root = psutil.Process(self.process.pid)
            self.seen |= {root, *root.children(recursive=True)}
        for process in self.seen:
            self.shared_memory |= _mapped_shared_memory(process.pid)

    def _marked(self) -> set[psutil.Process]:
        return {process for process in psutil.process_iter() if self._is_marked(process)}

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("PROGRAM_UNDER_TEST") == self.marker
        except psutil.Error:
            return False


def _last_change(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def logged(run: Path) -> list[dict]:
    """Return the complete lines of a run's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def has_logged(run: Path, step: int) -> bool:
    """Return whether a run has logged a step."""
    return (run / "metrics.jsonl").exists() and any(metrics["step"] >= step for metrics in logged(run))


def trained_on(run: Path) -> list[dict]:
    """Return each step's metrics without the metrics of clocks and engines."""
    steps = [metrics for metrics in logged(run) if metrics["step"]]
    return [{key: value for key, value in metrics.items() if not OF_ENGINES.search(key)} for metrics in steps]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:100]}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _sockets(process: psutil.Process) -> list:
    try:
        return [socket for socket in process.net_connections() if socket.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return []


def _mapped_shared_memory(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
