"""The tokens of an episode: what the policy reads and writes. Tokens that the policy wrote are kept as sampled.

Messages become text by the chat template. If the new text of the conversation begins, to the character, with the text
that the policy has seen, only the rest is tokenized and appended. If it does not (templates that drop earlier thoughts,
as Qwen3's, or change the response), a new segment begins with the new text as its prompt; the segment before stays as
sampled. A prompt that is plain text has no template: observations are appended as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import encode
from megappo.engines.client import Generation
from megappo.userland.signatures import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Observation = Sequence[dict[str, str]]
"""Messages of an environment."""


@dataclass
class Segment:
    """A prompt and the tokens after it, up to where the template rewrites the history.

    Attributes:
        text: of the prompt and all tokens.
        log_probs: None at tokens of the environment.
        rewards, turns: per token; turns count from 1 over the episode and are 0 at tokens of the environment.
    """

    prompt: list[int]
    text: str
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """Prompt and tokens."""
        return self.prompt + self.tokens

    def write(self, generation: Generation, text: str, turn: int) -> None:
        """Append a turn of the policy."""
        self._append(generation.tokens, text, generation.log_probs, turn)

    def observe(self, tokens: list[int], text: str) -> None:
        """Append an observation of the environment."""
        self._append(tokens, text, [None] * len(tokens), 0)

    def reward(self, reward: float | Sequence[float]) -> None:
        """Set the reward of the latest turn: one number for its last token, or one per token."""
        if isinstance(reward, Sequence):
            self.rewards[len(self.rewards) - len(reward) :] = reward
        else:
            self.rewards[-1] = reward

    def _append(self, tokens: list[int], text: str, log_probs: Sequence[float | None], turn: int) -> None:
        self.tokens += tokens
        self.text += text
        self.log_probs += log_probs
        self.rewards += [0.0] * len(tokens)
        self.turns += [turn] * len(tokens)


class Transcript:
    """An episode's messages and segments.

    Args:
        limits: tokens that a segment may have after its prompt, and together with it.
    """

    def __init__(self, prompt: Prompt, chat: Chat, tokenizer: "PreTrainedTokenizerBase", limits: tuple[int, int]):
        self._chat, self._tokenizer, self._limits = chat, tokenizer, limits
        raw = prompt.columns[PROMPTS]
        self._messages: list[dict[str, Any]] | None = None if isinstance(raw, str) else list(raw)
        self.segments = [Segment(prompt.tokens, prompt.text)]

    @property
    def room(self) -> int:
        """Number of tokens that the policy may write now."""
        return self._room_in(self.segments[-1])

    def _room_in(self, segment: Segment) -> int:
        after_prompt, total = self._limits
        return min(after_prompt - len(segment.tokens), total - len(segment.context))

    def begin(self, observation: Observation) -> bool:
        """Add the environment's first observation to the prompt; return whether there is room for a turn.

        Raises:
            ValueError: the template refuses the observation.
        """
        if observation and self._messages is not None:
            self._messages += observation
            self.segments = [self._new_segment(self._chat.text_of(self._messages))]
        elif observation:
            text, first = _text(observation), self.segments[0]
            self.segments = [Segment(first.prompt + self._encode(text), first.text + text)]
        return self.room > 0

    def write(self, generation: Generation, turn: int) -> str:
        """Append a turn of the policy; return its text without the special token that ends it. The first turn continues
        an assistant message at the end of the prompt."""
        tokens = generation.tokens
        self.segments[-1].write(generation, self._decode(tokens), turn)
        has_end = bool(tokens) and not self._tokenizer.decode(tokens[-1:], skip_special_tokens=True)
        text = self._decode(tokens[:-1] if has_end else tokens)
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
        if self._messages is None:
            text = _text(observation)
        else:
            self._messages += observation
            conversation = self._chat.text_of(self._messages, continues=False)
            if not conversation.startswith(segment.text):
                new = self._new_segment(conversation)
                has_room = self._room_in(new) > 0
                self.segments += [new] if has_room else []
                return has_room
            text = conversation[len(segment.text) :]
        tokens = self._encode(text)
        has_room = self._room_in(segment) > len(tokens)
        if has_room:
            segment.observe(tokens, text)
        return has_room

    def _new_segment(self, text: str) -> Segment:
        return Segment(self._encode(text), text)

    def _encode(self, text: str) -> list[int]:
        [tokens] = encode([text], self._tokenizer, special=False)
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _text(observation: Observation) -> str:
    return "".join(message["content"] for message in observation)
