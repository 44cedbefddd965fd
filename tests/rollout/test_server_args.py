"""The names in rollout.server_args against SGLang's own."""

import importlib.util
import subprocess
import sys

import pytest

from megappo.rollout.server_args import known_names, server_args_errors

OWN_NAMES = """
import inspect
import megappo.rollout.server  # makes SGLang importable on a CPU
from sglang.srt.server_args import ServerArgs

print(*inspect.signature(ServerArgs).parameters)
"""


def test_the_names_read_in_the_source_are_those_of_sglang():
    done = subprocess.run([sys.executable, "-c", OWN_NAMES], capture_output=True, text=True, timeout=120)
    assert known_names() == set(done.stdout.split()), done.stderr


def test_reserved_and_unknown_names_are_told_with_the_remedy():
    assert list(
        server_args_errors({"schedule_policy": "lpm", "host": "0.0.0.0", "chunked_prefil_size": 1, "zzz": 1})
    ) == [
        "rollout.server_args: host may not be set: megappo sets it itself; remove it",
        "rollout.server_args: SGLang does not know chunked_prefil_size: did you mean chunked_prefill_size?",
        "rollout.server_args: SGLang does not know zzz: remove it",
    ]


@pytest.fixture
def forgotten():
    known_names.cache_clear()
    yield
    known_names.cache_clear()


def test_without_sglang_only_reserved_names_are_told(monkeypatch, forgotten):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    assert known_names() == frozenset()
    [error] = server_args_errors({"zzz": 1, "port": 1})
    assert error.startswith("rollout.server_args: port may not be set")
