"""Episodes: the policy and an environment take turns. Many episodes run at once, each as a coroutine."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megappo.config.schema import Config
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.engines.client import Generation
from megappo.rollouts.transcript import Observation, Segment, Transcript
from megappo.userland.environments import Environment, EnvironmentFault, EnvironmentPool, EpisodeLost
from megappo.userland.signatures import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RESETS = 3
"""Environments in a row that may be lost before their episode begins."""
Ending = Literal["done", "turns", "length", "lost"]
"""Ended by the environment; by rollout.max_turns; without room for another turn; by the loss of the environment."""
Generate = Callable[[list[int], int], Awaitable[Generation]]
"""Generates a turn from the tokens before it and the number of tokens that it may have."""


@dataclass(frozen=True)
class Episode:
    """A finished episode of at least one turn.

    Attributes:
        parts: sums of the numbers that the environment reported beside its rewards, by name.
        lost: how the environment was lost; "" if it was not.
    """

    segments: Sequence[Segment]
    ending: Ending
    parts: Mapping[str, float]
    lost: str = ""

    @property
    def num_turns(self) -> int:
        """Turns that the policy wrote."""
        return max(self.segments[-1].turns)


class EpisodeRunner:
    """Plays episodes from some prompts, in the environments of a pool.

    Args:
        tokenizer: serves one thread at a time.
        max_response_length: tokens of a segment after its prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        environments: EnvironmentPool,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        max_response_length: int,
    ):
        self._prompts, self._environments, self._tokenizer = prompts, environments, tokenizer
        longest = max([config.data.max_prompt_length, *(len(prompt.tokens) for prompt in prompts)])
        self._limits = (max_response_length, longest + max_response_length)
        self._chat = Chat(tokenizer, config.data, environments.takes.tools)
        self._max_turns = config.rollout.max_turns

    async def play(self, prompt_index: int, generate: Generate) -> Episode:
        """Play one episode from a prompt.

        Raises:
            EnvironmentFault: the environment's code failed.
        """
        prompt = self._prompts[prompt_index]
        for attempt in range(1, MAX_RESETS + 1):
            async with self._environments.environment() as environment:
                transcript = Transcript(prompt, self._chat, self._tokenizer, self._limits)
                try:
                    observation = await environment.reset(row_of(prompt))
                except EpisodeLost as error:
                    if attempt == MAX_RESETS:
                        raise self._fault(f"{error}, {MAX_RESETS} times before an episode began") from error
                    continue
                if not self._accepts(transcript.begin, observation):
                    found = f"{len(transcript.segments[0].prompt)} tokens of {self._limits[1]}"
                    raise self._fault(f"leaves no room for a turn after reset ({found}): raise data.max_prompt_length")
                return await self._take_turns(transcript, environment, generate)
        raise AssertionError

    async def _take_turns(self, transcript: Transcript, environment: Environment, generate: Generate) -> Episode:
        parts: Counter[str] = Counter()

        def ended(ending: Ending, lost: str = "") -> Episode:
            return Episode(transcript.segments, ending, parts, lost)

        for turn in range(1, self._max_turns + 1):
            segment = transcript.segments[-1]
            generation = await generate(segment.context, transcript.room)
            text = transcript.write(generation, turn)
            if generation.finish_reason == "length":
                return ended("length")
            message = {"role": "assistant", "content": text, "token_ids": generation.tokens}
            try:
                observation, reward, done, numbers = await environment.step(message)
            except EpisodeLost as error:
                return ended("lost", str(error))
            segment.reward(reward)
            parts.update(numbers)
            if done:
                return ended("done")
            if turn < self._max_turns and not self._accepts(transcript.observe, observation):
                return ended("length")
        return ended("turns")

    def _accepts(self, add: Callable[[Observation], bool], observation: Observation) -> bool:
        try:
            return add(observation)
        except ValueError as error:
            raise self._fault(f"returned observation {observation!r:.200}: {error}") from error

    def _fault(self, found: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self._environments.spec} {found}")


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt's record that an environment is reset with."""
    columns = {name: value for name, value in prompt.columns.items() if name != PROMPTS}
    return columns | {"prompt": prompt.columns[PROMPTS], "label": prompt.label}
