"""Samples: one response to one prompt each, or one episode. They become rows of a batch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megappo.architecture.architecture import Architecture
from megappo.batch.rows import Rows, padded
from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.userland.grades import Grade

Ending = Literal["stop", "done", "turns", "length", "lost"]
"""Ended by a stop token; an episode by its environment or by rollout.max_turns; without room for another token or turn;
by the loss of the environment."""
Prompts = Sequence[Prompt] | Mapping[int, Prompt]
"""Prompts by the `prompt_index` of samples."""
UNSCORED = Grade([], {})
"""The grade of a sample without a reward function."""


@dataclass
class Segment:
    """A prompt and the tokens after it. Each segment becomes a row.

    A response is one segment. An episode has one or several, see `TurnTree.segments`.

    Attributes:
        log_probs: None at tokens that an environment wrote.
        rewards, turns: reward and turn of each token, in an episode; turns count from 1 and are 0 at the environment's
            tokens.
        versions: version of the weights that wrote each token, if the engines sample ahead of training; None at tokens
            that an environment wrote.
        choices: choices of experts of the first tokens, see `Generation`; in an episode up to the last turn of the
            policy.
        parent: number of the turn that the prompt continues or rewrites, in an episode; 0 without one.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    choices: bytes = b""
    parent: int = 0

    @property
    def context(self) -> list[int]:
        """Prompt and tokens."""
        return self.prompt + self.tokens

    def write(self, generation: Generation, turn: int) -> None:
        """Append a turn of the policy."""
        self._append(generation.tokens, generation.log_probs, generation.versions, turn)
        self.choices += generation.choices[len(self.choices) :]  # the first were made when earlier turns were sampled

    def observe(self, tokens: list[int]) -> None:
        """Append an observation of the environment."""
        unwritten = [None] * len(tokens)
        self._append(tokens, unwritten, unwritten, 0)

    def reward(self, reward: float | Sequence[float]) -> None:
        """Set the reward of the latest turn: one number for its last token, or one per token."""
        if isinstance(reward, Sequence):
            self.rewards[len(self.rewards) - len(reward) :] = reward
        else:
            self.rewards[-1] = reward

    def _append(
        self,
        tokens: list[int],
        log_probs: Sequence[float | None],
        versions: Sequence[int | None],
        turn: int,
    ) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.rewards += [0.0] * len(tokens)
        self.turns += [turn] * len(tokens)
        self.versions += versions


@dataclass(frozen=True)
class AgentFacts:
    """An agent's episode in numbers.

    Attributes:
        num_superseded: turns that a retry of their request has replaced.
        waited_seconds: time in which the agent had no request in progress.
    """

    num_requests: int
    num_superseded: int
    waited_seconds: float


@dataclass
class Sample:
    """One response to one prompt, or one episode.

    Attributes:
        grade: filled by `Responses`; with an environment, the sum of its rewards is the first score.
        parts: sums of the numbers that the environment reported beside its rewards, by name; None of a response.
        lost: how the environment was lost; "" if it was not.
        is_masked: not trained on.
        agent: facts about an agent's episode.
    """

    prompt_index: int
    sample_index: int
    segments: Sequence[Segment]
    ending: Ending
    parts: Mapping[str, float] | None = None
    lost: str = ""
    grade: Grade = UNSCORED
    is_masked: bool = False
    agent: AgentFacts | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens of all segments, in order."""
        return list(chain.from_iterable(segment.tokens for segment in self.segments))

    @property
    def log_probs(self) -> list[float | None]:
        """Log-probs of `tokens`; None where an environment wrote the token."""
        return list(chain.from_iterable(segment.log_probs for segment in self.segments))

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(len(segment.log_probs) - segment.log_probs.count(None) for segment in self.segments)

    @property
    def num_turns(self) -> int:
        """Turns of the policy in an episode."""
        return max(chain.from_iterable(segment.turns for segment in self.segments), default=0)

    @property
    def is_truncated(self) -> bool:
        """True unless the policy ended the response, or the environment the episode."""
        return self.ending not in ("stop", "done")


def episode_turns(episode: Sample, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the turns of an episode, each with its text and reward: `turn` counts the policy's turns from 1, and is 0
    where the environment or agent wrote. The prompt of a further segment has its `SegmentPlace`, and turns of a branch
    have its `depth`. A response has no turns."""
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    turns: list[dict[str, Any]] = []
    for segment, place in zip(episode.segments, segment_places(episode.segments), strict=True):
        depth = {"depth": place.depth} if place.depth else {}
        if turns:  # the history was rewritten, or has branches
            turns.append({"turn": 0, "text": decode(segment.prompt), "reward": 0.0, **asdict(place)})
        for turn, own in groupby(zip(segment.turns, segment.tokens, segment.rewards, strict=False), itemgetter(0)):
            _, tokens, rewards = zip(*own, strict=True)
            turns.append({"turn": turn, "text": decode(tokens), "reward": sum(rewards), **depth})
    return turns


@dataclass(frozen=True)
class SegmentPlace:
    """The place of a segment in its episode, for people.

    Attributes:
        begins: "branch" if turns beside it continue what it begins after, else "new prompt".
        follows: the turn after which it begins: its parent, or, without one, the last turn before it.
        depth: number of branches that it is in.
    """

    begins: str = ""
    follows: int = 0
    depth: int = 0


