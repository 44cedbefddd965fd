"""The CPU compatibility layer: what it redirects, and that it leaves the rest of torch alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from slow import slow_ones
from spawn import run_ranks

import megappo.platform

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the compatibility layer is off with CUDA")


def test_capabilities_name_every_package_and_path() -> None:
    found = megappo.platform.capabilities()
    assert set(megappo.platform.PACKAGES) < set(found)
    assert found["torch"] == torch.__version__
    assert found["layer_spec"] in ("torch", "transformer_engine")


def test_install_refuses_when_megatron_came_first() -> None:
    code = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
    code += "import megappo.megatron_setup; megappo.megatron_setup.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "call install() first" in done.stderr


def test_importing_platform_imports_no_megatron() -> None:
    code = "import sys, megappo.megatron_setup; assert not any(name.startswith('megatron') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


BROKEN = """
import megappo.megatron_setup
from megappo import platform
megappo.megatron_setup.install()
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
def test_a_broken_transformer_engine_is_told_and_refused(error: str, tmp_path: Path) -> None:
    for name, text in {
        "transformer_engine/__init__.py": f"raise {error}('libcudnn.so.9: no such file\\nand more')",
        "transformer_engine-2.11.0.dist-info/METADATA": "Name: transformer-engine\nVersion: 2.11.0\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120, env=environment)
    reason = f"{error}: libcudnn.so.9: no such file"
    told, optimizer, torch_layers, *refused = done.stdout.splitlines() or [done.stderr]
    assert told == f"2.11.0, which cannot be imported: {reason}"
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
