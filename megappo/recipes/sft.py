"""trainer.kind sft: supervised fine-tuning, an optimizer step of the actor on each batch of examples."""

from functools import partial

import torch

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.ppo.reductions import Normaliser, Unreduced
from megappo.ppo.supervised import nll_loss
from megappo.trainer.fine_tuning import build_examples, example_step
from megappo.trainer.loop import train
from megappo.trainer.objectives import LossPart, prefixed


def sft_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """Return the negative log-likelihood of a batch's responses.

    Args:
        num_tokens: tokens with mask 1 of the whole batch. num_sequences: its rows.
    """
    normaliser = Normaliser(num_tokens, num_sequences, config.data.max_length)

    def loss_fn(outputs: Outputs, rows: Rows) -> LossPart:
        loss, metrics = nll_loss(outputs["log_probs"], rows.response_mask, normaliser)
        return loss, prefixed("actor", metrics)

    return loss_fn


def held_out_loss(outputs: Outputs, rows: Rows) -> Unreduced:
    """Return the losses of held-out tokens; none where there are no outputs."""
    losses = torch.empty(0, dtype=torch.float64)
    if outputs:
        losses = -outputs["log_probs"][rows.response_mask.bool()].double()
    return {"loss": (losses, "mean")}


build = partial(build_examples, measure=held_out_loss)
loop = partial(train, make_step=partial(example_step, loss_of=sft_loss))
