"""What the policy reads and writes in an episode: token ids, of which those that it wrote are kept as they are.

Messages become tokens by the chat template. Where its rendering of the whole conversation begins, to the character,
with what the policy has before it, only the rest is tokenised, and appended. Where it does not (templates that drop
earlier thoughts, as Qwen3's, or change what was written), a new segment begins, with the rendering as its prompt; the
one before stays as it was sampled. A prompt that is a text has no template: observations are appended as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import encode
from megappo.engines.client import Generation
from megappo.userland.forms import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, str]]


@dataclass
class Segment:
    """A prompt and what follows it, up to where the history is rewritten.

    Attributes:
        text: of the prompt and all tokens.
        log_probs: None at tokens of the environment.
        rewards, turns: of each token; turns count from 1 over the episode, 0 at tokens of the environment.
    """

    prompt: list[int]
    text: str
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """All tokens."""
        return self.prompt + self.tokens

    def write(self, generation: Generation, text: str, turn: int) -> None:
        """Append what the policy wrote."""
        self._append(generation.tokens, text, generation.log_probs, turn)

    def observe(self, tokens: list[int], text: str) -> None:
        """Append what the environment says."""
        self._append(tokens, text, [None] * len(tokens), 0)

    def reward(self, reward: float | Sequence[float]) -> None:
        """Of the turn that was written last: on its last token, or on each."""
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


class Conversation:
    """An episode's messages and segments.

    Args:
        room: tokens that a segment may have behind its prompt, and with it.
    """

    def __init__(
        self,
        prompt: Prompt,
        chat: Chat,
        tokenizer: "PreTrainedTokenizerBase",
        room: tuple[int, int],
    ):
        self.chat, self.tokenizer, self._room = chat, tokenizer, room
        raw = prompt.columns[PROMPTS]
        self.messages: list[dict[str, Any]] | None = None if isinstance(raw, str) else list(raw)
        self.segments = [Segment(prompt.tokens, prompt.text)]

    @property
    def room(self) -> int:
        """How many tokens the policy may write now."""
        return self._room_of(self.segments[-1])

    def _room_of(self, segment: Segment, further: int = 0) -> int:
        behind, whole = self._room
        return min(behind - len(segment.tokens), whole - len(segment.context)) - further

    def begin(self, observation: Messages) -> bool:
        """What the environment says first belongs to the prompt; whether there is room to answer.

        Raises:
            ValueError: the template refuses it.
        """
        if observation:
            if self.messages is not None:
                self.messages += observation
                self.segments = [self._segment(self.chat.text_of(self.messages))]
            else:
                [first], text = self.segments, _text(observation)
                self.segments = [Segment(first.prompt + self._encoded(text), first.text + text)]
        return self.room > 0

    def write(self, generation: Generation, turn: int) -> str:
        """Keep what the policy wrote; its text, without the special token that ends a turn. The first turn goes on with
        an assistant's message that the prompt ends with."""
        tokens = generation.tokens
        self.segments[-1].write(generation, self._decoded(tokens), turn)
        ends = bool(tokens) and not self.tokenizer.decode(tokens[-1:], skip_special_tokens=True)
        text = self._decoded(tokens[:-1] if ends else tokens)
        if self.messages is not None:
            goes_on = turn == 1 and self.messages[-1]["role"] == "assistant"
            before = self.messages.pop()["content"] if goes_on else ""
            self.messages.append({"role": "assistant", "content": before + text})
        return text

    def observe(self, observation: Messages) -> bool:
        """Have the environment's answer before the policy; False, and nothing changed, where it has no room.

        Raises:
            ValueError: the template refuses it.
        """
        segment = self.segments[-1]
        if self.messages is None:
            text = _text(observation)
        else:
            self.messages += observation
            rendered = self.chat.text_of(self.messages, continues=False)
            if not rendered.startswith(segment.text):
                new = self._segment(rendered)
                self.segments += [new] if (fits := self._room_of(new) > 0) else []
                return fits
            text = rendered[len(segment.text) :]
        tokens = self._encoded(text)
        if fits := self._room_of(segment, len(tokens)) > 0:
            segment.observe(tokens, text)
        return fits

    def _segment(self, text: str) -> Segment:
        return Segment(self._encoded(text), text)

    def _encoded(self, text: str) -> list[int]:
        [tokens] = encode([text], self.tokenizer, special=False)
        return tokens

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _text(observation: Messages) -> str:
    return "".join(message["content"] for message in observation)
