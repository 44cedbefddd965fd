"""Import what ranks and engines import, as a user's environment has it and without the packages that the kit leaves
out, each with and without CUDA's toolkit. No variant fails, and the parts that only some of them can use are listed.

python tests/gpu/stages/imports.py
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import REPOSITORY, report, sized
from gpu_kit import kit_module

from megappo.runtime import platform

TOOLKIT = ("CUDA_HOME", "CUDA_PATH")
PROGRAMS = {
    "rank": """
from megappo.runtime import megatron_patches, megatron_setup
megatron_setup.install()
import megappo.trainer.main
names = "transformer_engine.pytorch", "fla"
parts = {"deep_ep": megatron_patches.import_deep_ep}
""",
    "engine": """
import megappo.engines.server
import sglang.launch_server, sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler
names = "flashinfer", "sgl_kernel.flash_attn", "deep_gemm", "deep_ep", "flash_attn.cute", "tilelang", "quack"
parts = {}
""",
}
"""Modules that a process imports, and optional parts of them."""
BEFORE = """
import functools, importlib, json, site, sys
site.addsitedir(sys.argv[1])
"""
AFTER = """
parts |= {name: functools.partial(importlib.import_module, name) for name in names}
found = {}
for name, load in parts.items():
    try:
        load()
        found[name] = True
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def left_out() -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that the kit does not pack."""
    bundle = kit_module("bundle")
    patterns = bundle.left_out()
    every = importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    return [one for one in every if bundle.matches(one.metadata["Name"], patterns) and one.files]


def entries(distributions: list[importlib.metadata.Distribution]) -> set[str]:
    """Return the names in site-packages that hold the distributions' files."""
    return {Path(str(file)).parts[0] for one in distributions for file in one.files or ()}


def without(distributions: list[importlib.metadata.Distribution], folder: Path) -> Path:
    """Fill a folder with links to all packages of this environment except the distributions'."""
    site = Path(sysconfig.get_path("purelib"))
    names = {one.metadata["Name"] for one in distributions}
    kept = [one for one in importlib.metadata.distributions(path=[str(site)]) if one.metadata["Name"] not in names]
    hidden = entries(distributions) - entries(kept)
    for path in site.iterdir():
        if path.name not in hidden:
            folder.joinpath(path.name).symlink_to(path)
    return folder


def variables(*, has_toolkit: bool) -> dict[str, str]:
    """Return this process's environment, with or without nvcc."""
    found = {name: value for name, value in os.environ.items() if name not in TOOLKIT}
    found["PYTHONPATH"] = str(REPOSITORY)
    nvcc = platform.nvcc()
    if has_toolkit and nvcc:
        return found | {"CUDA_HOME": str(Path(nvcc).parents[1])}
    folders = [folder for folder in found["PATH"].split(os.pathsep) if not Path(folder, "nvcc").exists()]
    return found | {"PATH": os.pathsep.join(folders)}


def hiding(folder: str = "/usr/local/cuda") -> list[str]:
    """Return the command that runs another one without the machine's toolkit; nothing where that is impossible.

    deep_ep looks for nvcc there, too.
    """
    hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh"]
    if not Path(folder).exists() or shutil.which("unshare") is None:
        return []
    return [] if subprocess.run([*hide, "true"], capture_output=True).returncode else hide


def imported(program: str, site: Path, has_toolkit: bool) -> dict[str, bool | str]:
    """Return what a new process can use, which has the packages of a folder only."""
    python = os.path.realpath(sys.executable)  # outside of this environment
    hidden = [] if has_toolkit else hiding()
    command = [*hidden, python, "-S", "-c", BEFORE + PROGRAMS[program] + AFTER, site]
    environment = variables(has_toolkit=has_toolkit)
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, f"{program}, {site}, {has_toolkit=}: {done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def measure() -> dict:
    figures: dict = {"toolkit": platform.nvcc(), "hidden": " ".join(hiding())}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(sized(8, 2)) as pool:
        hidden = left_out()
        sites = {"whole": Path(sysconfig.get_path("purelib"))}
        if hidden:
            sites["packed"] = without(hidden, Path(folder))
        jobs = {
            (program, f"{name}_{'with' if has_toolkit else 'without'}_toolkit"): pool.submit(
                imported, program, site, has_toolkit
            )
            for program in PROGRAMS
            for name, site in sites.items()
            for has_toolkit in (True, False)
        }
        found = {key: job.result() for key, job in jobs.items()}
    for program in PROGRAMS:
        variants = {name: usable for (of, name), usable in found.items() if of == program}
        for part in variants["whole_with_toolkit"]:
            states = {name: usable[part] for name, usable in variants.items()}
            is_same = len({state is True for state in states.values()}) == 1
            figures[f"{program}/{part}"] = states["whole_with_toolkit"] if is_same else states
    return {"stage": "imports", "left_out": sorted(one.metadata["Name"] for one in hidden), **figures}


if __name__ == "__main__":
    report(measure)
