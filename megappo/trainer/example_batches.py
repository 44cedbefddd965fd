"""Examples as rows: batches to train on, and the loss of held-out ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.fields import field_of
from megappo.batch.rows import Rows, padded
from megappo.config.config_error import ConfigError
from megappo.data.examples import ConversationDataset, Example
from megappo.data.preferences import Pair
from megappo.data.record_dataset import share
from megappo.models.megatron_engine import Outputs
from megappo.observe.metrics import Metric, Reduced, merge_metrics, reduce_ranks
from megappo.ppo.reductions import Unreduced
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.step_responses import Batches
from megappo.runtime.heartbeat import heartbeat
from megappo.trainer.models import Phases
from megappo.trainer.run import Run

Measure = Callable[[Outputs, Rows], Unreduced]
"""(outputs, rows) -> metrics of the rows; without values where there are no outputs, {}."""


@dataclass
class ExampleBatches(Batches):
    """Examples in place of rollouts."""

    dataset: ConversationDataset[Example] | ConversationDataset[Pair]
    exchange: Exchange
    num_drawn: int

    def score(self, step: int, responses: None, phase: Phases) -> tuple[Batch, Reduced]:
        """Return a step's rows, of which each rank tokenizes its share, and metrics."""
        with phase("read"):
            mine = self.dataset.batch(self.num_drawn, self.exchange.rank, self.exchange.world_size)
            batch = as_batch(mine, self.exchange, self.dataset.fields)
        self.num_drawn += self.dataset.config.train_batch_size
        table = batch.table
        metrics = {
            "data/num_examples": len(table.prompt_ids.unique()),
            "data/num_tokens": int(table.lengths.sum()),
            "data/trained_tokens": int(table.policy_lengths.sum()),
            "data/length/max": int(table.lengths.max()),
            "data/epochs": self.num_drawn / len(self.dataset),
        }
        return batch, metrics

    def held_out(self, name: str, datasets: Datasets) -> Batch:
        """Return the rows of a held-out data set; all ranks together."""
        examples = datasets.held_out(name, self.exchange)
        mine = share(examples, self.exchange.rank, self.exchange.world_size)
        return as_batch(mine, self.exchange, self.dataset.fields)


def as_batch(examples: Sequence[Example | Pair], exchange: Exchange, names: Sequence[str] = ()) -> Batch:
    """Return the rows of all ranks' examples, in their order, at the ranks that have them.

    A row's response begins with the first token that has a loss. The rows of a pair, the chosen one first, have the
    same prompt_id.

    Args:
        names: fields of the examples that become fields of their rows.
    """
    rows = [row for example in examples for row in example.rows]
    prompt_lengths = [row.prompt_length for row in rows]
    lengths = [len(row.tokens) - length for row, length in zip(rows, prompt_lengths, strict=True)]

    sizes = exchange.all_gather((len(examples), max(lengths, default=0)))
    num_before = sum(num_examples for num_examples, _ in sizes[: exchange.rank])
    width = max(longest for _, longest in sizes)

    prompt_ids = []
    ids = []
    for prompt_id, example in enumerate(examples, num_before):
        for number in range(len(example.rows)):
            prompt_ids.append(prompt_id)
            ids.append(number)

    response_lengths = torch.tensor(lengths, dtype=torch.int64)

    def of_responses(of_rows: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return the numbers of each row's tokens without its prompt."""
        numbers = [number for one, length in zip(of_rows, prompt_lengths, strict=True) for number in one[length:]]
        return padded(torch.tensor(numbers, dtype=torch.float32), response_lengths, width)

    fields = {"response_mask": of_responses([row.mask for row in rows])}
    for name in names:
        values = [one.fields[name] for one in examples for _ in one.rows]
        fields[name] = of_responses(values) if field_of(name).per_token else torch.tensor(values, dtype=torch.float32)
    tokens = [token for row in rows for token in row.tokens]
    found = Rows(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(prompt_ids, dtype=torch.int64),
        torch.tensor(prompt_lengths, dtype=torch.int64),
        response_lengths,
        torch.tensor(tokens, dtype=torch.int64),
        fields,
    )
    return exchange.number(found)


def evaluate_examples(measure: Measure, run: Run, step: int) -> Reduced:
    """Return the metrics of each held-out data set, means over its tokens with a loss, or pairs; all ranks together.

    Args:
        measure: returns the metrics of rows.
    Raises:
        ConfigError: a data set has too few examples for the layout.
    """
    metrics = {}
    exchange = run.exchange
    batch_size = run.config.data.train_batch_size
    [component] = run.models.components.values()
    for name in run.datasets.val:
        heartbeat.begin(name)
        examples = run.datasets.held_out(name, exchange)
        shards = component.layout.data
        if len(examples) < shards:
            raise ConfigError(
                f"data.val_files: {name} has {len(examples)} examples, fewer than the {component.name}'s {shards} "
                f"data-parallel shards: add some, or raise {component.name}.parallel.tensor or "
                f"{component.name}.parallel.pipeline"
            )
        num_batches = max(1, len(examples) // batch_size)  # so that each has an example for every shard
        parts = []
        for number in range(num_batches):
            part = share(share(examples, number, num_batches), exchange.rank, exchange.world_size)
            batch = as_batch(part, exchange, run.datasets.val[name].fields)
            [shard] = run.models.scatter(batch).values()
            outputs = shard.forward()
            engine = shard.component.engine
            is_counted = engine is not None and engine.is_output
            measured = measure(outputs if is_counted else {}, shard.batch.rows)
            parts.append({metric: Metric.of(*values) for metric, values in measured.items()})
        for metric, value in reduce_ranks(exchange.all_gather(merge_metrics(parts))).items():
            metrics[f"val/{name}/{metric}"] = value
    return metrics
