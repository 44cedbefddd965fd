"""The machine as all processes of this program see it: its environment variables, and the cores on which ranks compute.
The standard library alone, since any process imports it."""

import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

PYTHON = (sys.executable, "-P")
"""Starts a process of this program: files of the working folder must not hide what is installed."""
ONLY_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Variables that torchrun sets, as a run of one process has them."""
SET_BY_TORCHRUN = (*ONLY_RANK, "MASTER_ADDR", "MASTER_PORT")
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DEVICE = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")
_BEFORE: list[set[int]] = []
"""The cores of this process before it was bound to its share; [] where it is not."""


def for_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for another Python process: it finds this package, and requests loopback without a proxy."""
    folders = [str(PACKAGE_ROOT), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    direct = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    direct = direct if direct == "*" else f"{direct},localhost,127.0.0.1,::1".lstrip(",")
    path = os.pathsep.join(filter(None, folders))  # an empty part would be the working folder
    return {**variables, "PYTHONPATH": path, "no_proxy": direct, "NO_PROXY": direct}


def search_path() -> str:
    """Return the PATH of a user's command: `python` is the one of this program."""
    return os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))


@cache
def proxy_for(url: str) -> str | None:
    """Return the proxy for requests to a server; None for this machine, its cluster, and what no_proxy names."""
    from urllib.request import getproxies_environment, proxy_bypass_environment  # takes longer than all the above

    server = urlsplit(url)
    proxies = getproxies_environment()
    proxy = proxies.get(server.scheme) or proxies.get("all")
    if not proxy or proxy_bypass_environment(server.netloc.rpartition("@")[2]) or is_near(server.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def is_near(host: str) -> bool:
    """Return whether a host is this machine or one of its cluster: its name has no dots, or none of its addresses is of
    the Internet."""
    if "." not in host and ":" not in host:
        return True
    try:
        addresses = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:  # only the proxy may know the name
        return False
    return not any(address.is_global for address in addresses)


def visible_devices(variables: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to the first invalid name, and one MIG part
    at most. None where it is not set."""
    named = variables.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [name.strip() for name in takewhile(DEVICE.fullmatch, named.split(","))]
    return names[:1] if "MIG-" in named else names


def num_gpus() -> int:
    """Return the number of GPUs that processes of this one would use, by CUDA_VISIBLE_DEVICES, else by nvidia-smi."""
    named = visible_devices(os.environ)
    if named is not None or not shutil.which("nvidia-smi"):
        return len(named or ())
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def share(cores: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """Return a rank's share, neighbours, of the cores; there are at least as many as ranks."""
    return cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]


def bind(local_rank: int, num_ranks: int, num_cores: int, num_threads: int) -> None:
    """Bind this process's threads, and the threads that they start, to its share of the node's cores.

    A collective wakes a rank several times. On two cores the kernel puts it behind the other rank in one time of three,
    though a core is idle, and it waits for 3 ms. Bound, two ranks on idle cores take 5 to 10 % less for an update of a
    small model, and a sixth less on busy ones. Open MPI binds ranks by default, too. Nothing is done where there are
    fewer cores than ranks or than threads in a share, and where a container has a limit: others may have the same cores
    then.

    Args:
        num_ranks: ranks on this node.
        num_cores: cores that the process may use by all limits.
        num_threads: threads that compute at the same time.
    """
    mine = os.sched_getaffinity(0)
    ours = share(sorted(mine), local_rank, num_ranks)
    if num_ranks <= len(mine) == num_cores and num_threads <= len(ours):
        _bind_threads(ours)


def bind_near(pci_address: str, sysfs: Path = Path("/sys")) -> str:
    """Bind this process's threads, and the threads that they start, to this process's cores on a GPU's NUMA node;
    return a line for the log. It does nothing and returns "" where the node is unknown, or has all or none of these
    cores.

    Host memory that a thread pins lies on its node, and copies between a GPU and another node's memory cross the link
    between the CPUs, which is slower.

    Args:
        pci_address: address of the GPU, as sysfs writes it; "" without one.
    """
    try:
        mask = int((sysfs / "bus/pci/devices" / pci_address / "local_cpus").read_text().replace(",", ""), 16)
    except OSError:
        return ""
    mine = os.sched_getaffinity(0)
    near = {core for core in mine if mask >> core & 1}  # with an unknown node the mask has all cores
    if near in (set(), mine):
        return ""
    _bind_threads(near)
    return f"bound to {len(near)} of its {len(mine)} cores: the NUMA node of its GPU, {pci_address}"


def _bind_threads(cores: Collection[int]) -> None:
    _BEFORE[:] = [os.sched_getaffinity(0)]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def usable() -> set[int]:
    """Return the cores that this process may use, or might before it was bound."""
    return _BEFORE[0] if _BEFORE else os.sched_getaffinity(0)


@contextmanager
def unbound() -> Iterator[None]:
    """Let a process that is started meanwhile use all cores that this one had before it was bound."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable())
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
