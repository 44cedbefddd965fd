"""A step's scored rows, sampled by the engines in the step; `rollouts.record.Replay` reads them from a file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from megappo.batch.exchange import Batch
from megappo.batch.rows import Rows
from megappo.data.prompts import Prompt
from megappo.ppo.reward_shaping import RunningMoments, shape_scores
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.group_selection import Batches, GroupQuota, StepResponses, choose_groups
from megappo.rollouts.record import Record
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.row_builder import RowBuilder, score_counts, total_scores
from megappo.trainer.models import Phases


class SampledBatches(Batches):
    """Rows that the engines sample and the reward function scores.

    Args:
        sleep: called when the engines have sampled everything.
        record: keeps the rows of each step.
        num_drawn: prompts that earlier steps have drawn.
    """

    def __init__(
        self,
        datasets: Datasets,
        rollouts: Rollouts,
        sleep: Callable[[], None],
        record: Record | None = None,
        *,
        num_drawn: int = 0,
    ):
        self.num_drawn = num_drawn
        self._prompts = datasets.train
        self._rollouts = rollouts
        self._config = rollouts.config
        self._row_builder = RowBuilder(rollouts.config, datasets.vocab_size, rollouts.tokenizer, rollouts.exchange)
        self._sleep = sleep
        self._record = record

    def sample(self, step: int, phase: Phases) -> StepResponses:
        """Return this rank's responses to a step's prompts. The engines sleep afterwards."""
        data = self._config.data
        filters = self._config.algorithm.filter_groups
        responses = choose_groups(
            self._sample_round,
            self._draw,
            self._rollouts.exchange,
            data.train_batch_size,
            phase,
            filters=filters,
            over_samples=data.gen_batch_size is not None,
        )
        with phase("rollout"):
            if self._config.algorithm.method.needs_greedy_baseline:
                responses.greedy = self._rollouts.sample(responses.prompts, 1, self._rollouts.greedy)
            self._sleep()
        responses.seconds = phase.seconds("rollout")
        return responses

    def score(
        self,
        step: int,
        responses: StepResponses,
        phase: Phases,
    ) -> tuple[Batch, dict[str, Any]]:
        """Wait for the scores of a step's responses; return each row on the rank that owns it, and metrics. Scoring
        began in `sample`."""
        with phase("reward"):
            batch, metrics = self._row_builder.build(responses, step if self._config.rollout.max_staleness else None)
            if responses.greedy is not None:
                batch = replace(batch, rows=self._with_baselines(batch.rows, responses.greedy))
        num_tokens = metrics["rollout/num_tokens"] + responses.num_dropped_tokens
        metrics |= responses.metrics | {
            "rollout/num_tokens": num_tokens,
            "rollout/engine_restarts": self._rollouts.restarts.take_count(),
        }
        if self._record is not None:
            with phase("record"):
                self._record.write(step, batch, responses.prompts, num_tokens, self.num_drawn)
        return batch, metrics | {"rollout/tokens_per_second": num_tokens / responses.seconds}

    def _sample_round(self, prompts: Sequence[Prompt], num_groups: int) -> Responses:
        """Sample responses to a draw of prompts, of which `num_groups` groups are needed."""
        rollouts = self._rollouts
        filters = self._config.algorithm.filter_groups
        quota = None
        if self._config.data.gen_batch_size is not None:
            quota = GroupQuota(num_groups, filters.metric if filters.enable else None, rollouts.new_counter())
        return rollouts.sample(prompts, self._config.rollout.n, rollouts.training, quota=quota)

    def _with_baselines(self, rows: Rows, greedy: Responses) -> Rows:
        """Add `baselines`: the shaped score of the greedy response to each row's prompt."""
        exchange = self._rollouts.exchange
        greedy.fill_grades()
        indices = torch.tensor([one.prompt_index for one in greedy.samples], dtype=torch.int64)
        lengths = torch.tensor([one.num_policy_tokens for one in greedy.samples], dtype=torch.int64)
        scores = self._row_builder.scores(greedy.samples, exchange.all_gather(score_counts(greedy.samples)))
        shaped, _ = shape_scores(
            total_scores(scores),
            lengths,
            indices,
            self._config.reward,
            RunningMoments(),
            max_response_length=self._config.rollout.max_response_length,
            process_group=exchange.group,
        )
        baselines = exchange.merge(dict(zip(indices.tolist(), shaped.tolist(), strict=True)))
        values = torch.tensor([baselines[prompt] for prompt in rows.prompt_ids.tolist()], dtype=torch.float32)
        return replace(rows, fields=rows.fields | {"baselines": values})

    def _draw(self) -> list[Prompt]:
        """Return the next batch of prompts, of which each rank tokenizes its share."""
        exchange = self._rollouts.exchange
        mine = self._prompts.batch(self.num_drawn, exchange.rank, exchange.world_size)
        self.num_drawn += self._config.data.draw_size
        return list(chain.from_iterable(exchange.all_gather(mine)))
