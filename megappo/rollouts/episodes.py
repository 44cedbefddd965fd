"""Episodes: the policy and an environment by turns. Any number at once, each a coroutine beside the others."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megappo.config.schema import Config
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.engines.client import Generation
from megappo.rollouts.conversation import Conversation, Messages, Segment
from megappo.userland.environment_pool import Environment, EnvironmentPool
from megappo.userland.environment_process import EnvironmentFault, EpisodeLost
from megappo.userland.forms import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RESETS = 3
"""How many environments in a row may be lost before their episode has begun."""
Ending = Literal["done", "turns", "length", "lost"]
"""The environment's word; rollout.max_turns; no room for another turn; the environment is lost."""
Generate = Callable[[list[int], int], Awaitable[Generation]]
"""Of the tokens before, and how many may follow."""


@dataclass(frozen=True)
class Episode:
    """One that has ended, with at least one turn.

    Attributes:
        parts: the sums of what the environment told beside its rewards, by name.
        lost: how its environment was, where it was.
    """

    segments: Sequence[Segment]
    ending: Ending
    parts: Mapping[str, float]
    lost: str = ""

    @property
    def num_turns(self) -> int:
        """Those that the policy wrote."""
        return max(self.segments[-1].turns)


@dataclass(frozen=True)
class Episodes:
    """Plays the episodes of some prompts: a `sampler.Play`.

    Attributes:
        room: tokens of a segment, behind its prompt, and with it.
    """

    prompts: Sequence[Prompt]
    environments: EnvironmentPool
    chat: Chat
    tokenizer: "PreTrainedTokenizerBase"
    room: tuple[int, int]
    max_turns: int

    def open(self) -> AbstractAsyncContextManager[None]:
        """Inside, the running event loop may play them."""
        return self.environments.open()

    async def __call__(self, prompt_index: int, generate: Generate) -> Episode:
        """An episode that begins with a prompt.

        Raises:
            EnvironmentFault: of the environment's code.
        """
        prompt = self.prompts[prompt_index]
        for left in reversed(range(MAX_RESETS)):
            async with self.environments.environment() as environment:
                conversation = Conversation(prompt, self.chat, self.tokenizer, self.room)
                try:
                    observation = await environment.reset(row_of(prompt))
                except EpisodeLost as error:
                    if not left:
                        raise self._fault(f"{error}, {MAX_RESETS} times before an episode began") from error
                    continue
                if not self._heard(conversation.begin, observation):
                    found = f"{len(conversation.segments[0].prompt)} tokens of {self.room[1]}"
                    raise self._fault(f"leaves no room for a turn after reset ({found}): raise data.max_prompt_length")
                parts: Counter[str] = Counter()
                try:
                    ending = await self._turns(conversation, environment, generate, parts)
                except EpisodeLost as error:
                    return Episode(conversation.segments, "lost", parts, str(error))
                return Episode(conversation.segments, ending, parts)
        raise AssertionError

    async def _turns(
        self,
        conversation: Conversation,
        environment: Environment,
        generate: Generate,
        parts: Counter[str],
    ) -> Ending:
        for turn in range(1, self.max_turns + 1):
            segment = conversation.segments[-1]
            generation = await generate(segment.context, conversation.room)
            text = conversation.write(generation, turn)
            if generation.finish_reason == "length":
                return "length"
            message = {"role": "assistant", "content": text, "token_ids": generation.tokens}
            observation, reward, done, told = await environment.step(message)
            segment.reward(reward)
            for name, number in told.items():
                parts[name] += number
            if done:
                return "done"
            if turn < self.max_turns and not self._heard(conversation.observe, observation):
                return "length"
        return "turns"

    def _heard(self, take: Callable[[Messages], bool], observation: Messages) -> bool:
        try:
            return take(observation)
        except ValueError as error:
            raise self._fault(f"said {observation!r:.200}: {error}") from error

    def _fault(self, found: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self.environments.spec} {found}")


def episodes_of(
    prompts: Sequence[Prompt],
    environments: EnvironmentPool,
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    max_response_length: int,
) -> Episodes:
    """Those of some prompts, as the config says; `tokenizer` serves one thread at a time."""
    longest = max([config.data.max_prompt_length, *(len(prompt.tokens) for prompt in prompts)])
    room = (max_response_length, longest + max_response_length)
    chat = Chat(tokenizer, config.data, environments.takes.tools)
    return Episodes(prompts, environments, chat, tokenizer, room, config.rollout.max_turns)


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What the environment gets of the record."""
    columns = {name: value for name, value in prompt.columns.items() if name != PROMPTS}
    return columns | {"prompt": prompt.columns[PROMPTS], "label": prompt.label}
