"""One number per token: a critic's last layer, or a second one beside the language model's."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig


class ValueHead(torch.nn.Module):
    """A Linear(hidden, 1), the same on every tensor-parallel rank.

    In a critic it takes the place of GPTModel.output_layer; the embeddings must then not be tied, as there is no output
    embedding to tie. `add_value_head` puts one beside the output layer.

    Args:
        config: the trunk's.
        tensor_group: ranks that share the hidden states of sequence parallelism.
        bias: adds a bias, of shape [1].
    """

    def __init__(self, config: TransformerConfig, tensor_group: dist.ProcessGroup, bias: bool = False):
        super().__init__()
        self.tp_group = tensor_group
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel
        self.register_parameter("bias", None)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel
        self._kept: torch.Tensor | None = None

    def init_weight(self, seed: int) -> None:
        """Draw a normal weight of standard deviation 1 / (hidden + 1), equal on every rank."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(self.weight.shape, generator=generator) / (self.weight.numel() + 1)
        with torch.no_grad():
            self.weight.copy_(weight)

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Values of the tokens, with the arguments and the pair GPTModel expects of its output layer.

        Args:
            hidden: [T, 1, H]; under sequence parallelism this rank's [T / tensor, 1, H].
            weight: None: never a tied embedding.
            runtime_gather_output: ignored, the output is whole on every rank.
        Returns:
            [T, 1, 1] float32 on every tensor-parallel rank, and None: no bias is left to add.
        """
        bias = None if self.bias is None else self.bias.float()
        values = F.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            # Every rank computes the same loss from the gathered values, so backward only takes its own part of it.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None

    def keep(self, output_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Forward pre-hook of an output layer: values of the hidden states it is about to read, for `take`."""
        self._kept, _ = self(inputs[0])

    def take(self) -> torch.Tensor:
        """The values of the last forward pass, [1, T, 1], laid out as GPTModel's output; once for each pass.

        Raises:
            RuntimeError: there was no forward pass since the last call.
        """
        if self._kept is None:
            raise RuntimeError("values were taken twice, or before a forward pass of the model they belong to")
        values, self._kept = self._kept, None
        return values.transpose(0, 1)


def add_value_head(gpt: GPTModel, bias: bool) -> None:
    """Give the model, a last stage, a `value_head` that reads what its output layer reads.

    GPTModel returns a single tensor, so the values wait in the head until they are taken: the schedules compute the
    loss of a micro-batch before they begin the next one.
    """
    gpt.value_head = ValueHead(gpt.config, gpt.pg_collection.tp, bias)
    gpt.output_layer.register_forward_pre_hook(gpt.value_head.keep)
