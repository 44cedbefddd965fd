"""Scores of a reward model that the run loads: one of the forward passes of a step, over conversations of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows, is_within
from megappo.config.schema import Config
from megappo.data.conversations import Conversation, Conversations
from megappo.data.prompts import PromptDataset
from megappo.models.megatron_engine import Outputs
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import integers, sample_rows
from megappo.rollouts.step_responses import StepResponses
from megappo.runtime.heartbeat import heartbeat
from megappo.trainer.component_batch import OF_IMAGES, Component, ComponentBatch
from megappo.trainer.models import Phases
from megappo.weights.load import critic_architecture

TOKEN_SCORES = "reward_model_token_scores"


@dataclass
class ConversationBatch:
    """Conversations at the reward model's shards.

    Attributes:
        owned: the conversations of this rank's rows, as rows without fields.
        conversations: the same, before they became rows.
    """

    shard: ComponentBatch
    owned: Batch
    conversations: Sequence[Conversation]


class ResponseScorer:
    """Scores responses by a frozen model. All ranks call every method together.

    Args:
        component: the model, on the ranks that have it.
        dataset: data set of the prompts that steps train on; None in a run that only evaluates.
        tokenizer: the actor's; no other thread may use it.
    Raises:
        ConfigError: see `Conversations`.
    """

    def __init__(
        self,
        config: Config,
        component: Component,
        dataset: PromptDataset | None,
        tokenizer: PreTrainedTokenizerBase,
        exchange: Exchange,
    ):
        self._config = config
        self._component = component
        self._dataset = dataset
        self._exchange = exchange
        self._architecture = critic_architecture(str(config.reward_model.model_path))
        self._conversations = Conversations(config, self._architecture, tokenizer)

    def scatter(
        self,
        batch: Batch,
        responses: StepResponses | Responses | None,
        dataset: PromptDataset | None = None,
    ) -> ConversationBatch:
        """Bring the conversations of rows to the model's shards.

        Args:
            batch: rows with their tokens, at their owners.
            responses: have the rows' prompts by their prompt_ids; None if the rows are recorded.
            dataset: data set of the prompts; None: the training prompts.
        Raises:
            ConfigError: see `Conversations.of`.
        """
        rows = batch.rows
        dataset = dataset or self._dataset
        starts = rows.prompt_lengths.tolist()
        prompt_ids = rows.prompt_ids.tolist()
        are_truncated = rows.fields["truncated"].bool().tolist()
        conversations = []
        for row, tokens in enumerate(rows.sequences):
            heartbeat.beat()
            content = ""
            if self._conversations.are_rendered:
                content = dataset.content_at(responses.prompts[prompt_ids[row]].index)
            one = self._conversations.of(tokens.tolist(), starts[row], content, is_truncated=are_truncated[row])
            conversations.append(one)
        owned = self._exchange.number(_rows(rows, conversations))
        shard = self._component.scatter(owned)
        owned = replace(owned, rows=replace(owned.rows, fields={}))  # as wide as this rank's longest, not the step's
        return ConversationBatch(shard, owned, conversations)

    def forward(self, scattered: ConversationBatch, phase: Phases) -> Outputs:
        """Return the model's outputs for the conversations here; waits for no other component."""
        with phase("reward_model"):
            return scattered.shard.forward()

    def add_scores(
        self,
        batch: Batch,
        scattered: ConversationBatch,
        outputs: Outputs,
    ) -> Batch:
        """Return the rows with `reward_model_scores`, and with scores that include them; scores of steps are on
        tokens."""
        token_scores = self._token_scores(batch.rows, scattered, outputs)
        weight = self._config.reward_model.weight
        scores = token_scores.sum(dim=1)
        fields = dict(batch.rows.fields)
        if self._config.reward.weights:
            by_function = fields.get("score_components", fields["scores"][:, None])
            fields["score_components"] = torch.cat([by_function, weight * scores[:, None]], dim=1)
        fields |= {"reward_model_scores": scores, "scores": fields["scores"] + weight * scores}
        if self._architecture.scores_steps:
            fields["turn_rewards"] = fields.get("turn_rewards", 0.0) + weight * token_scores
        return replace(batch, rows=replace(batch.rows, fields=fields))

    def grade(self, responses: Responses, dataset: PromptDataset, phase: Phases) -> None:
        """Add the model's scores to the grades of held-out responses."""
        responses.fill_grades()
        batch = self._exchange.number(sample_rows(responses.samples, prompts=responses.prompts))
        scattered = self.scatter(batch, responses, dataset)
        scores = self._token_scores(batch.rows, scattered, self.forward(scattered, phase)).sum(dim=1)
        for sample, score in zip(responses.samples, scores.tolist(), strict=True):
            weighted = self._config.reward_model.weight * score
            sample.grade = sample.grade._replace(scores=[*sample.grade.scores, weighted])

    def _token_scores(
        self,
        rows: Rows,
        scattered: ConversationBatch,
        outputs: Outputs,
    ) -> Tensor:
        """Return the scores of rows on the actor's tokens, [b, R]: of each step, or of the whole on the last token."""
        gathered = scattered.shard.gather(outputs, {"values": TOKEN_SCORES}, scattered.owned).rows.fields[TOKEN_SCORES]
        token_scores = torch.zeros(len(rows), rows.max_response_length)
        for row, (_, steps) in enumerate(scattered.conversations):
            first = steps[0][0]
            for place, actors_place in steps:
                token_scores[row, actors_place] += gathered[row, place - first]
        return token_scores


class NoResponseScorer:
    """Null object with the methods of ResponseScorer that a step calls."""

    def scatter(self, *unused: object) -> None:
        """Do nothing: there is nothing to score."""

    def forward(self, *unused: object) -> Outputs:
        """Return nothing."""
        return {}

    def add_scores(self, batch: Batch, *unused: object) -> Batch:
        """Return the rows as they are."""
        return batch


def _rows(rows: Rows, conversations: Sequence[Conversation]) -> Rows:
    """Return the conversations as rows of the same prompts.

    A value is read before each token of a response. So responses begin behind the first token that is scored, and a
    further token, which scores no longer depend on, ends them.
    """
    starts = []
    lengths = []
    tokens = []
    for read, steps in conversations:
        first_scored, _ = steps[0]
        starts.append(first_scored + 1)
        lengths.append(len(read) - first_scored)
        tokens += [*read, 0]
    response_lengths = integers(lengths)
    mask = is_within(response_lengths, max(lengths, default=0)).float()
    of_images = {name: rows.fields[name] for name in OF_IMAGES if name in rows.fields}
    return Rows(
        rows.ids,
        rows.prompt_ids,
        integers(starts),
        response_lengths,
        integers(tokens),
        {"response_mask": mask, **of_images},
    )
