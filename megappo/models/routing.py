"""Routers of a mixture of experts: load of each expert, losses that balance it, replay of an engine's choices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megappo.architecture.architecture import expert_number_bytes
from megappo.config.model_sections import Router
from megappo.errors import ActionableError
from megappo.models.gpt import ModelChunks
from megappo.models.packed_attention import Pack
from megappo.observe.metrics import Metric, RankMetrics
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform

NUMBERS = {1: torch.uint8, 2: torch.int16}
"""Bytes -> type of the number of an expert."""


class LayerRouting:
    """Counts the tokens of a layer's experts, balances their load, and replays choices.

    It replays in the place of Megatron's RouterReplay (megatron-core 0.16.1, transformer/moe/router_replay.py), which
    lists the routers of all models of a process together, and replays either all tokens of a micro-batch or none.

    Args:
        routing: the model's routing.
        replays: the router takes the choices in `Pack.expert_choices`.
    """

    def __init__(self, layer: TransformerLayer, routing: "ModelRouting", replays: bool):
        self._routing = routing
        counts = routing.counts[layer.layer_number - 1]
        self._loads, self._replayed, self._loss = counts.split((layer.config.num_moe_experts, 2, 1))
        self._place = layer.layer_number - 1 - layer.config.num_layers  # below 0: layers without experts come first
        frequency = layer.config.moe_layer_freq
        self._num_replayed = layer.config.num_layers if frequency == 1 else sum(frequency)
        router = layer.mlp.router
        router.routing = partial(self._route, router.routing)
        if replays:
            router.router_replay = self
        # A layer that is computed again in the backward pass gets the Pack of its micro-batch again.
        layer.register_forward_pre_hook(self._take_pack, with_kwargs=True)

    def _take_pack(
        self,
        layer: TransformerLayer,
        args: tuple,
        arguments: dict[str, Any],
    ) -> None:
        self._pack = arguments["packed_seq_params"]

    def _route(self, route: Callable, logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Route as Megatron's router does, [T, 1, E] -> [T, E] twice. With gradients also count, and add the loss."""
        probs, chosen = route(logits, **options)
        if torch.is_grad_enabled():
            self._loads += (chosen & (self._pack.token_rows[:, None] > 0)).sum(dim=0)
            if self._routing.coef:
                loss = self._routing.balancing_loss(logits.flatten(0, 1), self._pack)
                self._loss += loss.detach()
                probs = MoEAuxLossAutoScaler.apply(probs, self._routing.coef * loss)
        return probs, chosen

    def get_replay_topk(
        self,
        scores: Tensor,
        top_k: int,
        num_groups: int | None,
        group_top_k: int | None,
        choose: Callable,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the experts of each token, [T, top_k] both: the engine's choice if it is
        known, else the choice of `choose`."""
        own_scores, own = choose(scores, top_k, num_groups, group_top_k)
        if self._pack.expert_choices is None:
            return own_scores, own
        numbers = self._pack.expert_choices.view(NUMBERS[expert_number_bytes(scores.shape[1], top_k)])
        if numbers.shape[1] != self._num_replayed * top_k:
            raise ActionableError(
                f"the rows hold {numbers.shape[1]} numbers of experts for each token; expected "
                f"{self._num_replayed * top_k}: rollout.routing_replay needs rollouts of this model by this version "
                "of megappo, so record or sample them again"
            )
        choices = numbers.unflatten(1, (-1, top_k))[:, self._place]
        is_known = choices.any(dim=1)
        experts = torch.where(is_known[:, None], (choices - 1).long(), own)  # 256 is 0 in one byte: 0 - 1 = 255
        chosen_scores = scores.gather(1, experts)
        if torch.is_grad_enabled():
            differs = (chosen_scores.sort(descending=True).values != own_scores).any(dim=1)
            self._replayed += torch.stack((differs.sum(), is_known.sum()))
        return chosen_scores, experts


class ModelRouting:
    """Counts, load-balancing losses and bias updates of a model's routers on this rank, for each optimizer step.

    Only passes with gradients count: the first pass of a layer that is recomputed has none.

    Args:
        name: the component's.
        replays: see `LayerRouting`.

    Attributes:
        counts: [layers, experts + 3] float64: tokens of each expert, without padding; replayed choices that the router
            would not have made, and all replayed choices; `balancing_loss`.
        coef: weight of the loss.
    """

    def __init__(
        self,
        chunks: ModelChunks,
        groups: ComponentGroups,
        name: str,
        router: Router,
        *,
        replays: bool,
    ):
        self._config = chunks[0].config
        self._name = name
        self._groups = groups.collection
        self._routers: dict[int, TopKRouter] = {}
        self._bias_update_rate = router.bias_update_rate
        self._by_row = router.seq_aux_loss_coef > 0
        self.coef = router.aux_loss_coef + router.seq_aux_loss_coef
        shape = self._config.num_layers, self._config.num_moe_experts + 3
        self.counts = torch.zeros(shape, dtype=torch.float64, device=platform.device())
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    LayerRouting(layer, self, replays)
                    self._routers[layer.layer_number - 1] = layer.mlp.router

    def begin(self, num_tokens: float) -> None:
        """Begin an optimizer step on `num_tokens` tokens of all data-parallel shards; without a loss they are not
        read."""
        self._num_tokens = num_tokens
        self.counts.zero_()

    def balancing_loss(self, logits: Tensor, pack: Pack) -> Tensor:
        """Return the part of a router's load-balancing loss of its tokens here, [T, E], over a micro-batch or each row.

        For T tokens that choose K of E experts each, the loss is E x the sum over experts of f P. f is the expert's
        share of the T x K choices. P is the mean of its scores, which add up to 1 for each token. The loss is 1 if the
        load is even. It is weighted by T, divided by the tokens of the mini-batch.

        Megatron's own (megatron-core 0.16.1, transformer/moe/router.py) counts padding, takes all rows of a pack for
        one sequence and, with `calculate_per_token_loss`, is divided by the number of ranks that share the tokens.

        Source: Fedus et al. 2021, "Switch Transformers", eq. 4-6; DeepSeek-V3, arXiv:2412.19437, eq. 17-20.
        """
        config = self._config
        top_k = config.moe_router_topk
        kind = config.moe_router_score_function
        chosen, scores = compute_routing_scores_for_aux_loss(logits, top_k, kind)
        sequences = pack.token_rows if self._by_row else pack.token_rows.clamp(max=1)  # 0 = padding
        empty = torch.zeros(len(pack.lengths) + 1, config.num_moe_experts, device=logits.device)
        counts, sums = (empty.index_add(0, sequences, one.float())[1:] for one in (chosen, scores))
        dist.all_reduce(counts, group=self._groups.tp_cp)
        weighted = (counts * sums).sum(dim=1) / counts.sum(dim=1).clamp(min=1)  # sum of f P, times T
        return config.num_moe_experts * weighted.sum() / self._num_tokens

    def finish(self) -> RankMetrics:
        """Update the routers' biases after an optimizer step, and return its metrics, the same on all ranks of the
        component, which call together.

        Megatron's finalize_model_grads would update the biases even if the step is skipped, and would count padding.

        Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
        """
        dist.all_reduce(self.counts, group=self._groups.intra_dist_opt)
        if self._bias_update_rate:
            for layer, router in self._routers.items():
                loads = self.counts[layer, :-3]
                router.expert_bias += self._bias_update_rate * (loads.mean() - loads).sign()
        of_routers = self.counts[self.counts.any(dim=1)]
        tokens = of_routers[:, :-3]
        load = tokens.max(dim=1).values / tokens.mean(dim=1)
        metrics = {f"{self._name}/expert_load_max": Metric.of(load.mean(), "mean")}
        of_ranks = tokens.sum(dim=0).view(self._groups.ep.size(), -1).sum(dim=1)
        metrics[f"{self._name}/expert_rank_load_max"] = Metric.of(of_ranks.max() / of_ranks.mean(), "mean")
        differing, replayed, loss = of_routers[:, -3:].sum(dim=0).tolist()
        if replayed:
            metrics[f"{self._name}/routing_diff_frac"] = Metric((differing, replayed), "mean")
        if self.coef:
            metrics[f"{self._name}/load_balancing_loss"] = Metric((loss, len(of_routers)), "mean")
        return metrics
