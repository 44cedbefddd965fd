"""What is read off a model's output per response token: log-probs and entropy of a policy, values of a critic."""

import torch
import torch.distributed as dist

from megappo.data.packing import Packed
from megappo.models.engine import Head, Outputs
from megappo.models.vocab_parallel import vocab_parallel_log_probs_and_entropy


def policy_head(tensor_group: dist.ProcessGroup, vocab_size: int, temperature: float) -> Head:
    """`log_probs` of the response tokens and `entropy` of their distributions, at the sampling temperature (nats).

    Args:
        tensor_group: ranks that hold the vocabulary's shards.
        vocab_size: true vocabulary; the padding after it has no probability.
        temperature: divides the logits, as the engine does when it samples.
    """

    def head(logits: torch.Tensor, packed: Packed) -> Outputs:
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(
            logits[0, packed.predictors], packed.targets, tensor_group, vocab_size=vocab_size, temperature=temperature
        )
        return {"log_probs": packed.responses(log_probs), "entropy": packed.responses(entropy)}

    return head


def value_head(output: torch.Tensor, packed: Packed) -> Outputs:
    """`values`: the critic's estimate of the return before each response token, from output [1, T, 1]."""
    return {"values": packed.responses(output[0, packed.predictors, 0].float())}
