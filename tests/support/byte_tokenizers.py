"""A tokenizer of bytes."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(*ends: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes and these special tokens; it names the first one as the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    bytes_alone.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ends])
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=ends[0])
