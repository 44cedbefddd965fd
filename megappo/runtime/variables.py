"""Environment variables of the machine, read alike by all processes of this program. The standard library alone."""

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

PYTHON = (sys.executable, "-P")
"""Starts a process of this program: files of the working folder must not hide what is installed."""
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DEVICE = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")


def for_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for another Python process: it finds this package, and requests loopback without a proxy."""
    folders = [str(PACKAGE_ROOT), *variables.get("PYTHONPATH", "").split(os.pathsep)]
    direct = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    direct = direct if direct == "*" else f"{direct},localhost,127.0.0.1,::1".lstrip(",")
    path = os.pathsep.join(filter(None, folders))  # an empty part would be the working folder
    return {**variables, "PYTHONPATH": path, "no_proxy": direct, "NO_PROXY": direct}


@cache
def proxy_for(url: str) -> str | None:
    """Return the proxy for requests to a server; None for this machine, its cluster, and what no_proxy names."""
    from urllib.request import getproxies_environment, proxy_bypass_environment  # takes longer than all the above

    server, proxies = urlsplit(url), getproxies_environment()
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
        found = {ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:  # only the proxy may know the name
        return False
    return not any(address.is_global for address in found)


def visible_devices(variables: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to the first invalid name, and one MIG part
    at most. None where it is not set."""
    named = variables.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return None
    names = [name.strip() for name in takewhile(DEVICE.fullmatch, named.split(","))]
    return names[:1] if "MIG-" in named else names
