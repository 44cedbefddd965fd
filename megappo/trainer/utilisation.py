"""MFU: how much of what its ranks could compute the update of a component was the model's own work."""

import time
from collections.abc import Mapping

import torch

from megappo.architecture.dtypes import DTYPES
from megappo.batch.exchange import Exchange
from megappo.estimate.flops import Flops, flops_of
from megappo.estimate.gpus import find_gpu
from megappo.models.dtypes import TORCH_DTYPES
from megappo.placement.components import ComponentSpec
from megappo.runtime import platform
from megappo.trainer.component import Component, Scattered
from megappo.trainer.in_flight import Update
from megappo.trainer.train_engines import architecture_of

MEASURED_SIDE, MEASURED_SECONDS = 512, 0.05
"""Of square matrices whose product shows what a device without a data sheet can compute, and for how long."""


class Utilisation:
    """All ranks build it together.

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

    def of_update(self, scattered: Scattered, update: Update) -> float:
        """The model's work in an update, over what all of the component's ranks could have computed meanwhile.

        Recomputation, padding and pipeline stages that wait count as lost.

        Source: Chowdhery et al. 2022 (PaLM), appendix B; `estimate.flops`.
        """
        name, table, split = scattered.component.name, scattered.batch.table, scattered.split
        lengths = list(zip(table.total_lengths(), table.response_lengths.tolist(), strict=True))
        first = scattered.num_resumed
        done = [split[step % len(split)] for step in range(first, first + update.num_steps)]
        rows = [lengths[row] for shards in done for shard in shards for row in shard]
        return self._flops[name].training * self._flops[name].forward(rows) / (self.peaks[name] * update.seconds)


def peak_flops(dtype: str) -> float:
    """Of this rank's device, per second: by its data sheet, or measured where that is not known. Ranks that share a
    CPU measure at the same time, and so share it.

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
