"""Build the rows of a step from its scored responses, each row at the rank that owns it."""

from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows
from megappo.config.checks import num_scores_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.engines.client import EngineError
from megappo.observe.metrics import reduce_ranks
from megappo.rollouts.group_selection import StepResponses
from megappo.rollouts.responses import episode_metrics, extra_metrics
from megappo.rollouts.sample_rows import check_tokens, masked_samples, sample_rows, with_scores
from megappo.rollouts.sampler import Sample
from megappo.rollouts.step_scores import extra_fields, extra_kinds
from megappo.userland.grades import Graded
from megappo.userland.rewards import RewardError


class RowBuilder:
    """Builds the rows of steps. All ranks call it together.

    Args:
        vocab_size: tokens below it are known to every model.
        tokenizer: serves one thread at a time.
    """

    def __init__(self, config: Config, vocab_size: int, tokenizer: PreTrainedTokenizerBase, exchange: Exchange):
        self._config, self._vocab_size = config, vocab_size
        self._tokenizer, self._exchange = tokenizer, exchange
        self._nums_scores: set[int] = set()

    def build(self, responses: StepResponses) -> tuple[Batch, dict[str, float]]:
        """Wait for the scores of a step's responses; return its rows and metrics.

        Raises:
            RewardError: a function failed, and reward.on_error is raise; or see `scores`.
            ConfigError: see `scores`; or the critic does not know a token.
            EngineError: responses are missing.
        """
        samples, config = responses.samples, self._config
        check_tokens(samples, self._vocab_size)
        graded = responses.graded()
        rows = self._unscored_rows(samples, responses)
        greedy = [] if responses.greedy is None else responses.greedy.samples
        num_tokens = sum(one.num_policy_tokens for one in [*samples, *greedy])
        rewards = responses.failure_metrics() | extra_metrics(graded)
        metrics = responses.engine_metrics() | episode_metrics(samples)
        metrics |= {f"reward/{name}": metric for name, metric in rewards.items()}
        mine = (nums_scores_of(graded), extra_kinds(graded), len(samples), num_tokens, metrics)
        shared = zip(*self._exchange.share(mine), strict=True)
        nums_scores, kinds, nums_samples, nums_tokens, metrics_by_rank = shared
        extras = extra_fields(config, samples, graded, self._tokenizer, kinds)
        rows = with_scores(rows, samples, self.scores(graded, nums_scores), **extras)
        batch = self._exchange.number(rows)
        batch = self._exchange.move(batch, batch.table.split(self._exchange.world_size), list(rows.fields))
        expected = config.rollout.n * config.data.train_batch_size
        if sum(nums_samples) != expected:
            raise EngineError(
                f"expected {config.rollout.n} responses to each of {config.data.train_batch_size} prompts, got "
                f"{sum(nums_samples)} in all"
            )
        return batch, {"rollout/num_tokens": sum(nums_tokens)} | reduce_ranks(metrics_by_rank)

    def scores(self, graded: Sequence[Graded], nums_scores: Iterable[set[int]]) -> torch.Tensor:
        """Return the scores of each sample, those of its steps included, [b, K] float32. With an environment, the first
        is the sum of its rewards.

        Args:
            nums_scores: `nums_scores_of` all ranks.
        Raises:
            RewardError: responses of the run have different numbers of scores.
            ConfigError: there is one score, and the estimator needs several.
        """
        self._nums_scores = self._nums_scores.union(*nums_scores)
        if len(self._nums_scores) > 1:
            counts = " and of others ".join(map(str, sorted(self._nums_scores)))
            raise RewardError(
                f"reward function {self._config.reward.function} returned of some responses {counts} scores; expected "
                "as many of every response of the run\nfix it, or choose another reward.function"
            )
        num_scores = max(self._nums_scores, default=1)
        if errors := num_scores_errors(self._config, num_scores):
            raise ConfigError(*errors)
        totals = [one.totals + [0.0] * (num_scores - len(one.scores)) for one in graded]
        return torch.tensor(totals, dtype=torch.float32).reshape(len(graded), num_scores)

    def _unscored_rows(self, samples: Sequence[Sample], responses: StepResponses) -> Rows:
        config = self._config
        masked: set[tuple[int, int]] = set()
        if config.algorithm.mask_truncated:
            masked = masked_samples(samples, compared=config.compares_responses)
        return sample_rows(samples, responses.prompts, episodes=config.rollout.has_environment, masked=masked)


def nums_scores_of(graded: Sequence[Graded]) -> set[int]:
    """Return the numbers of scores that samples have, except those for which a function failed."""
    return {len(one.scores) for one in graded if not one.failed}
