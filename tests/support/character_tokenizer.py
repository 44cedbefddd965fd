"""A tokenizer of characters whose chat template marks the messages of the assistant, and a conversation."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "+1?"},
    {"role": "assistant", "content": "5."},
]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters with a template that marks the messages of the assistant."""
    core = Tokenizer(WordLevel({token: i for i, token in enumerate([EOS, *CHARACTERS])}, unk_token=EOS))
    core.pre_tokenizer, core.decoder = Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    core.add_special_tokens([AddedToken(EOS, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, chat_template=TEMPLATE)
