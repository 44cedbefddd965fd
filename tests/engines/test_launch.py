"""Arguments and environment of an engine's process."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path

import pytest

from megappo.architecture.families import FAMILIES
from megappo.commands import train
from megappo.config.schema import Config, Rollout
from megappo.engines import launch
from megappo.placement.run_plan import plan_run
from megappo.runtime import platform


def test_all_that_an_engine_on_gpus_has_can_sleep(monkeypatch):
    rollout = Rollout(mem_fraction_static=0.4, server_args={"cuda_graph_backend_prefill": "full"})
    arguments = launch.server_arguments("model", Rollout(mem_fraction_static=0.4), "bf16", on_gpu=True, seed=0)
    assert arguments["enable_memory_saver"] and arguments["mem_fraction_static"] == 0.4
    assert arguments["cuda_graph_backend_prefill"] == "disabled", "SGLang ends: its default's graphs cannot sleep"
    assert launch.environment(["0"], 1, Path("/tmp/x"))["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "true"
    arguments = launch.server_arguments("model", rollout, "bf16", on_gpu=True, seed=0)
    assert arguments["cuda_graph_backend_prefill"] == "full", "a user's own argument is not passed on"
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "false")
    assert launch.environment(["0"], 1, Path("/tmp/x"))["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "false"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("set_to", "left"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:512, expandable_segments:True", "max_split_size_mb:512"),
        ("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]", "roundup_power2_divisions:[256:1,512:2]"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
    ],
)
def test_the_trainers_expandable_segments_do_not_reach_the_engine(monkeypatch, name, set_to, left):
    monkeypatch.setenv(name, set_to)
    assert launch.environment(["3", "5"], 2, Path("/tmp/x")).get(name) == left


def toolkit(home: Path) -> str:
    """A toolkit's nvcc."""
    header = home / "include" / "cuda_runtime.h"
    header.parent.mkdir(parents=True)
    header.touch()
    return executable(home)


def executable(home: Path) -> str:
    path = home / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.touch(0o755)
    return str(path)


def test_the_engine_compiles_with_the_users_toolkit_else_the_hosts_else_pips(monkeypatch, tmp_path):
    def home() -> str | None:
        return launch.environment(["0"], 1, Path("/tmp/x")).get("CUDA_HOME")

    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "host" / "bin"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    which, host = shutil.which, tmp_path / "host"
    monkeypatch.setattr(shutil, "which", lambda path: None if str(path).startswith("/usr/local") else which(path))
    assert home() is None
    pip = toolkit(tmp_path / "nvidia" / "cu13")
    assert (platform.nvcc(), home()) == (pip, str(tmp_path / "nvidia" / "cu13"))
    wrapper = Path(executable(host))
    assert platform.nvcc() == pip, "there is nothing to compile with beside a wrapper"
    wrapper.unlink()
    wrapper.symlink_to(toolkit(tmp_path / "cuda-13.0"))
    assert home() == str(tmp_path / "cuda-13.0"), "what CUDA_HOME is, is where the link leads to"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    assert home() == str(tmp_path / "own")
    assert platform.nvcc() is None, "SGLang looks nowhere else then"
    assert (executable(tmp_path / "own"), home()) == (platform.nvcc(), str(tmp_path / "own"))


@pytest.mark.parametrize("of_user", [None, "/opt/a:/opt/b"])
def test_what_pip_has_for_gpus_is_behind_what_the_user_has(of_user, monkeypatch, tmp_path):
    def folders() -> str | None:
        return launch.environment(["0"], 1, Path("/tmp/x")).get("LD_LIBRARY_PATH")

    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    if of_user is not None:
        monkeypatch.setenv("LD_LIBRARY_PATH", of_user)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / {"scripts": "bin"}.get(name, "")))
    monkeypatch.setenv("PATH", "/usr/bin")
    assert launch.environment(["0"], 1, Path("/tmp/x"))["PATH"] == f"/usr/bin:{tmp_path}/bin", "there is pip's ninja"
    assert folders() == of_user
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    of_pip = f"{tmp_path}/nvidia/cu13/lib"
    assert folders() == (f"{of_user}:{of_pip}" if of_user else of_pip)


