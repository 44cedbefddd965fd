"""The CPU compatibility layer: what it redirects, and that it leaves the rest of torch alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from slow import slow_ones
from spawn import run_ranks

import megappo.runtime.platform

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the compatibility layer is off with CUDA")


def test_capabilities_name_every_package_and_path() -> None:
    found = megappo.runtime.platform.capabilities()
    assert set(megappo.runtime.platform.PACKAGES) < set(found)
    assert found["torch"] == torch.__version__
    assert found["layer_spec"] in ("torch", "transformer_engine")


def test_install_refuses_when_megatron_came_first() -> None:
    code = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
    code += "import megappo.runtime.megatron_setup; megappo.runtime.megatron_setup.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "call install() first" in done.stderr


def test_importing_platform_imports_no_megatron() -> None:
    code = (
        "import sys, megappo.runtime.megatron_setup;assert not any(name.startswith('megatron') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


BROKEN = """
import megappo.runtime.megatron_setup
from megappo.runtime import platform
megappo.runtime.megatron_setup.install()
platform.has_cuda = lambda: True
platform.torch.cuda.get_device_name = lambda device: "a GPU"
platform.device = lambda: None
found = platform.capabilities()
print(found["transformer-engine"], found["optimizer"], sep=chr(10))
from megappo.models.layer_specs import layer_kind
print(layer_kind("torch"))
for wanted in ("auto", "transformer_engine"):
    try:
        print(layer_kind(wanted))
    except ValueError as error:
        print(str(error))
"""


@cpu_only
@pytest.mark.parametrize("error", slow_ones(("ImportError", "FileNotFoundError"), ("FileNotFoundError",)))
def test_a_broken_transformer_engine_is_reported_and_refused(error: str, tmp_path: Path) -> None:
    for name, text in {
        "transformer_engine/__init__.py": f"raise {error}('libcudnn.so.9: no such file\\nand more')",
        "transformer_engine-2.11.0.dist-info/METADATA": "Name: transformer-engine\nVersion: 2.11.0\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120, env=environment)
    reason = f"{error}: libcudnn.so.9: no such file"
    version, optimizer, torch_layers, *refused = done.stdout.splitlines() or [done.stderr]
    assert version == f"2.11.0, which cannot be imported: {reason}"
    assert (optimizer, torch_layers) == ("torch AdamW", "torch")
    for wanted, line in zip(("auto", "transformer_engine"), refused, strict=True):
        assert line.startswith(
            f"model.layer_spec is {wanted}, but TransformerEngine is installed and cannot be imported"
        )
        assert reason in line
        assert "or set model.layer_spec=torch" in line


def _redirected(rank: int, world_size: int) -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.cuda.current_device(), pin_memory=True).cuda().device.type == "cpu"
    assert torch.ones(1).type() == "torch.FloatTensor", "type names are altered outside the optimizer"
    assert not torch.cuda.is_available()
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta", "wrapped factories no longer obey torch.device contexts"
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size))


@cpu_only
def test_cuda_calls_act_on_the_cpu() -> None:
    run_ranks(2, _redirected)


def _uneven(rank: int, world_size: int, sizes: tuple[int, ...]) -> None:
    """Forward and backward of Megatron's gather of unequal parts, and of its reverse, against cat and sum by hand."""
    from megatron.core.tensor_parallel import mappings

    group, generator = dist.group.WORLD, torch.Generator().manual_seed(1)
    parts = [torch.randn(size, 3, generator=generator) for size in sizes]
    wholes = [torch.randn(sum(sizes), 3, generator=generator) for _ in sizes]
    total = sum(wholes).split(sizes)[rank]
    mine = parts[rank].clone().requires_grad_()
    gathered = mappings.gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=list(sizes))
    assert torch.equal(gathered, torch.cat(parts))
    (gathered * wholes[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, total)
    whole = wholes[rank].clone().requires_grad_()
    scattered = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group, input_split_sizes=list(sizes))
    torch.testing.assert_close(scattered, total)
    assert torch.equal(whole, wholes[rank]), "the input is overwritten"
    (scattered * parts[rank]).sum().backward()
    assert torch.equal(whole.grad, torch.cat(parts))


