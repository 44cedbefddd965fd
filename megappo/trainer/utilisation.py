"""MFU: the model's own work in an update, as a share of what the component's ranks could have computed meanwhile."""

import time
from collections.abc import Mapping, Sequence

import torch

from megappo.architecture.dtypes import DTYPES
from megappo.batch.exchange import Exchange
from megappo.estimate.flops import Flops, flops_of
from megappo.estimate.gpus import find_gpu
from megappo.models.megatron_config import TORCH_DTYPES
from megappo.placement.components import ComponentSpec
from megappo.runtime import platform
from megappo.trainer.component_batch import Component, ComponentBatch
from megappo.trainer.in_flight import LocalUpdate
from megappo.trainer.train_engines import architecture_of

MEASURED_SIDE, MEASURED_SECONDS = 512, 0.05
"""Size of the square matrices whose product measures a device without a data sheet, and the time to measure for."""


class Utilisation:
    """Peak speed of each trained component. All ranks build it together.

    Args:
        dtype: of the models.
        components, specs: by name.
    Attributes:
        peaks: component -> operations per second of all its ranks together.
    """

    def __init__(
        self,
        dtype: str,
        components: Mapping[str, Component],
        specs: Mapping[str, ComponentSpec],
        exchange: Exchange,
    ):
        peaks = exchange.share(peak_flops(dtype))
        self._flops: dict[str, Flops] = {}
        self.peaks: dict[str, float] = {}
        for name, spec in specs.items():
            if spec.training is not None:
                self._flops[name] = flops_of(architecture_of(spec))
                self.peaks[name] = sum(peaks[rank] for rank in components[name].layout.ranks)

    def mfu(self, shard: ComponentBatch, updates: Sequence[LocalUpdate]) -> float:
        """Return the MFU of a component's update, by the time of the slowest rank.

        Recomputation, padding and pipeline stages that wait count as lost.

        Args:
            updates: the component's on every rank.

        Source: Chowdhery et al. 2022 (PaLM), appendix B; `estimate.flops`.
        """
        name, table, split = shard.component.name, shard.batch.table, shard.split
        num_steps = max(len(update.steps) for update in updates)
        seconds = max(update.seconds for update in updates)
        lengths = list(zip(table.total_lengths(), table.response_lengths.tolist(), strict=True))
        rows = []
        for step in range(shard.num_resumed, shard.num_resumed + num_steps):
            for part in split[step % len(split)]:
                rows += [lengths[row] for row in part]
        flops = self._flops[name]
        return flops.training * flops.forward(rows) / (self.peaks[name] * seconds)


def peak_flops(dtype: str) -> float:
    """Return this rank's floating-point operations per second: by the data sheet of its GPU, or measured.

    Ranks that share a CPU measure at the same time, and so share it.

    Args:
        dtype: "fp32" or "bf16".
    """
    gpu = find_gpu(torch.cuda.get_device_name(platform.device())) if platform.has_cuda() else None
    if gpu is not None:
        return gpu.flops if DTYPES[dtype].nbytes == 2 else gpu.fp32_flops
    side = MEASURED_SIDE * (8 if platform.has_cuda() else 1)
    matrix = torch.ones(side, side, dtype=TORCH_DTYPES[dtype], device=platform.device())
    fastest, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < MEASURED_SECONDS:
        before = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        fastest = min(fastest, time.perf_counter() - before)
    return 2 * side**3 / fastest
