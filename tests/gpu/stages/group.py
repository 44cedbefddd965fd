"""The platform, a group of one rank for both kinds of tensors, collectives of objects, a component's random streams.

python tests/gpu/stages/group.py
"""

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, one_rank, report
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megappo.batch.exchange import Exchange
from megappo.runtime import platform


def measure() -> dict:
    with one_rank() as groups:
        assert DEVICE.type == ("cuda" if CUDA else "cpu")
        for tensor in (torch.ones(3), torch.ones(3, device=DEVICE)):
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1, 1, 1]
        value = {"rows": torch.arange(3), "name": "actor"}
        (shared,) = Exchange(dist.group.WORLD).all_gather(value)
        assert shared["name"] == "actor" and torch.equal(shared["rows"], value["rows"])
        gathered = [None]
        dist.gather_object(value, gathered)
        assert gathered[0]["name"] == "actor"

        outside = torch.cuda.get_rng_state()
        with groups.active():
            assert parallel_state.get_tensor_model_parallel_world_size() == 1
            with get_cuda_rng_tracker().fork():
                first = torch.rand(4, device=DEVICE)
        assert torch.equal(torch.cuda.get_rng_state(), outside), "a component's random stream leaks"
        with groups.active(), get_cuda_rng_tracker().fork():
            assert not torch.equal(torch.rand(4, device=DEVICE), first), "a component's random stream stands still"
    return {"stage": "group", "capabilities": platform.capabilities()}


if __name__ == "__main__":
    report(measure)
