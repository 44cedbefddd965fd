"""Examples as rows: batches to train on, and the loss of held-out ones."""

from collections.abc import Sequence
from typing import Any

import torch

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows, padded
from megappo.config.config_error import ConfigError
from megappo.data.examples import Example
from megappo.data.record_dataset import RecordDataset, share
from megappo.observe.metrics import Metric, merge_metrics, reduce_ranks
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.group_selection import Batches
from megappo.runtime.heartbeat import heartbeat
from megappo.trainer.models import Models, Phases


class ExampleBatches(Batches):
    """Examples in place of rollouts."""

    def __init__(self, dataset: RecordDataset[Example], exchange: Exchange, num_drawn: int):
        self.num_drawn = num_drawn
        self._dataset, self._exchange = dataset, exchange

    def sample(self, step: int, phase: Phases) -> None:
        """Do nothing: examples have their responses."""

    def score(self, step: int, responses: None, phase: Phases) -> tuple[Batch, dict[str, Any]]:
        """Return a step's rows, of which each rank tokenizes its share, and metrics."""
        with phase("read"):
            mine = self._dataset.batch(self.num_drawn, self._exchange.rank, self._exchange.world_size)
            batch = as_batch(mine, self._exchange)
        self.num_drawn += self._dataset.config.train_batch_size
        table = batch.table
        metrics = {
            "data/num_examples": len(table),
            "data/num_tokens": int(table.lengths.sum()),
            "data/trained_tokens": int(table.policy_lengths.sum()),
            "data/length/max": int(table.lengths.max()),
            "data/epochs": self.num_drawn / len(self._dataset),
        }
        return batch, metrics


def as_batch(examples: Sequence[Example], exchange: Exchange) -> Batch:
    """Return the rows of all ranks' examples, in their order, at the ranks that have them.

    A row's response begins with the first token that has a loss.
    """
    sizes = exchange.all_gather(
        (len(examples), max((len(one.tokens) - one.prompt_length for one in examples), default=0))
    )
    first = sum(size for size, _ in sizes[: exchange.rank])
    width = max(longest for _, longest in sizes)
    prompt_lengths = torch.tensor([one.prompt_length for one in examples], dtype=torch.int64)
    lengths = torch.tensor([len(one.tokens) for one in examples], dtype=torch.int64)
    masks = [torch.tensor(one.mask[one.prompt_length :], dtype=torch.float32) for one in examples]
    tokens = [torch.tensor(one.tokens, dtype=torch.int64) for one in examples]
    response_lengths = lengths - prompt_lengths
    rows = Rows(
        torch.zeros_like(lengths),
        torch.arange(first, first + len(examples)),
        prompt_lengths,
        response_lengths,
        torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64),
        {"response_mask": padded(torch.cat(masks) if masks else torch.empty(0), response_lengths, width)},
    )
    return exchange.number(rows)


def evaluate_examples(models: Models, datasets: Datasets, exchange: Exchange, batch_size: int) -> dict[str, Any]:
    """Return the loss of each held-out data set, the mean over its tokens with one; all ranks together.

    Raises:
        ConfigError: a data set has too few examples for the layout.
    """
    metrics = {}
    for name in datasets.val:
        heartbeat.begin(name)
        examples = datasets.held_out(name, exchange)
        shards = models.actor.layout.data
        if len(examples) < shards:
            raise ConfigError(
                f"data.val_files: {name} has {len(examples)} examples, fewer than the actor's {shards} data-parallel "
                "shards: add some, or raise actor.parallel.tensor or actor.parallel.pipeline"
            )
        num_batches = max(1, len(examples) // batch_size)  # so that each has an example for every shard
        parts = []
        for number in range(num_batches):
            part = share(share(examples, number, num_batches), exchange.rank, exchange.world_size)
            [shard] = models.scatter(as_batch(part, exchange)).values()
            outputs, engine = shard.forward(), shard.component.engine
            is_counted = engine is not None and engine.is_output
            mask = shard.batch.rows.response_mask.bool()
            losses = -outputs["log_probs"][mask] if is_counted else torch.empty(0)
            parts.append({"loss": Metric.of(losses.double(), "mean")})
        for metric, value in reduce_ranks(exchange.all_gather(merge_metrics(parts))).items():
            metrics[f"val/{name}/{metric}"] = value
    return metrics
