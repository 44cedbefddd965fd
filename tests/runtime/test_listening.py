"""Addresses on which processes listen."""

import socket
from datetime import timedelta

import psutil
import pytest

from megappo.runtime.listening import head_address, listener
from megappo.sync.broadcast import open_store


def test_the_store_of_the_weights_listens_on_the_address_it_is_given():
    store = open_store("127.0.0.1", 1, timedelta(seconds=10))
    [address] = {c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == store.port and not c.raddr}
    assert address == "127.0.0.1"
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_another_machine_is_refused_with_its_name():
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.77, port 0, on this machine"):
        listener("192.0.2.77", 0)  # an address for documents alone


def test_the_head_of_several_nodes_is_where_the_others_reach_it(monkeypatch, capsys):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert head_address("node7") == "127.0.0.1"
    assert not capsys.readouterr().err
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert head_address("node7") == "127.0.1.1"
    assert capsys.readouterr().err.startswith("warning: node7 is 127.0.1.1 on this node, where other nodes cannot")


def test_an_address_is_taken_as_it_is(capsys):
    assert head_address("127.0.0.1") == "127.0.0.1"
    assert not capsys.readouterr().err
