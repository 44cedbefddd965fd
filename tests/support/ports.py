"""Ports for servers that tests start."""

import random
import socket
from contextlib import suppress
from pathlib import Path

FIRST_PORT = 10_000
RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that is free, and that no connection gets by itself before the test's server listens there."""
    last_port = int(RANGE_OF_CONNECTIONS.read_text().split()[0]) - 1
    while True:
        port = random.SystemRandom().randint(FIRST_PORT, last_port)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
