"""Warnings about special tokens: in prompts by mistake, or named by a reward function that does not get them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.schema import Reward
from megappo.data.chat import Conversation
from megappo.userland.spec import parse_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def odd_tokens(
    conversation: Conversation, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Warnings about a prompt's tokens, in the same words for all prompts, which are counted together."""
    if tokens[-1] == tokenizer.eos_token_id:
        yield (
            f"the prompt ends with {tokenizer.eos_token!r}, after which a model expects no text: leave it out of "
            "the text, the chat template, or what the post_processor in tokenizer.json adds"
        )
    messages = "" if isinstance(conversation, str) else str(conversation)
    for special in (tokenizer.bos_token, tokenizer.eos_token):
        if special and special in messages:
            yield (
                f"a message holds {special!r}, so a chat template may have been applied before: use the original "
                "messages, or set data.apply_chat_template=false"
            )


def unseen_tokens(reward: Reward, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Warnings about reward functions whose source names special tokens that responses come without."""
    special = {one.content for one in tokenizer.added_tokens_decoder.values() if one.special}
    special -= set(tokenizer.special_tokens_map.values())
    for spec in reward.weights if reward.skip_special_tokens else ():
        file = parse_spec(spec).file
        source = Path(file).read_text("utf-8", "replace") if file else ""
        if named := ", ".join(sorted(token for token in special if token in source)):
            yield (
                f"{spec} gets responses without special tokens, but {file} names {named}: set "
                "reward.skip_special_tokens=false"
            )
