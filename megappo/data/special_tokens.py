"""Special tokens where their owner will hardly have meant them, and where a reward function does not see them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.schema import Reward
from megappo.data.chat import Conversation
from megappo.rewards.spec import parse_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def odd_tokens(
    conversation: Conversation, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """What is odd about a prompt's tokens, in the same words for all prompts."""
    if tokens[-1] == tokenizer.eos_token_id:
        yield (
            f"the prompt ends with {tokenizer.eos_token!r}, behind which a model has nothing to say: leave it out of "
            "the text, of the chat template, or of what the post_processor in tokenizer.json adds"
        )
    messages = "" if isinstance(conversation, str) else str(conversation)
    for special in (tokenizer.bos_token, tokenizer.eos_token):
        if special and special in messages:
            yield (
                f"a message holds {special!r}, as texts do that a chat template has made before: use the messages that "
                "it was made of, or data.apply_chat_template=false"
            )


def unseen_tokens(reward: Reward, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """What is odd about reward functions: they name special tokens that they do not get to see."""
    special = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special}
    special -= set(tokenizer.special_tokens_map.values())
    for spec in reward.weights if reward.skip_special_tokens else ():
        file = parse_spec(spec).file
        source = Path(file or os.devnull).read_text("utf-8", "replace")
        if named := ", ".join(sorted(token for token in special if token in source)):
            yield (
                f"{spec} is given responses without special tokens, which {named} are to this tokenizer, and {file} "
                "names them: set reward.skip_special_tokens=false"
            )
