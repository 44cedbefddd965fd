"""Two nodes on this machine, each with its own network, connected by a switch."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

NODES = (0, 1)
INTERFACE = "cluster0"


class Network:
    """Network namespaces: two nodes, whose cables (veth pairs) lead to a bridge in a third."""

    def __init__(self) -> None:
        self._switch = f"megappo-{os.getpid()}"
        self._nodes = [f"{self._switch}-{number}" for number in NODES]

    def create(self) -> str:
        """Create the network; return the reason if that is not possible, else ""."""
        if missing := [name for name in ("ip", "nsenter", "ss", "unshare") if shutil.which(name) is None]:
            return f"{missing[0]} is not installed"
        try:
            self._create()
        except subprocess.CalledProcessError as error:
            return f"network namespaces are not permitted: {error.stderr.strip()}"
        return ""

    def remove(self) -> None:
        """Remove the namespaces, and with them their interfaces."""
        for name in (self._switch, *self._nodes):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def prefix(self, number: int) -> tuple[str, ...]:
        """Return the prefix that runs a command on a node; its process becomes that command."""
        return ("nsenter", f"--net=/run/netns/{self._nodes[number]}")

    def listening(self, number: int) -> set[str]:
        """Return the addresses on which a node's processes listen for TCP."""
        command = [*self.prefix(number), "ss", "--no-header", "--listening", "--tcp", "--numeric"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def pull_cable(self, number: int) -> None:
        """Disconnect a node at the switch: it keeps its address and its routes."""
        _ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def plug_cable(self, number: int) -> None:
        """Connect a node again."""
        _ip("-n", self._switch, "link", "set", f"port{number}", "up")

    def _create(self) -> None:
        for name in (self._switch, *self._nodes):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for number, node in enumerate(self._nodes):
            peer = ("peer", "name", f"port{number}", "netns", self._switch)
            _ip("-n", node, "link", "add", INTERFACE, "type", "veth", *peer)
            _ip("-n", node, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
            _ip("-n", node, "link", "set", INTERFACE, "up")
            _ip("-n", self._switch, "link", "set", f"port{number}", "master", "switch", "up")


def address(number: int) -> str:
    return f"192.0.2.{number + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[Network]:
    """Yield a network; the test is skipped where none can be created."""
    network = Network()
    try:
        if refusal := network.create():
            pytest.skip(refusal)
        yield network
    finally:
        network.remove()
