"""Build the rows of a step from its scored responses, each row at the rank that owns it."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.config.score_checks import num_scores_errors, step_scores_errors
from megappo.data.tokenizer import completing_tokens
from megappo.engines.generations import EngineError
from megappo.observe.metrics import reduce_ranks
from megappo.placement.components import replayed_policy
from megappo.rollouts.responses import episode_metrics, extra_metrics
from megappo.rollouts.sample_rows import Sample, as_rows, floats, integers, mask_truncated, sample_rows
from megappo.rollouts.step_responses import StepResponses
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.rewards import RewardError


class RowBuilder:
    """Builds the rows of steps. All ranks call it together.

    Args:
        vocab_size: tokens below it are known to every model.
        tokenizer: serves one thread at a time.
    """

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase,
        exchange: Exchange,
    ):
        self._config = config
        self._vocab_size = vocab_size
        self._replayed = replayed_policy(config)
        self._tokenizer = tokenizer
        self._exchange = exchange
        self._score_counts: set[int] = set()

    def build(self, responses: StepResponses, step: int | None = None) -> tuple[Batch, dict[str, float]]:
        """Wait for the scores of a step's responses; return its rows and metrics.

        Args:
            step: see `sample_rows`.
        Raises:
            RewardError: a function failed, and reward.on_error is raise; or see `scores`.
            ConfigError: see `scores`; a model does not know a token; or the estimator does not support step scores.
            EngineError: responses are missing.
        """
        samples = responses.samples
        config = self._config
        check_tokens(samples, self._vocab_size)
        responses.fill_grades()
        if config.algorithm.mask_truncated:
            mask_truncated(samples, compared=config.compares_responses)
        rows = sample_rows(
            samples,
            episodes=config.rollout.has_episodes,
            step=step,
            replayed=self._replayed,
            prompts=responses.prompts,
        )
        greedy = [] if responses.greedy is None else responses.greedy.samples
        num_tokens = sum(one.num_policy_tokens for one in [*samples, *greedy])
        rewards = responses.failure_metrics() | extra_metrics(samples)
        metrics = responses.engine_metrics() | episode_metrics(samples)
        metrics |= {f"reward/{name}": metric for name, metric in rewards.items()}
        has_weights = any(one.grade.loss_weight is not None for one in samples)
        has_steps = any(any(one.grade.steps) for one in samples)
        mine = (score_counts(samples), has_weights, has_steps, len(samples), num_tokens, metrics)
        by_rank = zip(*self._exchange.all_gather(mine), strict=True)
        counts_by_rank, has_weights_by_rank, has_steps_by_rank, nums_samples, nums_tokens, metrics_by_rank = by_rank
        scores = self.scores(samples, counts_by_rank)
        rows = with_scores(rows, samples, scores, has_weights=any(has_weights_by_rank))
        if config.teachers:
            teachers = floats(responses.prompts[prompt].teacher for prompt in rows.prompt_ids.tolist())
            rows = replace(rows, fields=rows.fields | {"teacher": teachers})
        if any(has_steps_by_rank):
            if errors := step_scores_errors(config):
                raise ConfigError(*errors)
            rows = with_step_scores(rows, samples, self._tokenizer)
        batch = self._exchange.number(rows)
        batch = self._exchange.move(batch, batch.table.split(self._exchange.world_size), list(rows.fields))
        num_prompts = len(responses.prompts)
        if sum(nums_samples) != config.rollout.n * num_prompts:
            raise EngineError(
                f"expected {config.rollout.n} responses to each of {num_prompts} prompts, got "
                f"{sum(nums_samples)} in all"
            )
        return batch, {"rollout/num_tokens": sum(nums_tokens)} | reduce_ranks(metrics_by_rank)

    def scores(self, samples: Sequence[Sample], counts_by_rank: Iterable[set[int]]) -> torch.Tensor:
        """Return the scores of each sample, including the scores of its steps, [b, K] float32. With an environment, the
        first is the sum of its rewards.

        Args:
            counts_by_rank: `score_counts` of all ranks.
        Raises:
            RewardError: responses of the run have different numbers of scores.
            ConfigError: there is one score, and the estimator needs several.
        """
        self._score_counts = self._score_counts.union(*counts_by_rank)
        if len(self._score_counts) > 1:
            counts = ", ".join(map(str, sorted(self._score_counts)))
            raise RewardError(
                f"reward function {self._config.reward.function} returned different numbers of scores ({counts}); "
                "expected the same number for every response of the run\nfix it, or choose another reward.function"
            )
        num_scores = max(self._score_counts, default=1)
        if errors := num_scores_errors(self._config, num_scores):
            raise ConfigError(*errors)
        totals = []
        for grade in [one.grade for one in samples]:
            totals.append(grade.totals + [0.0] * (num_scores - len(grade.scores)))
        return torch.tensor(totals, dtype=torch.float32).reshape(len(samples), num_scores)


def score_counts(samples: Sequence[Sample]) -> set[int]:
    """Return how many scores samples have, except samples for which a function failed."""
    return {len(one.grade.scores) for one in samples if not one.grade.failed}


def check_tokens(samples: Sequence[Sample], vocab_size: int) -> None:
    """Refuse tokens for which a model has no embedding: the actor samples from its whole vocabulary.

    Raises:
        ConfigError: names the token.
    """
    highest = max(chain.from_iterable(one.tokens for one in samples), default=0)
    if highest >= vocab_size:
        raise ConfigError(
            f"critic.model_path, ref.model_path or teachers: the actor wrote token {highest}, for which one of them "
            f"has no embedding (vocab_size is {vocab_size} in its config.json): choose a model with the actor's "
            "vocabulary"
        )


def total_scores(scores: torch.Tensor) -> torch.Tensor:
    """Return the score of each response, [b] float32, from its scores [b, K]."""
    return scores.sum(dim=1, dtype=torch.float64).float()


def with_scores(
    rows: Rows,
    samples: Sequence[Sample],
    scores: torch.Tensor,
    *,
    has_weights: bool,
) -> Rows:
    """Add the scores of samples [b, K], and their loss weights if any rank has some, to `sample_rows`."""
    sample_of_row = torch.arange(len(samples)).repeat_interleave(integers(len(one.segments) for one in samples))
    fields = {"scores": total_scores(scores)[sample_of_row]}
    if scores.shape[1] > 1:
        fields["score_components"] = scores[sample_of_row]
    if has_weights:
        weights = [one.grade.loss_weight for one in samples]
        fields["loss_weights"] = floats(1.0 if weight is None else weight for weight in weights)[sample_of_row]
    return replace(rows, fields=rows.fields | fields)


def with_step_scores(rows: Rows, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Add the scores of steps to the rewards that an environment has given tokens."""
    rewards = chain.from_iterable(step_rewards(one, tokenizer) for one in samples)
    turn_rewards = as_rows(floats(rewards), rows.response_lengths) + rows.fields.get("turn_rewards", 0.0)
    return replace(rows, fields=rows.fields | {"turn_rewards": turn_rewards})


def step_rewards(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """Return for each token of a sample the sum of the scores of the steps that end there.

    A step ends at the token that completes its last character; if an environment wrote that token, at the policy's last
    token before it.

    Args:
        tokenizer: tokenizer that decoded the reward function's text; no other thread may use it.
    """
    tokens = sample.tokens
    rewards = [0.0] * len(tokens)
    steps = sorted(chain.from_iterable(sample.grade.steps))
    heartbeat.beat()
    own = [i for i, log_prob in enumerate(sample.log_probs) if log_prob is not None]
    places = completing_tokens(tokens, [end for end, _ in steps], tokenizer)
    for place, (_, score) in zip(places, steps, strict=True):
        rewards[own[max(0, bisect_right(own, place) - 1)]] += score  # the first token is the policy's
    return rewards
