"""torchvision can be imported, whatever it was built for; each case in a process that knows nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
from slow import slow_ones

BEGIN = """
import sys
from megappo.runtime.torchvision_on_cpu import define_torchvision_operators
assert "torch" not in sys.modules, "importing it is cheap"
"""


def python(code: str, path: Path | None = None) -> None:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, "-c", BEGIN + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_installed_one_can_be_imported_by_transformers() -> None:
    python("define_torchvision_operators(); define_torchvision_operators()\nfrom transformers import LlamaForCausalLM")


@pytest.mark.parametrize("name", slow_ones(("_C.so", "_C_stable.so"), ("_C_stable.so",)))
def test_operators_of_a_torchvision_that_loads_are_left_to_it(name: str, tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    [library] = Path(safetensors.__file__).parent.glob("*.so")  # any that loads
    (package / name).symlink_to(library)
    has_nms = "import torch; assert hasattr(torch.ops.torchvision, 'nms')"
    python(f"assert not define_torchvision_operators()\n{has_nms.replace('assert', 'assert not')}", tmp_path)
    (package / name).unlink()
    (package / name).write_bytes(b"a library for something else")
    python(f"assert define_torchvision_operators()\n{has_nms}", tmp_path)


def test_without_torchvision_there_is_nothing_to_do() -> None:
    python("sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; assert not define_torchvision_operators()")
