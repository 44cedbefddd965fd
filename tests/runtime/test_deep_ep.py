"""DeepEP, with the pinned package's own Python and without its compiled part: ranks start where it cannot be imported,
and megatron-core's dispatchers get it on request."""

import os
import subprocess
import sys

SCRIPT = """
import sys, types
from megappo.runtime import megatron_patches, megatron_setup

sys.path.append(sys.prefix + "/contract")
compiled, prerequisites = types.ModuleType("deep_ep._C"), types.ModuleType("deep_ep.prerequisites")
for name in ("Config", "EventHandle", "topk_idx_t"):
    setattr(compiled, name, type(name, (), {}))
compiled.init_jit = lambda *folders: print("compiles with", folders[1])
prerequisites.check_prerequisites = lambda **expected: None  # torch for CUDA, with a device
sys.modules |= {"deep_ep._C": compiled, "deep_ep.prerequisites": prerequisites}
megatron_setup.install()
print("megatron-core is imported")
from megatron.core.transformer.moe import token_dispatcher

assert token_dispatcher.fused_dispatch is None
megatron_patches.import_deep_ep()
assert token_dispatcher.fused_dispatch and token_dispatcher.fused_combine
token_dispatcher.set_deepep_num_sms(24)
import deep_ep
assert deep_ep.Buffer.num_sms == 24
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with these variables."""
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)


def test_dispatchers_get_deep_ep_on_request() -> None:
    done = run(CUDA_HOME="/opt/cuda", EP_SUPPRESS_NCCL_CHECK="1", EP_NCCL_ROOT_DIR="/")
    assert done.returncode == 0, done.stderr
    assert "compiles with /opt/cuda" in done.stdout


def test_ranks_start_where_deep_ep_cannot_be_imported() -> None:
    done = run(EP_NCCL_ROOT_DIR="/nowhere")
    assert done.stdout == "megatron-core is imported\n"
    assert "AssertionError: No libnccl.so found in /nowhere/lib/" in done.stderr
