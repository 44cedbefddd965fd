"""Episodes: the policy and an environment take turns. Many episodes run at once, each as a coroutine.

Tokens that the policy wrote are kept as sampled. Messages become text by the chat template. If the new text of the
conversation begins, to the character, with the text that the policy has seen, the tokens that the rest adds to the
text before it are appended. If it does not (templates that drop earlier thoughts, as Qwen3's, or change the response),
or a token would hold the end of one and the beginning of the other, a new segment begins with the new text as its
prompt. A prompt that is plain text has no template: observations are appended as they are.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megappo.config.schema import Config
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import RenderedText, added_tokens, encode, with_context
from megappo.engines.generations import Generation
from megappo.rollouts.sample_rows import Ending, Sample, Segment
from megappo.userland.environments import Environment, EnvironmentPool, row_of
from megappo.userland.episode_pool import EnvironmentFault, EpisodeLost
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
    """An episode's messages and segments.

    Args:
        limits: tokens that a segment may have after its prompt, and together with it.
    """

    def __init__(
        self,
        prompt: Prompt,
        chat: Chat,
        tokenizer: "PreTrainedTokenizerBase",
        limits: tuple[int, int],
    ):
        self._chat = chat
        self._tokenizer = tokenizer
        self._limits = limits
        raw = prompt.columns[PROMPTS]
        self._messages: list[dict[str, Any]] | None = None if isinstance(raw, str) else list(raw)
        self.segments = [Segment(prompt.tokens, prompt.text)]

    @property
    def room(self) -> int:
        """Number of tokens that the policy may write now."""
        return self._room_in(self.segments[-1])

    def _room_in(self, segment: Segment) -> int:
        after_prompt, total = self._limits
        num_tokens = len(segment.tokens)
        return min(after_prompt - num_tokens, total - len(segment.prompt) - num_tokens)

    def begin(self, observation: Observation) -> bool:
        """Add the environment's first observation to the prompt; return whether there is room for a turn.

        Raises:
            ValueError: the template refuses the observation.
        """
        if observation:
            self.segments = [self._segment(self._grown(observation, continues=True))]
        return self.room > 0

    def write(self, generation: Generation, turn: int) -> str:
        """Append a turn of the policy; return its text without the special token that ends it. The first turn continues
        an assistant message at the end of the prompt."""
        tokens = generation.tokens
        self.segments[-1].write(generation, self._tokenizer.decode(tokens), turn)
        has_end = bool(tokens) and not self._tokenizer.decode(tokens[-1:], skip_special_tokens=True)
        text = self._tokenizer.decode(tokens[:-1] if has_end else tokens)
        if self._messages is not None:
            is_continued = turn == 1 and self._messages[-1]["role"] == "assistant"
            before = self._messages.pop()["content"] if is_continued else ""
            self._messages.append({"role": "assistant", "content": before + text})
        return text

    def observe(self, observation: Observation) -> bool:
        """Append an observation; return whether there is room for another turn. Without room, no token is added.

        Raises:
            ValueError: the template refuses the observation.
        """
        segment = self.segments[-1]
        text = self._grown(observation, continues=False)
        tokens = self._added(segment.text, text)
        if tokens is None:
            new = self._segment(text)
            has_room = self._room_in(new) > 0
            self.segments += [new] if has_room else []
            return has_room
        has_room = self._room_in(segment) > len(tokens)
        if has_room:
            segment.observe(tokens, text[len(segment.text) :])
        return has_room

    def _grown(self, observation: Observation, *, continues: bool) -> str:
        """Add an observation to the conversation; return the text of the whole."""
        if self._messages is None:
            return self.segments[-1].text + "".join(message["content"] or "" for message in observation)
        self._messages += observation
        return self._chat.text_of(self._messages, continues=continues)

    def _added(self, before: str, text: str) -> list[int] | None:
        """Return the tokens that a text has after the tokens of its beginning; None if it begins otherwise."""
        if not text.startswith(before):
            return None
        texts = with_context(before, text[len(before) :])
        try:
            return added_tokens(*encode(texts, self._tokenizer), self._tokenizer)
        except ValueError:
            return None

    def _segment(self, text: str) -> Segment:
        [tokens] = encode([RenderedText(text, is_chat=self._messages is not None)], self._tokenizer)
        return Segment(tokens, text)


class EpisodeRunner:
    """Plays episodes from some prompts, in the environments of a pool.

    Args:
        prompts: prompts by their indices.
        longest_prompt: most tokens of a prompt.
        tokenizer: serves one thread at a time.
        max_response_length: tokens of a segment after its prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt] | Mapping[int, Prompt],
        environments: EnvironmentPool,
        config: Config,
        tokenizer: "PreTrainedTokenizerBase",
        max_response_length: int,
        longest_prompt: int,
    ):
        self._prompts = prompts
        self._environments = environments
        self._tokenizer = tokenizer
        self._limits = (max_response_length, longest_prompt + max_response_length)
        self._chat = Chat(tokenizer, config.data, environments.takes.tools)
        self._max_turns = config.rollout.max_turns

    async def play(self, prompt_index: int, sample_index: int, generate: Generate) -> Sample:
        """Play one episode from a prompt.

        Raises:
            EnvironmentFault: the environment's code failed.
        """
        prompt = self._prompts[prompt_index]
        for _ in range(MAX_RESETS):
            async with self._environments.environment() as environment:
                transcript = Transcript(prompt, self._chat, self._tokenizer, self._limits)
                try:
                    observation = await environment.reset(row_of(prompt.columns, prompt.label))
                except EpisodeLost as error:
                    lost = str(error)
                    continue
                if not self._accepts(transcript.begin, observation):
                    length = f"{len(transcript.segments[0].prompt)} tokens of {self._limits[1]}"
                    raise self._fault(f"leaves no room for a turn after reset ({length}): raise data.max_prompt_length")
                parts: Counter[str] = Counter()
                ending, lost = await self._take_turns(transcript, environment, generate, parts)
                return Sample(prompt_index, sample_index, transcript.segments, ending, parts, lost)
        raise self._fault(f"{lost}, {MAX_RESETS} times before an episode began")

    async def _take_turns(
        self,
        transcript: Transcript,
        environment: Environment,
        generate: Generate,
        parts: Counter[str],
    ) -> tuple[Ending, str]:
        """Take turns until the episode ends; return how it ended, and how the environment was lost."""
        for turn in range(1, self._max_turns + 1):
            generation = await generate(transcript.segments[-1].context, transcript.room)
            text = transcript.write(generation, turn)
            if generation.finish_reason == "length":
                return "length", ""
            message = {"role": "assistant", "content": text, "token_ids": generation.tokens}
            segment = transcript.segments[-1]
            try:
                observation, reward, done, numbers = await environment.step(message)
            except EpisodeLost as error:
                return "lost", str(error)
            segment.reward(reward)
            parts.update(numbers)
            if done:
                return "done", ""
            if turn < self._max_turns and not self._accepts(transcript.observe, observation):
                return "length", ""
        return "turns", ""

    def _accepts(self, add: Callable[[Observation], bool], observation: Observation) -> bool:
        try:
            return add(observation)
        except ValueError as error:
            raise self._fault(f"returned observation {observation!r:.200}: {error}") from error

    def _fault(self, reason: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self._environments.spec} {reason}")
