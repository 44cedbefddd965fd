"""Arguments and variables for SGLang, compared with SGLang's own source."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from program import REPOSITORY

from megappo.config.schema import Rollout
from megappo.config.sections import SAMPLING_ARGUMENTS, changed_sampling
from megappo.engines.client import WEIGHTS, WORKING_MEMORY
from megappo.engines.launch import GPU_ARGUMENTS, GPU_VARIABLES, environment, nccl_variables
from megappo.lab.plan.run_checks import known_names, server_args_errors

OWN = """
import inspect, json, os, sys
import megappo.engines.server  # makes SGLang importable on a CPU
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, QUANTIZATION_CHOICES
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

found = {"names": list(inspect.signature(ServerArgs).parameters), "variables": dir(envs), "nccl": []}
found["choices"] = {"quantization": QUANTIZATION_CHOICES, "load_format": LOAD_FORMAT_CHOICES}
reloads = [model.load_weights for model in (Qwen2ForCausalLM, Qwen3ForCausalLM)]
found["reloads"] = [getattr(one, "_supports_quantized_rl_reload", None) is one for one in reloads]
found["caches"] = [os.environ[f"{name}_CACHE_DIR"] for name in ("TORCHINDUCTOR", "TRITON")]
for arguments in json.loads(sys.argv[1]):
    _set_envs_and_config(ServerArgs(model_path="model", **arguments))
    found["nccl"].append({name: os.environ.pop(f"NCCL_{name}_ENABLE") for name in ("CUMEM", "NVLS")})
print(json.dumps(found))
"""
ARGUMENTS = [{}, {"enable_nccl_nvls": True}, {"enable_symm_mem": True}]


@pytest.fixture(scope="module")
def of_sglang(tmp_path_factory) -> dict:
    """SGLang as an engine's process sees it: names of arguments and variables, NCCL's variables, folders of caches."""
    variables = environment([], 1, tmp_path_factory.mktemp("engine"))
    variables = {name: value for name, value in variables.items() if not name.startswith("NCCL_")}
    command = [sys.executable, "-c", OWN, json.dumps(ARGUMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"temporary": variables["TMPDIR"]}


def test_the_names_read_in_the_source_are_those_of_sglang(of_sglang):
    assert known_names() == set(of_sglang["names"])


def test_sglang_knows_all_arguments_of_engines_on_gpus(of_sglang):
    assert GPU_ARGUMENTS.keys() <= set(of_sglang["names"])
    assert GPU_VARIABLES.keys() <= set(of_sglang["variables"])


def test_sglang_knows_the_arguments_of_quantised_rollouts(of_sglang):
    """Compare with docs/placement.md, which also names the families."""
    written = re.search(r"server_args: {(.*)}", (REPOSITORY / "docs" / "placement.md").read_text())[1]
    for argument in written.split(", "):
        name, value = argument.split(": ")
        assert name in of_sglang["names"] and value in of_sglang["choices"][name]
    assert of_sglang["reloads"] == [True, True]


@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
def test_the_trainer_sets_nccl_as_sglang_does(of_sglang, number):
    found = {f"NCCL_{name}_ENABLE": value for name, value in of_sglang["nccl"][number].items()}
    assert nccl_variables(ARGUMENTS[number]) == found


def test_compiled_kernels_outlive_the_engine(of_sglang):
    assert not any(Path(cache).is_relative_to(of_sglang["temporary"]) for cache in of_sglang["caches"])


def test_an_engine_wakes_whatever_sglang_frees():
    source = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "constants.py"
    assert sorted(WEIGHTS + WORKING_MEMORY) == sorted(runpy.run_path(str(source))["GPU_MEMORY_ALL_TYPES"])


def test_reserved_and_unknown_names_are_reported_with_the_remedy():
    assert list(
        server_args_errors({"schedule_policy": "lpm", "host": "0.0.0.0", "chunked_prefil_size": 1, "zzz": 1})
    ) == [
        "rollout.server_args: host may not be set: megappo sets it itself; remove it",
        "rollout.server_args: SGLang does not know chunked_prefil_size: did you mean chunked_prefill_size?",
        "rollout.server_args: SGLang does not know zzz: remove it",
    ]


@pytest.mark.parametrize(("size", "divides"), [(64, False), (3, False), (0, False), ("2", False), (8, True), (2, True)])
def test_ranks_that_an_engine_does_not_have_are_refused(size: object, divides: bool) -> None:
    errors = list(server_args_errors({"ep_size": size}, 8))
    text = f"rollout.server_args: ep_size {size} does not divide rollout.tensor_parallel 8: choose one of [1, 2, 4, 8]"
    assert errors == ([] if divides else [text])


@pytest.mark.parametrize("name", SAMPLING_ARGUMENTS)
def test_arguments_that_change_the_sampling_are_refused(name):
    """A grammar for all requests, such as preferred_sampling_params={"regex": "a"}, makes log-probs wrong by 10."""
    assert name in known_names()
    [error] = Rollout(server_args={name: '{"regex": "a"}'}).contradictions()
    assert error.startswith(f"rollout.server_args: {name} may not be set, as the log-probs of its tokens would belong")
    assert changed_sampling({name: SAMPLING_ARGUMENTS[name]}) == []


@pytest.fixture
def forgotten():
    known_names.cache_clear()
    yield
    known_names.cache_clear()


def test_without_sglang_only_reserved_names_are_reported(monkeypatch, forgotten):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sglang" else find_spec(name))
    assert known_names() == frozenset()
    [error] = server_args_errors({"zzz": 1, "port": 1})
    assert error.startswith("rollout.server_args: port may not be set")
