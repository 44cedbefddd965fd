"""Last layers and heads of models: a language model returns hidden states, from which its head computes log-probs,
entropy and KL block by block; a value head has its outputs beside the output layer, or takes its place."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.batch.packing import PackedBatch
from megappo.models.vocab_parallel import LogitFactors, vocab_parallel_outputs

Outputs = dict[str, Tensor]
"""Name -> output per response token, [b, R] float32, 0 where the mask is 0; or per row, [b] float32."""
Head = Callable[[Tensor, PackedBatch], Outputs]
"""Last stage: the model's output [1, T, ...] -> Outputs, 0 at tokens that other context-parallel ranks hold."""


def policy_head(
    weight: Callable[[], Tensor],
    tensor_group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float,
    reference: Callable[[PackedBatch], LogitFactors] | None = None,
    logit_cap: float | None = None,
) -> Head:
    """Return a head: `log_probs` of response tokens and `entropy` of their distributions, at the temperature (nats).

    Args:
        weight: this rank's shard of the output layer's, [V/tp, H]; called in each pass, as the weight may move.
        tensor_group: ranks that hold the vocabulary's shards.
        vocab_size: true vocabulary; the padding after it has no probability.
        temperature: divides the logits, as the engine does when it samples.
        reference: adds `full_kl`, KL(policy || reference) over the vocabulary, both at this temperature. It
            maps a micro-batch to the factors of the reference's logits: `MegatronEngine.logit_factors` of a reference
            on the policy's ranks and in its layout, which costs a forward pass of it each time.
        logit_cap: see `Architecture`.
    """

    def head(output: Tensor, packed: PackedBatch) -> Outputs:
        factors = None
        if reference is not None:
            factors = reference(packed)
            factors = factors._replace(hidden=factors.hidden[packed.predictor_index])
        outputs = vocab_parallel_outputs(
            output[0, packed.predictor_index],
            weight(),
            packed.targets,
            tensor_group,
            vocab_size=vocab_size,
            temperature=temperature,
            logit_cap=logit_cap,
            reference=factors,
        )
        return {name: packed.responses(values) for name, values in outputs.items()}

    return head


def value_head(
    *,
    bootstrap: bool = False,
    read: Callable[[Tensor], Tensor] = lambda outputs: outputs[:, 0],
    errors: Callable[[Tensor, Tensor], Outputs] | None = None,
) -> Head:
    """Return a head with `values`: the estimate of the return before each response token, from output [1, T, K].

    Args:
        bootstrap: adds `bootstrap_values` [b], the estimate after each row's last token: of what would have come had
            the response not been truncated there.
        read: maps outputs [n, K] to the values [n] that they stand for; by default the first output is the value.
        errors: maps outputs [N, K] and returns [N] of the tokens to further outputs of the head, [N] each: the loss of
            a model with several outputs.
    """

    def head(output: Tensor, packed: PackedBatch) -> Outputs:
        every = output[0].float()
        own = every[packed.predictor_index]
        numbers = {"values": read(own)}
        if errors is not None:
            numbers |= errors(own, packed.returns)
        result = {name: packed.responses(of_tokens) for name, of_tokens in numbers.items()}
        if bootstrap:
            result["bootstrap_values"] = packed.at_last_tokens(read(every[packed.last_token_index]))
        return result

    return head


def policy_value_head(policy: Head, value: Head, model: GPTModel, *, detached: bool = False) -> Head:
    """Return a head with the outputs of both heads of a model with a shared backbone.

    Args:
        policy: reads the model's hidden states. value: reads its values.
        model: the last chunk, built with head="policy_value"; the one whose outputs the head is given.
        detached: values have no gradient beyond the value head.
    """

    def head(output: Tensor, packed: PackedBatch) -> Outputs:
        return policy(output, packed) | value(model.value_head.take(detached=detached), packed)

    return head


