"""Conversations as a reward model reads them: in the actor's tokens, or rendered by its own chat template and tokenized
by its own tokenizer."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError, shorten
from megappo.config.schema import Config
from megappo.data.chat import PromptContent
from megappo.data.tokenizer import completing_tokens, load_tokenizer, one_bos, padding_token
from megappo.placement.components import REWARD_MODEL_KEY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation(NamedTuple):
    """A prompt with its response, as a reward model reads it.

    Attributes:
        steps: positions of the tokens at which it is scored, ascending, in `tokens` and in the actor's response.
    """

    tokens: list[int]
    steps: Sequence[tuple[int, int]]


class Conversations:
    """Makes conversations of the actor's tokens.

    Args:
        architecture: architecture of the reward model.
        tokenizer: the actor's; no other thread may use it.
    Attributes:
        are_rendered: they are rendered and tokenized again.
    Raises:
        ConfigError: the reward model's tokenizer or chat template cannot be used.
    """

    def __init__(
        self,
        config: Config,
        architecture: Architecture,
        tokenizer: "PreTrainedTokenizerBase",
    ):
        settings = config.reward_model
        self._folder = str(settings.model_path)
        self._separator = settings.step_separator
        self._max_tokens = settings.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
        self._architecture = architecture
        self._actors = tokenizer
        self._own = load_tokenizer(self._folder, REWARD_MODEL_KEY)
        # A language model's folder may leave it to the tokenizer, which training with adapters read, too.
        self._padding = padding_token(architecture, self._own) if settings.adapter else architecture.pad_token
        vocabulary = self._own.get_vocab()
        template = self._own.chat_template
        has_same_tokens = vocabulary == tokenizer.get_vocab()
        is_same = has_same_tokens and template == tokenizer.chat_template
        self.are_rendered = not is_same if settings.retokenize is None else settings.retokenize
        if not self.are_rendered and not has_same_tokens:
            raise self._error("the tokenizer has other tokens than the actor's: drop reward_model.retokenize false")
        if not self.are_rendered:
            return
        if config.replays:
            raise self._error(
                "conversations are rendered again, but trainer.replay_rollouts has tokens only: set "
                "reward_model.retokenize to false, or sample"
            )
        if read_architecture(config.model.path).vision is not None:
            raise self._error(
                "conversations are rendered again, which does not place images: name a reward model with the actor's "
                "tokens and chat template, or set reward_model.retokenize to false"
            )
        if max(vocabulary.values()) >= architecture.vocab_size:
            raise self._error(
                f"the tokenizer has token {max(vocabulary.values())}, but vocab_size is {architecture.vocab_size} in "
                "config.json: take both from the same model"
            )
        if template:
            self._rendered("A question", "An answer")

    def of(
        self,
        tokens: list[int],
        start: int,
        content: PromptContent,
        *,
        is_truncated: bool,
    ) -> Conversation:
        """Return a conversation; one that is scored as a whole ends before padding, as in transformers.

        Args:
            tokens: the actor's, of prompt and response.
            start: position of the response's first token.
            content: the prompt, read only if conversations are rendered.
            is_truncated: the actor did not end the response.
        Raises:
            ConfigError: the template drops the response, the model does not know a token, or there are too many.
        """
        written = tokens[start:]
        response = self._actors.decode(written, skip_special_tokens=True)
        ends = self._step_ends(response)
        actors_places = completing_tokens(written, ends, self._actors)
        places = [start + place for place in actors_places]
        if self.are_rendered:
            tokens, places = self._tokenized(content, response, ends, is_truncated=is_truncated)
        if len(tokens) >= self._max_tokens:  # one more is appended
            raise self._error(
                f"a conversation has {len(tokens)} tokens, and reward_model.max_tokens_per_micro_batch is "
                f"{self._max_tokens}: raise it above that, or lower rollout.max_response_length"
            )
        if max(tokens) >= self._architecture.vocab_size:
            raise self._error(
                f"a response has token {max(tokens)}, which the model does not know (vocab_size is "
                f"{self._architecture.vocab_size} in its config.json): name a reward model of the actor's vocabulary"
            )
        if self._architecture.scores_steps:
            return Conversation(tokens, list(zip(places, actors_places, strict=True)))
        last = len(tokens) - 1
        while last and tokens[last] == self._padding:
            last -= 1
        return Conversation(tokens[: last + 1], [(last, len(written) - 1)])

    def _step_ends(self, response: str) -> list[int]:
        """Return the number of characters up to the end of each step, separators included; none of a whole."""
        if not self._architecture.scores_steps:
            return []
        separator = re.escape(self._separator)
        return [found.end() for found in re.finditer(rf"(?:{separator})+|(?<!{separator})\Z", response)]

    def _tokenized(
        self,
        content: PromptContent,
        response: str,
        ends: Sequence[int],
        *,
        is_truncated: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a rendered conversation, and the positions of the last token of each step."""
        is_chat = bool(self._own.chat_template)
        if is_chat:
            text = self._rendered(content, response)
            first = text.rindex(response.strip()) - (len(response) - len(response.lstrip()))
        elif isinstance(content, str):
            text = content + response + ("" if is_truncated else self._own.eos_token or "")
            first = len(content)
        else:
            raise self._error(
                "the tokenizer has no chat template, but prompts are chat messages: add chat_template.jinja to the "
                "folder"
            )
        encoded = self._own(
            text,
            add_special_tokens=not is_chat,
            return_offsets_mapping=bool(ends),
            verbose=False,
        )
        tokens = encoded["input_ids"]
        places = []
        for end in ends:
            reached = (place for place, (_, stop) in enumerate(encoded["offset_mapping"]) if stop >= first + end)
            places.append(next(reached, len(tokens) - 1))
        kept = one_bos(tokens, self._own)
        return kept, [place - len(tokens) + len(kept) for place in places]

    def _rendered(self, content: PromptContent, response: str) -> str:
        """Return the text of a conversation by the chat template.

        Raises:
            ConfigError: the template refuses the messages, or drops the response.
        """
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        begun = ""
        if messages[-1]["role"] == "assistant":
            begun = messages[-1]["content"]
            messages = messages[:-1]
        messages = [*messages, {"role": "assistant", "content": begun + response}]
        try:
            text = self._own.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # templates refuse messages with jinja2's own exceptions
            reason = f"{type(error).__name__}: {error}"
            raise self._error(f"the chat template refuses a conversation ({reason}): use another template") from error
        if response.strip() not in text:
            raise self._error(
                f"the chat template drops the answer {shorten(repr(response))}, or a part of it: it renders "
                f"{shorten(repr(text))}; use a template that keeps it"
            )
        return text

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"{REWARD_MODEL_KEY} {self._folder}: {reason}")
