"""The critic's last layer: one number per token instead of logits."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig


class ValueHead(torch.nn.Module):
    """A bias-free Linear(hidden, 1), the same on every tensor-parallel rank; takes the place of GPTModel.output_layer.

    Args:
        config: the trunk's; its embeddings must not be tied, as there is no output embedding to tie.
        tensor_group: ranks that share the hidden states of sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, tensor_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tensor_group
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel

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
            [T, 1, 1] float32 on every tensor-parallel rank, and no bias.
        """
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank computes the same loss from the gathered values, so backward only takes its own part of it.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return values, None