def return_hidden_states(gpt: GPTModel, factor: float = 1.0) -> None:
    """Make a last stage return the hidden states that its output layer reads, [1, T, H], on every tensor-parallel rank.

    Most tokens are in prompts and need no logits. The gradient that comes back must be whole on every rank.

    Args:
        factor: factor of the logits; the hidden states are multiplied by it.
    """
    layer = gpt.output_layer

    def forward(hidden: Tensor, weight: object = None, runtime_gather_output: object = None) -> tuple:
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=gpt.pg_collection.tp
            )
        return with_plain_strides(hidden if factor == 1 else hidden * factor), None

    layer.forward = forward


def output_weight(gpt: GPTModel) -> Tensor:
    """Return this rank's shard of a last stage's output weight, [V/tp, H]: the embedding's where they are tied."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight


def with_plain_strides(hidden: Tensor) -> Tensor:
    """Return hidden states [T, 1, H], contiguous, with the strides (H, H, 1); so is the gradient that comes back.

    Megatron transposes [1, T, H] behind the embedding and, in the backward pass, before the head. The result has the
    strides (H, T x H, 1), which count as contiguous and spread through the layers; torch then multiplies by weights
    without a gradient (a reference's, or weights under adapters) in T products, which took as long as all other work of
    the layers.
    """
    return hidden.flatten(0, 1).unsqueeze(1)


class ValueHead(torch.nn.Module):
    """A Linear(hidden, size), the same on every tensor-parallel rank.

    In a critic it takes the place of GPTModel.output_layer; the embeddings must then not be tied, as there is no output
    embedding to tie. `add_value_head` puts one beside the output layer.

    Args:
        config: the trunk's.
        tensor_group: ranks that share the hidden states of sequence parallelism.
        bias: adds a bias, of shape [size].
        size: outputs per token, K.
    """

    def __init__(
        self,
        config: TransformerConfig,
        tensor_group: dist.ProcessGroup,
        bias: bool = False,
        size: int = 1,
    ):
        super().__init__()
        self.tp_group = tensor_group
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(size, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel
        self.register_parameter("bias", None)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel
        self._kept: Tensor | None = None

    def init_weight(self, seed: int) -> None:
        """Draw a normal weight of standard deviation 1 / (hidden + 1), equal on every rank."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.weight.shape, generator=generator) / (self.weight.shape[1] + 1)
        with torch.no_grad():
            self.weight.copy_(weight)

    def forward(
        self,
        hidden: Tensor,
        weight: None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Outputs of the tokens, with the arguments and the pair GPTModel expects of its output layer.

        Args:
            hidden: [T, 1, H]; under sequence parallelism this rank's [T / tensor, 1, H].
            weight: None: never a tied embedding.
            runtime_gather_output: ignored, the output is whole on every rank.
        Returns:
            [T, 1, K] float32 on every tensor-parallel rank, and None: no bias is left to add.
        """
        bias = None if self.bias is None else self.bias.float()
        values = F.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            # Every rank computes the same loss from the gathered values, so backward only takes its own part of it.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None

    def keep(self, output_layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Keep the hidden states that an output layer is about to read until `take`: its forward pre-hook."""
        self._kept = inputs[0]

    def take(self, *, detached: bool = False) -> Tensor:
        """Return the outputs of the last forward pass, [1, T, K], as GPTModel's output is laid out; once a pass.

        Args:
            detached: they have no gradient beyond this module.
        Raises:
            RuntimeError: there was no forward pass since the last call.
        """
        if self._kept is None:
            raise RuntimeError("values were taken twice, or before a forward pass of the model they belong to")
        values, _ = self(self._kept.detach() if detached else self._kept)
        self._kept = None
        return values.transpose(0, 1)


def add_value_head(gpt: GPTModel, bias: bool, size: int) -> None:
    """Give the model, a last stage, a `value_head` that reads what its output layer reads.

    GPTModel returns a single tensor, so the hidden states wait in the head until its outputs are taken: the schedules
    compute the loss of a micro-batch before they begin the next one.
    """
    gpt.value_head = ValueHead(gpt.config, gpt.pg_collection.tp, bias, size)
    gpt.output_layer.register_forward_pre_hook(gpt.value_head.keep)
