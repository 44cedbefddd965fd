"""Every stage of the GPU kit by its command: at full size on a GPU, tiny on a CPU, so that none of it rots."""

import json
import subprocess
import sys

import pytest
import torch
from gpu_kit import KIT, NODE_STAGES, STAGES
from program import REPOSITORY

from megappo.runtime import platform

SHOWN = ("heads", "attention")
"""On a CPU; the others are slow ones there."""
ON_GPUS = ("whole_run_te", "whole_run_fp8", "whole_run_gpt_oss", "whole_run_linear")
LEFT_OUT = ("doctor", *(() if platform.has_cuda() else ON_GPUS))
"""The doctor has tests of its own; the others need a GPU."""
HELPERS = {"common", "engines", "runs", "served"}
SCRIPTS = {"run.py": STAGES, "node.py": NODE_STAGES}


def case(script: str, name: str):
    seconds = SCRIPTS[script][name][1]
    is_slow = not platform.has_cuda() and name not in SHOWN
    needs_more = script == "node.py" and torch.cuda.device_count() == 1
    marks = [pytest.mark.timeout(seconds + 30), *([pytest.mark.slow] * is_slow)]
    return pytest.param(script, name, marks=[*marks, pytest.mark.skipif(needs_more, reason="needs several GPUs")])


CASES = [case(script, name) for script, stages in SCRIPTS.items() for name in stages if name not in LEFT_OUT]


@pytest.mark.parametrize(("script", "name"), CASES)
def test_a_stage_finds_nothing_wrong(script: str, name: str, tmp_path) -> None:
    command = [sys.executable, KIT / script, "--output", tmp_path, name]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, (tmp_path / f"{name}.log").read_text()[-6000:]
    (result,) = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert name.startswith(result["figures"]["stage"]) and (result["figures"]["device"] == "cpu") != platform.has_cuda()
    report = subprocess.run(
        [sys.executable, KIT / "report.py", tmp_path / "results.json"], capture_output=True, text=True
    )
    assert f"| {name} | passed |" in report.stdout, report.stderr


def test_there_is_no_other_stage() -> None:
    files = {path.stem for path in (REPOSITORY / "tests" / "gpu" / "stages").glob("*.py")}
    commands = [arguments for stages in SCRIPTS.values() for arguments, _ in stages.values()]
    run = {arguments[0].rpartition("/")[2].removesuffix(".py") for arguments in commands}
    assert files - HELPERS == run - {"-m"}
