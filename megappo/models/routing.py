"""Routers of a mixture of experts: the load of each expert, and replay of the experts that an engine chose."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megappo.architecture.architecture import expert_number_bytes
from megappo.models.gpt import ModelChunks
from megappo.observe.metrics import Metric
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform

NUMBERS = {1: torch.uint8, 2: torch.int16}
"""Bytes -> type of the number of an expert."""


class LayerRouting:
    """Counts the tokens of a layer's experts, and replays choices in the place of Megatron's RouterReplay.

    RouterReplay (megatron-core 0.16.1, transformer/moe/router_replay.py) lists the routers of all models of a process
    together, and replays either all tokens of a micro-batch or none.

    Args:
        counts: the layer's row of `RoutingCounts`.
        replays: the router takes the choices in `Pack.expert_choices`.
    """

    def __init__(self, layer: TransformerLayer, counts: Tensor, replays: bool):
        self._counts = counts
        self._place = layer.layer_number - 1 - layer.config.num_layers  # below 0: layers without experts come first
        layer.mlp.router.register_forward_hook(self._count)
        if replays:
            layer.mlp.router.router_replay = self
            # A layer that is computed again in the backward pass gets the Pack of its micro-batch again.
            layer.register_forward_pre_hook(self._take_choices, with_kwargs=True)

    def _count(self, router: torch.nn.Module, inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            self._counts[:-2] += outputs[1].sum(dim=0)

    def _take_choices(self, layer: TransformerLayer, args: tuple, arguments: dict[str, Any]) -> None:
        self._choices = arguments["packed_seq_params"].expert_choices

    def get_replay_topk(
        self, scores: Tensor, top_k: int, num_groups: int | None, group_top_k: int | None, choose: Callable
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the experts of each token, [T, top_k] both: the engine's choice if it is
        known, else that of `choose`."""
        own_scores, own = choose(scores, top_k, num_groups, group_top_k)
        if self._choices is None:
            return own_scores, own
        numbers = self._choices.view(NUMBERS[expert_number_bytes(scores.shape[1])])
        choices = numbers.unflatten(1, (-1, top_k))[:, self._place].long()
        experts = torch.where(choices > 0, choices - 1, own)
        chosen_scores = scores.gather(1, experts)
        if torch.is_grad_enabled():
            differs = (chosen_scores.sort(descending=True).values != own_scores).any(dim=1)
            self._counts[-2:] += torch.stack((differs.sum(), (choices[:, 0] > 0).sum()))
        return chosen_scores, experts


class RoutingCounts:
    """Counts of a model's routers on this rank, over training passes since the last metrics.

    The counts are [layers, experts + 2] int64: the tokens of each expert; then the replayed choices that the router
    would not have made, and all replayed choices. Only passes with gradients count: those of a layer that is computed
    again have none the first time.

    Args:
        name: the component's.
        replays: see `LayerRouting`.
    """

    def __init__(self, chunks: ModelChunks, groups: ComponentGroups, name: str, *, replays: bool):
        config, self._name, self._group = chunks[0].config, name, groups.collection.intra_dist_opt
        shape = config.num_layers, config.num_moe_experts + 2
        self._counts = torch.zeros(shape, dtype=torch.int64, device=platform.device())
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    LayerRouting(layer, self._counts[layer.layer_number - 1], replays)

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics, the same on all ranks of the component, which call together; then count from 0."""
        counts = self._counts.clone()
        self._counts.zero_()
        dist.all_reduce(counts, group=self._group)
        tokens = counts[counts.any(dim=1), :-2].double()
        load = tokens.max(dim=1).values / tokens.mean(dim=1)
        metrics = {f"{self._name}/expert_load_max": Metric.of(load.mean(), "mean")}
        differing, replayed = counts[:, -2:].sum(dim=0).tolist()
        if replayed:
            metrics[f"{self._name}/routing_diff_frac"] = Metric((differing, replayed), "mean")
        return metrics
