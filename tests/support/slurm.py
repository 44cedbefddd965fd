"""A SLURM for tests: a controller and two nodes with their own networks and names, from the distribution's packages."""

import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from network import NODES, Network, address

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel", "unshare")
PACKAGES = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
NAMES = ("node0", "node1")
POLL_SECONDS = 0.2
START_SECONDS = 60.0
END_SECONDS = 20.0
CONTROLLER_PORT, NODE_PORT = 17000, 17001
CONFIG = """
ClusterName=test
SlurmctldHost={name}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={node_timeout}
KillWait=5
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NAMED = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
"""Runs a command where the host has another name, and other hosts have names at all."""


def missing() -> str:
    """Return the reason why SLURM cannot run here, with the remedy; "" if it can."""
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        return f"{absent[0]} is not installed: {PACKAGES}"
    return "" if os.getuid() == 0 else "it takes root"


class Slurm:
    """Usable as a context manager, which ends all that it has started, jobs too, by their process ids.

    Its processes are found by an environment variable, which all of them inherit.

    Args:
        folder: a folder of its own, with a short path.
        node_timeout: seconds until a node that does not answer is taken for down.
    """

    def __init__(self, folder: Path, network: Network, node_timeout: int = 30):
        self.folder = folder
        self.network = network
        self._started: list[subprocess.Popen] = []
        self._marker = uuid.uuid4().hex
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "SLURM_UNDER_TEST": self._marker}
        self._write(node_timeout)

    def __enter__(self) -> "Slurm":
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, *command: object, folder: Path | None = None, **variables: str) -> str:
        """Return a command's output, on the first node."""
        done = subprocess.run(
            [*self._on(0), *map(str, command)],
            env=self._environment | variables,
            cwd=folder or self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, folder: Path, *words: object, **variables: str) -> int:
        """Submit a job from a folder and return its number."""
        return int(self.run("sbatch", "--parsable", *words, folder=folder, **variables))

    def job(self, number: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def resume(self, node: int) -> None:
        """Put a node back into service if Slurm considers it down."""
        [state] = re.findall(r" State=(\S+)", self.run("scontrol", "--oneliner", "show", "node", NAMES[node]))
        if "DOWN" in state:
            self.run("scontrol", "update", f"nodename={NAMES[node]}", "state=resume")

    def wait_until(self, condition: Callable[[], bool], seconds: float, status: Callable[[], str] = str) -> None:
        """Wait until a condition holds; if it does not in time, fail with `status()` in the message."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing within {seconds:g} s:\n{status()}"
            time.sleep(POLL_SECONDS)

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return its processes, also processes of jobs, whose command line contains a word."""
        return [process for process in psutil.process_iter() if self._is_own(process, word)]

    def _write(self, node_timeout: int) -> None:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={address(node)} Port={NODE_PORT} CPUs=2 RealMemory=4000 "
            "Gres=gpu:1"
            for node, name in zip(NODES, NAMES, strict=True)
        )
        of_controller = {"name": NAMES[0], "address": address(0), "port": CONTROLLER_PORT}
        config = CONFIG.format(folder=self.folder, node_timeout=node_timeout, nodes=nodes, **of_controller)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        hosts = [("127.0.0.1", "localhost"), *zip(map(address, NODES), NAMES, strict=True)]
        (self.folder / "hosts").write_text("".join(f"{number} {name}\n" for number, name in hosts))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in NAMES)):
            (self.folder / name).mkdir()

    def _on(self, node: int) -> Sequence[str]:
        """Return the prefix that runs a command on a node; its process becomes that command."""
        named = ("unshare", "--uts", "--mount", "bash", "-c", NAMED, "-", NAMES[node], str(self.folder / "hosts"))
        return (*self.network.prefix(node), *named)

    def _start(self) -> None:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._spawn("munged", "--foreground", "--force", *options)
        self.wait_until(lambda: (self.folder / "munge.socket").exists(), START_SECONDS)
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", NAMES[node], node=node)
        self.wait_until(lambda: self._idle() == len(NODES), START_SECONDS, self._logs)

    def _idle(self) -> int:
        states = subprocess.run(
            [*self._on(0), "sinfo", "--noheader", "--Node", "--format=%t"],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        return states.stdout.split().count("idle")

    def _spawn(self, *command: str, node: int = 0) -> None:
        with (self.folder / f"{command[0]}{node}.log").open("w") as log:
            process = subprocess.Popen(
                [*self._on(node), *command],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self.folder.glob("*.log"))

    def _end(self) -> None:
        """Kill all processes: Slurm's daemons before the jobs, so that no job is restarted."""
        deadline = time.monotonic() + END_SECONDS
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there: {left}\n{self._logs()}"
            for process in sorted(left, key=_is_job):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(POLL_SECONDS)
        for process in self._started:
            process.wait()

    def _is_own(self, process: psutil.Process, word: str) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            own = process.environ().get("SLURM_UNDER_TEST") == self._marker
            return own and word in " ".join(process.cmdline())
        except psutil.Error:
            return False


def _is_job(process: psutil.Process) -> bool:
    try:
        return process.name() not in ("slurmctld", "slurmd", "munged")
    except psutil.NoSuchProcess:
        return True
