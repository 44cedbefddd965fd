"""From prompts to scored rows at their owners: sampling by the engines, scoring by the reward function."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch

from megappo.batch.exchange import Exchange, entries_of
from megappo.batch.rows import Rows
from megappo.batch.step_batch import Batch
from megappo.config.algorithm_checks import late_scores_errors, num_scores_errors
from megappo.config.errors import ConfigError
from megappo.config.eval_sets import TRAINING
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import showing_special
from megappo.engines.client import EngineError, SamplingParams
from megappo.engines.restarts import EngineRestarts
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.ppo.reward_shaping import RunningMoments, shape_scores
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.episodes import Episodes, episodes_of
from megappo.rollouts.responses import (
    PartlyWanted,
    SampleScoring,
    Scored,
    episode_metrics,
    nums_scores_of,
    told_means,
)
from megappo.rollouts.sample_rows import check_known, masked, sample_rows, summed, with_scores
from megappo.rollouts.sampler import Sample, Sampled, Use, sample, store_counter
from megappo.rollouts.step_scores import kinds_told, told_fields
from megappo.runtime.interruption import INTERRUPTION, Interrupted
from megappo.runtime.listening import run_store
from megappo.trainer.over_sampling import Enough, Wanted
from megappo.userland.environment_workers import Workers
from megappo.userland.forms import Graded
from megappo.userland.pool import RewardError


@dataclass(frozen=True)
class Responses:
    """This rank's share of a step's responses.

    Attributes:
        sampled: rollout.n to each prompt, to train on; where only so many groups were wanted, to each that has as many.
        greedy: one to each prompt, where the estimator needs its score; else none.
        scoring: of the sampled ones, by the reward function. greedy_scoring: of the greedy ones, where there are any.
        use: of this rank's engine meanwhile.
    """

    sampled: list[Sample]
    greedy: list[Sample]
    scoring: SampleScoring | PartlyWanted | Scored
    greedy_scoring: SampleScoring | None = None
    use: Use = field(default_factory=Use)


class Rollouts:
    """Samples and scores responses. Ranks that own no engine join with empty hands.

    Args:
        restarts: has this rank's engine, which serves.
        num_engines: of all ranks.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        restarts: EngineRestarts,
        exchange: Exchange,
        observer: Observer | NullObserver,
        *,
        num_engines: int,
    ):
        self.config = config
        tokenizer = datasets.tokenizer
        self.tokenizer = tokenizer if config.reward.skip_special_tokens else showing_special(tokenizer)
        self.client = restarts.own.client
        self._workers = restarts.own.workers
        rewards = self._workers_of(TRAINING).rewards
        if errors := late_scores_errors(config, waits_for_all=rewards is not None and rewards.waits_for_all):
            raise ConfigError(*errors)
        self._decoder = copy.deepcopy(self.tokenizer)  # of its own: tokenizers serve one thread at a time
        self.restarts = restarts
        self.exchange = exchange
        self.observer = observer
        self.num_engines = num_engines
        self.vocab_size = datasets.vocab_size
        rollout = config.rollout
        self.params = partial(SamplingParams, stop_token_ids=datasets.stop_token_ids)
        self.training = self.params(rollout.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k)
        self.greedy = self.params(rollout.max_response_length, temperature=0.0)
        self._store = run_store()
        self._num_counters = 0
        self._nums_scores: set[int] = set()
        self._use = Use()

    def respond(self, prompts: Sequence[Prompt], wanted: Wanted | None = None) -> Responses:
        """This rank's share of a step's responses; all ranks call it and return together.

        Args:
            wanted: with so many groups it is enough; None: all prompts'.
        """
        self._use = Use()
        scoring = self.scoring(prompts)
        enough = None if wanted is None else Enough(wanted, scoring, self._new_counter())
        sampled = self.sample(prompts, self.config.rollout.n, self.training, "rollout", scoring, enough)
        return Responses(sampled, [], scoring, use=self._use)

    def with_greedy(self, responses: Responses, prompts: Sequence[Prompt]) -> Responses:
        """The same with a greedy response to each prompt, where the estimator needs it; all ranks together, behind
        `respond`."""
        if not self.config.algorithm.method.needs_greedy_baseline:
            return responses
        scoring = self.scoring(prompts)
        greedy = self.sample(prompts, 1, self.greedy, "baselines", scoring)
        return replace(responses, greedy=greedy, greedy_scoring=scoring, use=self._use)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        label: str,
        scoring: SampleScoring | None = None,
        enough: Enough | None = None,
        task: str = TRAINING,
    ) -> list[Sample]:
        """This rank's share of n responses to each prompt; `prompt_index` counts in `prompts`.

        All ranks call it and return together.

        Prompts that an engine leaves without an answer because it fails are asked again, once it is up anew.

        Args:
            scoring: gets the samples, in their order, as they are written.
            enough: says when prompts may be left without an answer; of `scoring`.
            task: whose environment answers, if it has one.
        Raises:
            Interrupted: any rank is to end; what has been sampled is lost.
            EngineError: an engine refused a request, or failed too often.
        """
        left = [(i, prompt.tokens) for i, prompt in enumerate(prompts)]
        play = self._play(prompts, params, task)
        finished = self._new_counter()
        progress = self.observer.progress(label, len(prompts)) if self.client is not None else lambda done: None
        samples: list[Sample] = []

        def on_group(group: Sequence[Sample]) -> None:
            if scoring is not None:
                positions = scoring.add(group)
                if enough is not None:
                    enough.add(positions)

        while left:
            tell = lambda count: progress(finished(count) + count)  # noqa: E731
            sampled = self._round(left, n, params, play, tell, on_group, enough)
            samples += sampled.samples
            self._use += sampled.use
            raise_if_interrupted(self.exchange)
            if not self.restarts.restart_after_rollout(sampled.fault):
                break
            if enough is not None and any(self.exchange.share(enough())):
                break
            done = set().union(*self.exchange.share({one.prompt_index for one in samples}))
            left = [prompt for prompt in left if prompt[0] not in done]
        if scoring is not None:
            scoring.end()
        if lost := [one.episode.lost for one in samples if one.episode and one.episode.lost]:
            print(f"WARNING (rank {self.exchange.rank}): {len(lost)} episodes were lost: {lost[0]}", flush=True)
        return samples

    def _play(self, prompts: Sequence[Prompt], params: SamplingParams, task: str) -> Episodes | None:
        """Episodes where the task has an environment; None for single responses, and on ranks without an engine."""
        environments = self._workers_of(task).environments
        if environments is None:
            return None
        return episodes_of(prompts, environments, self.config, self._decoder, params.max_response_length)

    def _workers_of(self, task: str) -> Workers:
        """This rank's; none where it owns no engine."""
        return self._workers.get(task, Workers())

    def _round(
        self,
        prompts: Sequence[tuple[int, list[int]]],
        n: int,
        params: SamplingParams,
        play: Episodes | None,
        on_prompts: Callable[[int], None],
        on_group: Callable[[Sequence[Sample]], None],
        enough: Enough | None,
    ) -> Sampled:
        """What this rank's engine gets to of prompts that have no responses yet."""
        take = self._new_counter()
        if self.client is None:
            return Sampled([], Use())
        sampled = sample(
            prompts,
            n,
            params,
            self.client,
            take,
            num_engines=self.num_engines,
            max_running_requests=self.config.rollout.max_running_requests,
            on_prompts=on_prompts,
            on_group=on_group,
            stop=self._is_interrupted,
            enough=enough,
            play=play,
        )
        if enough is not None:
            enough.tell_all(self._is_interrupted)
        return sampled

    def _new_counter(self) -> Callable[[int], int]:
        """The same on all ranks."""
        self._num_counters += 1
        return store_counter(self._store, f"rollouts/{self._num_counters}")

    def _is_interrupted(self) -> bool:
        """Whether any of the ranks that own an engine is to end."""
        if INTERRUPTION.reason:
            self._store.set("interrupted", INTERRUPTION.reason)
        return self._store.check(["interrupted"])

    def scoring(self, prompts: Sequence[Prompt], task: str = TRAINING) -> SampleScoring:
        """Of this rank's samples of these prompts, by the task's reward function."""
        return SampleScoring(self._workers_of(task).rewards, self._decoder, prompts)

    def _scores(self, graded: Sequence[Graded], nums_scores: Iterable[set[int]]) -> torch.Tensor:
        """[b, K] float32: the scores of each sample, those of its steps included; before them the sum of the
        environment's rewards, where there is one.

        Args:
            nums_scores: of all ranks, see `nums_scores_of`.
        Raises:
            RewardError: there are not as many scores for every response of the run.
            ConfigError: there is one, and the estimator needs several.
        """
        num_scores = self._num_scores(nums_scores)
        totals = [one.totals + [0.0] * (num_scores - len(one.scores)) for one in graded]
        return torch.tensor(totals, dtype=torch.float32).reshape(len(graded), num_scores)

    def _num_scores(self, found: Iterable[set[int]]) -> int:
        """K, from what workers, ranks and steps have found it to be."""
        self._nums_scores = self._nums_scores.union(*found)
        if len(self._nums_scores) > 1:
            numbers = " and of others ".join(map(str, sorted(self._nums_scores)))
            raise RewardError(
                f"reward function {self.config.reward.function} returned of some responses {numbers} scores; expected "
                "as many of every response of the run\nfix it, or choose another reward.function"
            )
        num_scores = max(self._nums_scores, default=1)
        if errors := num_scores_errors(self.config, num_scores):
            raise ConfigError(*errors)
        return num_scores

    def collect(self, responses: Responses, prompts: Sequence[Prompt]) -> tuple[Batch, dict[str, float]]:
        """Scores the step's responses; its rows at their owners, with the fields that the rollout writes, and metrics.

        `baselines` are among them where the estimator needs them.

        Raises:
            RewardError: a function failed, and reward.on_error is raise; or as `_scores`.
            ConfigError: as `_scores`.
            EngineError: there are not as many responses as were asked for.
        """
        samples, n = responses.sampled, self.config.rollout.n
        check_known(samples, self.vocab_size)
        graded = responses.scoring.graded()
        parts = responses.scoring.counts() | told_means(graded)
        masks = self.config.algorithm.mask_truncated
        without = masked(samples, compared=self.config.compares_responses) if masks else set()
        of_rewards = {f"reward/{name}": part for name, part in parts.items()}
        metrics = _engine_metrics(responses.use) | of_rewards | episode_metrics(samples)
        written = sum(one.num_policy_tokens for one in chain(samples, responses.greedy))
        rows = sample_rows(samples, prompts, episodes=self.config.rollout.has_environment, without=without)
        mine = (entries_of(rows), nums_scores_of(graded), kinds_told(graded), len(samples), written, metrics)
        entries, nums_scores, kinds, nums_samples, nums_tokens, of_ranks = zip(*self.exchange.share(mine), strict=True)
        told = told_fields(self.config, samples, graded, self._decoder, kinds)
        rows = with_scores(rows, samples, self._scores(graded, nums_scores), **told)
        rows, table, sources = self.exchange.numbered(rows, entries)
        owners = table.split(self.exchange.world_size)
        batch = Batch(self.exchange.move(rows, table, sources, owners, list(rows.fields)), table, owners)
        num_prompts = self.config.data.train_batch_size
        if (found := sum(nums_samples)) != n * num_prompts:
            raise EngineError(f"expected {n} responses to each of {num_prompts} prompts, got {found} in all")
        if self.config.algorithm.method.needs_greedy_baseline:
            baselines = {"baselines": self._baselines(responses, batch.rows)}
            batch = replace(batch, rows=replace(batch.rows, fields=batch.rows.fields | baselines))
        counts = {"rollout/num_tokens": sum(nums_tokens), "rollout/engine_restarts": self.restarts.take_count()}
        return batch, counts | reduce_ranks(of_ranks)

    def _baselines(self, responses: Responses, rows: Rows) -> torch.Tensor:
        """[b] float32: the shaped score of the greedy response to each row's prompt."""
        greedy = responses.greedy
        indices = torch.tensor([one.prompt_index for one in greedy], dtype=torch.int64)
        graded = responses.greedy_scoring.graded()
        scores = self._scores(graded, self.exchange.share(nums_scores_of(graded)))
        shaped, _ = shape_scores(
            summed(scores),
            torch.tensor([one.num_policy_tokens for one in greedy], dtype=torch.int64),
            indices,
            self.config.reward,
            RunningMoments(),
            max_response_length=self.config.rollout.max_response_length,
            group=self.exchange.group,
        )
        mine = dict(zip(indices.tolist(), shaped.tolist(), strict=True))
        baselines = {index: score for part in self.exchange.share(mine) for index, score in part.items()}
        return torch.tensor([baselines[prompt] for prompt in rows.prompt_ids.tolist()], dtype=torch.float32)


def _engine_metrics(use: Use) -> dict[str, Metric]:
    """This rank's part of the metrics of all engines."""
    if not use.prompt_tokens:
        return {}
    return {
        "rollout/running_requests": Metric((use.sequence_seconds, use.seconds), "mean"),
        "rollout/cached_prompt_frac": Metric((use.cached_tokens, use.prompt_tokens), "mean"),
    }


def raise_if_interrupted(exchange: Exchange) -> None:
    """All ranks together.

    Raises:
        Interrupted: on all ranks, if any has a reason to end.
    """
    reasons = [reason for reason in exchange.share(INTERRUPTION.reason) if reason]
    if reasons:
        raise Interrupted(reasons[0])
