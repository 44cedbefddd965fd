"""trainer.kind reward_model: one optimizer step of a reward model on each batch of pairs of responses."""

from functools import partial

import torch

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.ppo.reductions import Unreduced
from megappo.ppo.supervised import preference_loss, preference_metrics
from megappo.trainer.fine_tuning import build_examples, example_step
from megappo.trainer.loop import train
from megappo.trainer.objectives import LossPart, prefixed


def reward_model_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """Return the Bradley-Terry loss of a batch's pairs; arguments as of `sft_loss`."""

    def loss_fn(outputs: Outputs, rows: Rows) -> LossPart:
        chosen, rejected = pair_scores(outputs)
        margins = rows.fields["margins"][::2]
        coef = config.reward_model.center_coef
        loss, metrics = preference_loss(chosen, rejected, margins, num_sequences // 2, coef)
        return loss, prefixed("reward_model", metrics)

    return loss_fn


def held_out_margins(outputs: Outputs, rows: Rows) -> Unreduced:
    """Return the metrics of held-out pairs; without values where there are no outputs."""
    margins = torch.empty(0, dtype=torch.float64)
    if outputs:
        chosen, rejected = pair_scores(outputs)
        margins = (chosen - rejected).double()
    return preference_metrics(margins)


def pair_scores(outputs: Outputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores, [P] each, of the chosen and the rejected rows of pairs, which follow each other."""
    chosen, rejected = outputs["bootstrap_values"].view(-1, 2).unbind(1)
    return chosen, rejected


build = partial(build_examples, measure=held_out_margins)
loop = partial(train, make_step=partial(example_step, loss_of=reward_model_loss))
