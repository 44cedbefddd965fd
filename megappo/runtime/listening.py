"""The addresses that this program's processes listen on: the one they are reached by, and no other.

torch's stores obey whoever reaches them, and what ranks find there they unpickle. torch has them listen on all
interfaces; here they listen on loopback when a run has one node, else on the cluster's interface.
"""

import errno
import functools
import ipaddress
import os
import socket
import sys
from typing import Any

import psutil
from torch.distributed import Store, TCPStore, distributed_c10d

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BACKLOG = 4096


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one of the addresses of `host`, which is this machine; port 0 = any free one.

    Raises:
        OSError: the port is taken, or the host is another machine.
    """
    refused: OSError | None = None
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            refused = refused or error
    raise OSError(refused.errno, f"cannot listen on {host}, port {port}, on this machine ({refused.strerror})")


def run_store() -> Store:
    """Return torchrun's store, through which the run's ranks met; torch gives no public access to it."""
    return distributed_c10d._get_default_store()


def bind_stores() -> None:
    """Make each TCPStore that this process serves from now on listen on the address of its host name alone.

    It reaches the stores that torchrun and SGLang make as well. Once per process.
    """
    initialize = TCPStore.__init__

    @functools.wraps(initialize)
    def bound(
        store: TCPStore,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        *rest: Any,
        **options: Any,
    ) -> None:
        if is_master and options.get("master_listen_fd") is None:
            try:
                served = listener(host_name, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # torch reports it too, or finds that the store at this port is this process's own.
            else:
                port = served.getsockname()[1]
                options["master_listen_fd"] = served.detach()
        initialize(store, host_name, port, world_size, is_master, *rest, **options)

    TCPStore.__init__ = bound


def stay_on_this_node() -> None:
    """Make gloo and NCCL use loopback in a run of one node, where the user names no interface.

    gloo would take the interface that the host's name leads to.
    """
    for name in INTERFACE_VARIABLES:
        os.environ.setdefault(name, "lo")


def own_address(peer: str) -> str:
    """Return this machine's address as `peer` (a host) sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))  # sends nothing
        return probe.getsockname()[0]


def node_address() -> str:
    """Return this node's address for all ranks: on the head the address of torchrun's rendezvous, which all reach."""
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        return LOOPBACK
    master = os.environ["MASTER_ADDR"]
    return master if os.environ.get("GROUP_RANK", "0") == "0" else own_address(master)


def head_address(name: str) -> str:
    """Return the address of this node, the head of several, which all of them call `name`.

    Debian maps a machine's own name to 127.0.1.1, where no other node reaches it: then the address of the interface
    that GLOO_SOCKET_IFNAME names.
    """
    address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if address == name or not ipaddress.ip_address(address).is_loopback:
        return address
    for own in psutil.net_if_addrs().get(interface, ()):
        if own.family == socket.AF_INET:
            return own.address
    print(
        f"warning: {name} is {address} on this node, where other nodes cannot reach it: give --master-addr as an IP "
        "address, or set GLOO_SOCKET_IFNAME to the cluster's interface",
        file=sys.stderr,
    )
    return address
