"""Any process of the CPU environment can import torchvision, whatever it was built for, and so transformers' models."""

import subprocess
import sys
from pathlib import Path

import pytest


def python(code: str, folder: Path | None = None) -> str:
    """Run code in a process that knows nothing else; return its output."""
    begin = f"import sys; sys.path.insert(0, {str(folder)!r})\n" if folder else ""
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_imports_models_of_transformers() -> None:
    python("from transformers import LlamaForCausalLM")


@pytest.mark.parametrize("loads", [True, False])
def test_operators_of_a_torchvision_that_loads_are_left_to_it(loads: bool, tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    library = "import torch; own = torch.library.Library('torchvision', 'DEF'); own.define('nms(Tensor a) -> Tensor')"
    (package / "__init__.py").write_text(f"{library if loads else ''}\nimport torchvision._meta_registrations")
    (package / "_meta_registrations.py").write_text("import torch; print(torch.ops.torchvision.nms.default)")
    shown = "import torch, torchvision; print(torch.ops.torchvision.nms.default._schema)"
    schema = "nms(Tensor a)" if loads else "nms(Tensor dets, Tensor scores, float iou_threshold)"
    assert f"torchvision::{schema} -> Tensor" in python(shown, tmp_path)