@cpu_only
@pytest.mark.parametrize("sizes", [(2, 5, 1), (0, 3, 4), (4, 4, 4), (0, 0, 0)])
def test_parts_of_different_lengths_are_gathered_and_summed(sizes: tuple[int, ...]) -> None:
    run_ranks(3, _uneven, sizes)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine as nvidia-smi (a stand-in), /dev and torch's build show it; torch sees no GPU."""

    def of(smi: str | None, cuda: str | None = "13.0", *, devices: int = 0, visible: str | None = None) -> None:
        (tmp_path / "bin").mkdir()
        if smi is not None:
            (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
            (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
        for number in range(devices):
            (tmp_path / f"nvidia{number}").touch()
        (tmp_path / "nvidiactl").touch()
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        monkeypatch.setattr(megappo.runtime.platform, "DEVICES", tmp_path)
        monkeypatch.setattr(megappo.runtime.platform, "has_cuda", lambda: False)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return of


EIGHT = "for i in 1 2 3 4 5 6 7 8; do echo 535.183.01; done"
UNSEEN = {
    "an old driver": ((EIGHT,), ["GPUs (8, driver 535.183.01)", "update the driver if it is too old for CUDA 13.0"]),
    "the environment for a CPU": (("echo 580.65.06", None), ["built for a CPU", "bash launch/setup.sh gpu"]),
    "some of them chosen": ((EIGHT, "13.0", {"visible": "0,1"}), ["driver 535.183.01", "update the driver"]),
    "a driver that is new enough": (("echo 580.65.06",), ["docker run --gpus all"]),
    "nvidia-smi that fails": (("echo NVML >&2; exit 18", "13.0", {"devices": 2}), ["(2, driver unknown: nvidia-smi"]),
    "no nvidia-smi": ((None, "13.0", {"devices": 4}), ["(4, driver unknown: nvidia-smi does not answer)"]),
}


@pytest.mark.parametrize(("shown", "words"), UNSEEN.values(), ids=UNSEEN)
def test_gpus_that_torch_does_not_see_are_an_error_with_both_remedies(machine, shown, words) -> None:
    *arguments, options = shown if isinstance(shown[-1], dict) else (*shown, {})
    machine(*arguments, **options)
    found = megappo.runtime.platform.unseen_gpus()
    assert all(word in found for word in words), found
    assert found.endswith("hide them: CUDA_VISIBLE_DEVICES= before the command")


@pytest.mark.parametrize(
    ("smi", "options"),
    [
        (EIGHT, {"visible": ""}),
        (EIGHT, {"visible": "-1"}),
        (None, {}),
        ("exit 9", {}),
        (None, {"cuda": None, "visible": "0"}),
    ],
    ids=["hidden", "hidden by -1", "no GPU", "a driver without a GPU", "none, though some are named"],
)
def test_a_machine_that_shows_no_gpu_computes_on_the_cpu(machine, smi, options) -> None:
    machine(smi, **options)
    assert megappo.runtime.platform.unseen_gpus() == ""


@cpu_only
@pytest.mark.parametrize(
    "command",
    [
        ["megappo.torchrun", "--standalone", "--nproc-per-node", "2", "-m", "megappo.train", "no.yaml"],
        ["megappo", "serve", "."],
        pytest.param(
            ["torch.distributed.run", "--nproc-per-node", "2", "-m", "megappo.train", "no.yaml"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda command: command[0],
)
def test_nothing_starts_on_the_cpu_of_a_machine_with_gpus_unless_they_are_hidden(command, tmp_path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 535.183.01\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    variables = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert "GPUs (1, driver 535.183.01)" in line and "built for a CPU" in line
