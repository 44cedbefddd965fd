"""Processes that SGLang spawns of an engine's server, as it does on GPUs; on a CPU it forks them."""

import subprocess
import sys
from contextlib import suppress

import psutil

SPAWNS = """
import importlib.util, multiprocessing, sys
sys.modules["__main__"].__spec__ = importlib.util.find_spec("megappo.engines.server")  # as if it were this
work = "import time; print('begun', flush=True); time.sleep(600)"
child = multiprocessing.get_context("spawn").Process(target=exec, args=(work,))
child.start()
print(child.pid, flush=True)
child.join()
"""


def test_a_spawned_child_begins_and_ends_with_the_server():
    with subprocess.Popen([sys.executable, "-c", SPAWNS], stdout=subprocess.PIPE, text=True) as server:
        children = []
        try:
            children.append(psutil.Process(int(server.stdout.readline())))
            assert server.stdout.readline() == "begun\n", "it ended while it imported the server"
            server.kill()
            assert psutil.wait_procs(children, timeout=10)[1] == []
        finally:
            for process in (server, *children):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