def segment_places(segments: Sequence[Segment]) -> list[SegmentPlace]:
    """Return the places of an episode's segments, which are in the order of their first turns."""
    places = [SegmentPlace()]
    numbers = [sorted({*segment.turns} - {0}) for segment in segments]
    for segment, (first, *_) in zip(segments[1:], numbers[1:], strict=True):
        earlier = list(zip(places, numbers, strict=False))
        beside = [one for one in earlier if one[1][-1] > (segment.parent or first)]
        base, turns = min(beside, key=lambda one: one[0].depth) if beside else max(earlier, key=lambda one: one[1][-1])
        follows = segment.parent or max(turn for turn in turns if turn < first)
        places.append(SegmentPlace("branch" if beside else "new prompt", follows, base.depth + bool(beside)))
    return places


def shown_facts(one: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what people are shown of a sample beside texts and score."""
    superseded = {"superseded_turns": one.agent.num_superseded} if one.agent and one.agent.num_superseded else {}
    facts = {
        "finish_reason": one.ending,
        "parts": {**(one.parts or {}), **one.grade.parts, **superseded},
        "turns": episode_turns(one, tokenizer),
    }
    return {name: fact for name, fact in facts.items() if fact}


def response_sample(
    prompt_index: int,
    sample_index: int,
    prompt: list[int],
    response: Generation,
) -> Sample:
    """Return an engine's response to a prompt as a sample."""
    segment = Segment(
        prompt,
        tokens=response.tokens,
        log_probs=response.log_probs,
        versions=list(response.versions),
        choices=response.choices,
    )
    return Sample(prompt_index, sample_index, [segment], response.finish_reason)


def mask_truncated(samples: Sequence[Sample], *, compared: bool) -> None:
    """Mask the truncated samples.

    Args:
        compared: the samples of a prompt are compared, so a sample that remains alone is masked, too.
    """
    num_complete = Counter(one.prompt_index for one in samples if not one.is_truncated)
    for one in samples:
        one.is_masked = one.is_truncated or num_complete[one.prompt_index] <= compared


def sample_rows(
    samples: Sequence[Sample],
    *,
    episodes: bool = False,
    step: int | None = None,
    replayed: Architecture | None = None,
    prompts: Prompts | None = None,
) -> Rows:
    """Return a row for each segment, without scores.

    Args:
        prompts: prompts of the samples; None: the rows do not lead to their images.
        episodes: the run has an environment; the same on ranks without samples.
        step: trains on the rows; None where the engines do not sample ahead of training.
        replayed: the policy if its routing is replayed.
    """
    sample_of_row: list[Sample] = []
    numbers: list[int] = []
    segments: list[Segment] = []
    for one in samples:
        sample_of_row += [one] * len(one.segments)
        numbers += range(len(one.segments))
        segments += one.segments
    lengths = integers(len(segment.tokens) for segment in segments)
    log_probs = list(chain.from_iterable(segment.log_probs for segment in segments))
    is_policy = as_rows(floats(log_prob is not None for log_prob in log_probs), lengths)
    is_trained = floats(not one.is_masked for one in sample_of_row)
    fields = {
        "response_mask": is_policy * is_trained[:, None],
        "rollout_log_probs": as_rows(floats(log_prob or 0.0 for log_prob in log_probs), lengths),
        "truncated": floats(one.is_truncated for one in sample_of_row),
    }
    if episodes:
        turns = floats(chain.from_iterable(segment.turns for segment in segments))
        rewards = floats(chain.from_iterable(segment.rewards for segment in segments))
        fields["episodes"] = floats(one.sample_index for one in sample_of_row)
        fields["segments"] = floats(numbers)
        fields["turns"] = as_rows(turns, lengths)
        fields["turn_rewards"] = as_rows(rewards, lengths)
    if step is not None:
        versions = chain.from_iterable(segment.versions for segment in segments)
        ages = floats(0 if version is None else step - 1 - version for version in versions)
        fields["staleness"] = as_rows(ages, lengths)
    if prompts is not None:
        records = [prompts[one.prompt_index].record for one in sample_of_row]
        fields["prompt_records"] = torch.tensor(records, dtype=torch.float32).view(-1, 2)
    if replayed:
        fields["expert_choices"] = _expert_choices(segments, replayed.choice_bytes)
    max_segments = max(numbers, default=0) + 1
    ids = [one.sample_index * max_segments + number for one, number in zip(sample_of_row, numbers, strict=True)]
    return Rows(
        ids=integers(ids),
        prompt_ids=integers(one.prompt_index for one in sample_of_row),
        prompt_lengths=integers(len(segment.prompt) for segment in segments),
        response_lengths=lengths,
        input_ids=integers(chain.from_iterable(segment.context for segment in segments)),
        fields=fields,
    )


def _expert_choices(segments: Sequence[Segment], choice_bytes: int) -> torch.Tensor:
    """Return the choices of each token of the segments, [T, choice_bytes] uint8, 0 after the last turn."""
    choices = bytearray()
    for segment in segments:
        choices += segment.choices.ljust(len(segment.context) * choice_bytes, b"\0")
    return torch.from_numpy(np.frombuffer(choices, np.uint8)).view(-1, choice_bytes)


def as_rows(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the concatenated values of all rows as [b, longest] float32, padded with 0."""
    return padded(values, lengths, int(lengths.max()) if len(lengths) else 0)


def floats(values: Iterable[float]) -> torch.Tensor:
    """Return numbers as a float32 tensor."""
    return torch.from_numpy(np.fromiter(values, dtype=np.float32))  # torch.tensor takes four times as long


def integers(values: Iterable[int]) -> torch.Tensor:
    """Return numbers as an int64 tensor."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64))