@pytest.mark.parametrize(("of_user", "cumem"), [({}, "0"), ({"NCCL_CUMEM_ENABLE": "1"}, "1")])
def test_nccl_is_set_alike_for_trainer_and_engine_before_a_group_is_made(monkeypatch, of_user, cumem):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")} | of_user
    monkeypatch.setattr(os, "environ", environment | {"LOCAL_WORLD_SIZE": "2"})
    seen = {}
    monkeypatch.setattr(train.dist, "init_process_group", lambda *_, **__: seen.update(os.environ))
    monkeypatch.setattr(train, "resolved", lambda _: lambda plan, own, outlook, cleanup: None)
    store = train.dist.HashStore()
    store.set("finished", "")
    sections = {"model": {"path": "m"}, "data": {"train_files": ["t"]}, "trainer": {"output_dir": "out"}}
    sections["placement"] = {"actor": "1", "critic": "1", "rollout": "0"}  # weights are broadcast
    sections["rollout"] = {"server_args": {"enable_nccl_nvls": True}}
    train._build(plan_run(Config.model_validate(sections), 2, 2), store, 1, ExitStack())
    variables = launch.environment(["3", "5"], 2, Path("/tmp/x"))
    for name, value in {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": "1"}.items():
        assert seen[name] == variables[name] == value
    assert variables["CUDA_VISIBLE_DEVICES"] == "3,5"


@pytest.mark.parametrize("policy, spins", [(None, launch.SPIN_COUNT), ("passive", None)])
def test_threads_of_an_engine_on_a_cpu(policy, spins, monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 7})
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    variables = launch.environment([], 2, Path("/tmp/x"), num_threads=2)
    assert variables["OMP_NUM_THREADS"] == "2" and variables.get("GOMP_SPINCOUNT") == spins
    assert variables["SGLANG_CPU_OMP_THREADS_BIND"] == "2,3|5,7"
    second = launch.environment([], 2, Path("/tmp/x"), index=1, num_threads=1)
    assert second["SGLANG_CPU_OMP_THREADS_BIND"] == "5|7", "the first engine has cores of its own"


@pytest.mark.parametrize("set_to, found", [(None, "1"), ("8,2", "8,2")])
def test_threads_that_the_user_sets_are_the_engines(set_to, found, monkeypatch):
    monkeypatch.delenv(platform.ENGINE_CORES, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_to)
    variables = launch.environment([], 1, Path("/tmp/x"), num_threads=platform.engine_threads(1))
    assert variables["OMP_NUM_THREADS"] == found


def test_engines_of_a_node_share_its_cores(monkeypatch):
    monkeypatch.setenv(platform.ENGINE_CORES, "8")
    assert [platform.engine_threads(ranks) for ranks in (1, 3, 16)] == [8, 2, 1]


RESOLVED = """
import json, sys
from megappo.engines import server
from sglang.srt.models.registry import ModelRegistry
found = {name: ModelRegistry.resolve_model_cls([name])[0] for name in sys.argv[1:]}
imported = [name for name in sys.modules if name.startswith("sglang.srt.models.")]
print(json.dumps([{name: [model.__module__, model.__name__] for name, model in found.items()}, imported]))
"""


SERVED_AS = {"Olmo3ForCausalLM": "Olmo2ForCausalLM"}  # by SGLang's Olmo3Config
WITHOUT_CLASS = ("SeedOssForCausalLM", "SmolLM3ForCausalLM")  # SGLang serves them with transformers' code


@pytest.mark.slow  # changes with SGLang's version or a new family only
def test_sglang_finds_every_family_without_importing_all_of_its_models(monkeypatch, tmp_path):
    # Of linear attention SGLang finds the classes by importing all models; on a CPU it lacks their kernels.
    families = [name for name, family in FAMILIES.items() if not family.linear_attention]
    families = [SERVED_AS.get(name, name) for name in families if name not in WITHOUT_CLASS]
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    variables = launch.environment([], 1, tmp_path)
    printed = subprocess.check_output([sys.executable, "-c", RESOLVED, *families], env=variables, text=True)
    found, imported = json.loads(printed.splitlines()[-1])
    assert {name: model for name, (_, model) in found.items()} == {name: name for name in families}
    assert {module for module, _ in found.values()} <= set(imported), "they are SGLang's own"
    folder = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "models"
    others = {f"sglang.srt.models.{path.stem}" for path in folder.glob("*.py")} - set(imported)
    assert "sglang.srt.models.gemma" in others and len(others) > 100, "all were imported"


def test_a_users_own_package_of_models_stays(monkeypatch):
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs")
    assert launch.environment([], 1, Path("/tmp/x"))["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "theirs"
