"""Heads, which read a model's output: log-probs, entropy and KL of a policy, values of a critic."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.batch.packing import PackedBatch
from megappo.models.megatron_engine import Head, Outputs
from megappo.models.output_layer import LogitFactors
from megappo.models.vocab_parallel import vocab_parallel_kl, vocab_parallel_log_probs_and_entropy


def policy_head(
    weight: Callable[[], torch.Tensor],
    tensor_group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float,
    reference: Callable[[PackedBatch], LogitFactors] | None = None,
) -> Head:
    """`log_probs` of the response tokens and `entropy` of their distributions, at the sampling temperature (nats).

    Args:
        weight: this rank's shard of the output layer's, [V/tp, H]; called in each pass, as the weight may move.
        tensor_group: ranks that hold the vocabulary's shards.
        vocab_size: true vocabulary; the padding after it has no probability.
        temperature: divides the logits, as the engine does when it samples.
        reference: adds `full_kl`, KL(policy || reference) over the vocabulary, both at this temperature. From the
            micro-batch to what the reference's logits are made of: `MegatronEngine.logit_factors` of a reference on the
            policy's ranks and in its layout, which costs a forward pass of it each time.
    """

    def head(output: torch.Tensor, packed: PackedBatch) -> Outputs:
        hidden = output[0, packed.predictors]
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(
            hidden, weight(), packed.targets, tensor_group, vocab_size=vocab_size, temperature=temperature
        )
        outputs = {"log_probs": packed.responses(log_probs), "entropy": packed.responses(entropy)}
        if reference is not None:
            ref_hidden, ref_weight = reference(packed)
            factors = hidden, weight(), ref_hidden[packed.predictors], ref_weight
            kl = vocab_parallel_kl(*factors, tensor_group, vocab_size=vocab_size, temperature=temperature)
            outputs["full_kl"] = packed.responses(kl)
        return outputs

    return head


def value_head(*, bootstrap: bool = False) -> Head:
    """`values`: the critic's estimate of the return before each response token, from output [1, T, 1].

    Args:
        bootstrap: adds `bootstrap_values` [b], the estimate after each row's last token: of what would have come had
            the response not been truncated there.
    """

    def head(output: torch.Tensor, packed: PackedBatch) -> Outputs:
        values = output[0, :, 0].float()
        outputs = {"values": packed.responses(values[packed.predictors])}
        return outputs | ({"bootstrap_values": packed.ends(values[packed.last_tokens])} if bootstrap else {})

    return head


def policy_value_head(policy: Head, value: Head, model: GPTModel) -> Head:
    """The outputs of both heads of a model with a shared backbone.

    Args:
        policy: reads the model's hidden states. value: reads its values.
        model: the last chunk, built with head="policy_value"; the one whose outputs the head is given.
    """

    def head(output: torch.Tensor, packed: PackedBatch) -> Outputs:
        return policy(output, packed) | value(model.value_head.take(), packed)

    return head
