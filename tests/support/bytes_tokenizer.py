"""A tokenizer of bytes with a chat template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}[{{m.role}}]{{m.content}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer. As in Llama 3, two tokens end a turn, and it names one of them; a third is not special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    ends = ("<|eot_id|>", "<|eom_id|>")
    bytes_alone.add_special_tokens([AddedToken(end, special=True, normalized=False) for end in ends])
    bytes_alone.add_tokens([AddedToken("</tool_call>", special=False, normalized=False)])
    found = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="<|eot_id|>")
    found.chat_template = TEMPLATE
    return found
