"""Adam with moments in bf16, and with states in host memory, against a plain loop and against the optimizer that
megatron-core chooses."""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from commands import assert_equal
from component_engines import build, train, weights
from ppo_engines import OPTIM, Case
from saved import save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import EXPERTS
from torch import Tensor

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.models import compact_adam
from megappo.models.compact_adam import MAIN, MOMENTS, CompactAdam
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SIZES = (37, 5, 64)


def rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def plain_adam(start: list[float], gradients: list[list[float]], dtype: torch.dtype) -> list[list[float]]:
    """Return parameters, first and second moments after one step for each list of gradients; moments are rounded after
    each."""
    (beta, beta_sq), lr = SETTINGS["betas"], SETTINGS["lr"]
    found: list[list[float]] = [[], [], []]
    for number, value in enumerate(start):
        m = v = 0.0
        for step, of_all in enumerate(gradients, 1):
            gradient = of_all[number]
            m, v = beta * m + (1 - beta) * gradient, beta_sq * v + (1 - beta_sq) * gradient**2
            value *= 1 - lr * SETTINGS["weight_decay"]
            value -= lr * m / (1 - beta**step) / (math.sqrt(v / (1 - beta_sq**step)) + SETTINGS["eps"])
            m, v = rounded(m, dtype), rounded(v, dtype)
        for column, one in zip(found, (value, m, v), strict=True):
            column.append(one)
    return found


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_a_plain_loops(moments: torch.dtype, dtype: torch.dtype, fraction: float) -> None:
    """In parts of a parameter, too. They also equal torch's AdamW to the bit, with its moments rounded after
    each step; the loop, in fp64, may round a moment the other way."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(size, generator=generator).to(dtype) for size in SIZES]
    starts, mains = [one.tolist() for one in parameters], [one.clone().float() for one in parameters]
    gradients = [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(6)]
    adam = CompactAdam(torch.optim.AdamW(parameters, **SETTINGS, fused=True), moments, fraction)
    torchs = torch.optim.AdamW(mains, **SETTINGS, fused=True)
    with patch.object(compact_adam, "PART", 16):
        for of_step in gradients:
            for parameter, main, gradient in zip(parameters, mains, of_step, strict=True):
                parameter.decoupled_grad, main.grad = gradient, gradient
            adam.step()
            torchs.step()
            for state in torchs.state.values():
                for name in MOMENTS:
                    state[name].copy_(state[name].to(moments))
    for number, (parameter, main) in enumerate(zip(parameters, mains, strict=True)):
        found = {name: adam.state[parameter][name] for name in (MAIN, *MOMENTS)}
        assert all(found[name].dtype == moments for name in MOMENTS)
        assert_equal(
            {name: state.float() for name, state in found.items()},
            {MAIN: main} | {name: torchs.state[main][name] for name in MOMENTS},
        )
        assert torch.equal(parameter, main.to(dtype))
        expected = plain_adam(starts[number], [one[number].tolist() for one in gradients], moments)
        spacing = 2**-7 if moments == torch.bfloat16 else 1e-5
        for state, column in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(state.double(), torch.tensor(column).double(), rtol=spacing, atol=1e-3 * spacing)


def states(engine: TrainedEngine) -> dict[str, Tensor]:
    """Return this rank's main parameters and moments."""
    found = {}
    for number, part in enumerate(engine.optimizer.chained_optimizers):
        groups = part.optimizer.param_groups
        for order, parameter in enumerate(chain.from_iterable(group["params"] for group in groups)):
            own = part.optimizer.state[parameter]
            tensors = {MAIN: own.get(MAIN, parameter)} | {name: own[name] for name in MOMENTS}
            found |= {f"{number}.{order}.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
    return found


def check_stock(rank: int, world_size: int, folder: Path, cases: list[Case]) -> None:
    """States on the host change no bit of states, weights, or the norm of clipped gradients."""
    for case in cases:
        found = []
        for fraction in (0.0, 0.4):
            optim = case.optim.model_copy(update={"offload_fraction": fraction})
            engines = build({"actor": folder}, {"actor": replace(case, optim=optim)})
            metrics = train(engines, 2)
            assert engines["actor"].num_steps == {2}
            on_host = [part.optimizer for part in engines["actor"].optimizer.chained_optimizers]
            assert all(isinstance(one, CompactAdam) == bool(fraction) for one in on_host)
            found.append((metrics, weights(engines, {"actor": folder}) | states(engines["actor"])))
        (metrics, tensors), (expected_metrics, expected) = found
        assert metrics == expected_metrics
        assert_equal(tensors, expected)


def test_states_in_host_memory_change_no_number(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, "qwen3_moe", **EXPERTS)
    layouts = {"fp32": Layout((0, 1), expert=2), "bf16": Layout((0, 1))}
    run_ranks(2, check_stock, folder, [Case(layout, dtype=dtype) for dtype, layout in layouts.items()])


def check_resumed(rank: int, world_size: int, folder: Path, root: Path) -> None:
    """Train with each setting, save, and resume with each, and in another layout; before the first step, too."""
    exchange = Exchange(dist.group.WORLD)
    compact = {"moments_dtype": "bf16", "offload_fraction": 0.5}
    optims = {"stock": OPTIM, "compact": OPTIM.model_copy(update=compact)}
    for name, optim in optims.items():
        for num_steps in (0, 2):
            case = Case(Layout((0, 1)), dtype="bf16", optim=optim)
            engines = build({"actor": folder}, {"actor": case})
            train(engines, num_steps)
            store = CheckpointStore(root / f"{name} {num_steps}", 0, exchange)
            path = save_checkpoint(store, num_steps, engines, {})
            for other, setting in optims.items():
                resumed = build({"actor": folder}, {"actor": replace(case, optim=setting)})
                store.load(path, resumed)
                assert resumed["actor"].num_steps == {num_steps}
                expected = states(engines["actor"])
                if name != other:
                    dtype = torch.float32 if other == "stock" else torch.bfloat16
                    expected = {key: one if MAIN in key else one.to(dtype) for key, one in expected.items()}
                assert_equal(states(resumed["actor"]), expected)
                assert_equal(weights(resumed, {"actor": folder}), weights(engines, {"actor": folder}))
                train(resumed, 1)
                assert resumed["actor"].num_steps == {num_steps + 1}
            moved = build({"actor": folder}, {"actor": replace(case, layout=Layout((0, 1), tensor=2))})
            store.load(path, moved)
            again = CheckpointStore(root / f"{name} {num_steps} moved", 0, exchange)
            back = build({"actor": folder}, {"actor": case})
            again.load(save_checkpoint(again, num_steps, moved, {}), back)
            assert_equal(states(back["actor"]), states(engines["actor"]))
            train(back, 2)
            train(engines, 2)
            assert_equal(states(back["actor"]), states(engines["actor"]))


def test_a_run_resumes_in_another_layout_and_with_other_settings(tmp_path: Path) -> None:
    """Moments in fp32 are rounded to bf16, and moments in bf16 keep their values."""
    folder = hf_folder(tmp_path / "model", "qwen2")
    run_ranks(2, check_resumed, folder, tmp_path)
