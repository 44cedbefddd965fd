"""Episodes: the policy and an environment take turns. Many episodes run at once, each as a coroutine."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from megappo.config.schema import Config
from megappo.data.chat import Chat, PromptContent
from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.rollouts.conversation import Turn, TurnPlace, TurnTree
from megappo.rollouts.sample_rows import Ending, Sample, Segment
from megappo.userland.environments import Environment, Replacement, row_of
from megappo.userland.episode_pool import EpisodeLost, EpisodePool
from megappo.userland.grades import fits_float32
from megappo.userland.signatures import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RESETS = 3
"""Environments in a row that may be lost before their episode begins."""
Generate = Callable[[list[int], int], Awaitable[Generation]]
"""Generates a turn from the tokens before it and the number of tokens that it may have."""
Observation = Sequence[dict[str, str]]
"""Messages of an environment."""


class Transcript:
    """An episode's messages and turns, which follow each other.

    Args:
        limits: tokens that a segment may have after its prompt, and together with it.
    Attributes:
        place: the place of the next turn.
        last: the last turn.
    """

    def __init__(
        self,
        prompt: Prompt,
        chat: Chat,
        tokenizer: "PreTrainedTokenizerBase",
        limits: tuple[int, int],
    ):
        self._tree = TurnTree(chat, tokenizer)
        self._limits = limits
        raw = prompt.columns[PROMPTS]
        self._messages: PromptContent = raw if isinstance(raw, str) else list(raw)
        self._turns: list[Turn | None] = [] if isinstance(raw, str) else [None] * len(raw)
        self.place = TurnPlace((), prompt.tokens, prompt.text, hash(prompt.text))
        self.last: Turn | None = None

    @property
    def room(self) -> int:
        """Number of tokens that the policy may write now."""
        return self._tree.room(self.place, self._limits)

    @property
    def segments(self) -> list[Segment]:
        """The segments of the turns."""
        return self._tree.segments()

    def write(self, generation: Generation, number: int) -> Turn:
        """Add a turn of the policy. The first one continues an assistant message at the end of the prompt."""
        messages, begun = self._messages, ""
        if self.last is None and not isinstance(messages, str) and messages[-1]["role"] == "assistant":
            begun = messages.pop()["content"]
            self._turns.pop()
        self.last = self._tree.write(self.place, generation, number, begun)
        if isinstance(messages, str):
            self._messages = self.last.text
        else:
            messages.append({"role": "assistant", "content": self.last.content})
            self._turns.append(self.last)
        return self.last

    def observe(self, observation: Observation) -> bool:
        """Add an observation, or begin again with a `Replacement`; return whether there is room for another turn.

        Raises:
            ValueError: the template refuses the observation.
        """
        if isinstance(observation, Replacement):
            self._messages, self._turns = self._messages[:0], []
        if isinstance(self._messages, str):
            self._messages += "".join(message["content"] or "" for message in observation)
        else:
            self._messages += observation
            self._turns += [None] * len(observation)
        if observation or self.last:  # the prompt alone has its tokens
            self.place = self._tree.place(self._messages, self._turns, continues=self.last is None)
        return self.room > 0


class EpisodeRunner:
    """Plays episodes from some prompts, in the environments of a pool.

    Args:
        prompts: prompts by their indices.
        longest_prompt: most tokens of a prompt.
        max_response_length: tokens of a segment after its prompt.
    Attributes:
        tokenizer: serves one thread at a time.
        limits: tokens that a segment may have after its prompt, and together with it.
        beginning: when an episode has begun, for messages.
    """

    beginning = "an episode began"

    def __init__(
        self,
        prompts: Sequence[Prompt] | Mapping[int, Prompt],
        pool: EpisodePool,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        max_response_length: int,
        longest_prompt: int,
    ):
        self.prompts = prompts
        self.pool = pool
        self.tokenizer = tokenizer
        self.limits = (max_response_length, longest_prompt + max_response_length)
        self.chat = Chat(tokenizer, config.data, pool.takes.tools)
        self.max_turns = config.rollout.max_turns

    async def play(self, prompt_index: int, sample_index: int, generate: Generate) -> Sample:
        """Play one episode from a prompt.

        Raises:
            EnvironmentFault: the code of the environment or agent failed.
        """
        for _ in range(MAX_RESETS):
            try:
                async with self.pool.session() as session:
                    return self._checked(await self._play_in(session, prompt_index, sample_index, generate))
            except EpisodeLost as error:
                lost = str(error)
        raise self.pool.fault(f"{lost}, {MAX_RESETS} times before {self.beginning}")

    async def _play_in(self, environment: Any, prompt_index: int, sample_index: int, generate: Generate) -> Sample:
        """Play an episode in its session.

        Raises:
            EpisodeLost: it was lost before it had begun.
            EnvironmentFault: as in `play`.
        """
        prompt = self.prompts[prompt_index]
        transcript = Transcript(prompt, self.chat, self.tokenizer, self.limits)
        observation = await environment.reset(row_of(prompt.columns, prompt.label))
        if not self._accepts(transcript, observation):
            length = f"{len(transcript.place.tokens)} tokens of {self.limits[1]}"
            raise self.pool.fault(f"leaves no room for a turn after reset ({length}): raise data.max_prompt_length")
        parts: Counter[str] = Counter()
        ending, lost = await self._take_turns(transcript, environment, generate, parts)
        return Sample(prompt_index, sample_index, transcript.segments, ending, parts, lost)

    def _checked(self, episode: Sample) -> Sample:
        """Return an episode whose warning names the code.

        Raises:
            EnvironmentFault: sums of its rewards may exceed a float32.
        """
        rewards = chain.from_iterable(segment.rewards for segment in episode.segments)
        if not fits_float32(sum(map(abs, rewards))):
            raise self.pool.fault("gave rewards whose sum exceeds a float32: scale them down")
        if episode.lost:
            episode.lost = f"{self.pool.kind} {self.pool.spec} {episode.lost}"
        return episode

    async def _take_turns(
        self,
        transcript: Transcript,
        environment: Environment,
        generate: Generate,
        parts: Counter[str],
    ) -> tuple[Ending, str]:
        """Take turns until the episode ends; return how it ended, and how the environment was lost."""
        for turn in range(1, self.max_turns + 1):
            generation = await generate(transcript.place.tokens, transcript.room)
            written = transcript.write(generation, turn)
            if generation.finish_reason == "length":
                return "length", ""
            message = {"role": "assistant", "content": written.content, "token_ids": generation.tokens}
            try:
                observation, written.reward, done, numbers = await environment.step(message)
            except EpisodeLost as error:
                return "lost", str(error)
            parts.update(numbers)
            if done:
                return "done", ""
            if turn < self.max_turns and not self._accepts(transcript, observation):
                return "length", ""
        return "turns", ""

    def _accepts(self, transcript: Transcript, observation: Observation) -> bool:
        try:
            return transcript.observe(observation)
        except ValueError as error:
            raise self.pool.fault(f"returned observation {observation!r:.200}: {error}") from error
