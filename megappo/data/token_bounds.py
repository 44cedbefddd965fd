"""Bounds on a text's number of tokens by its length: most prompts need not be tokenised to know that they fit.

They hold for byte-pair encodings that lose no byte: those over bytes (GPT-2's kind: Llama 3, Qwen, DeepSeek) and those
that fall back to bytes (Llama 2's kind: Mistral, Mixtral).
"""

import json
import math
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_COMPOSITION = 4
"""Characters that NFC may make one of: U+1F82 and its like."""
BLANK = "\u2581"
"""Llama 2's kind writes it for a blank, and before a text."""
BLANK_MARKS = (
    {"type": "Prepend", "prepend": BLANK},
    {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
)


class TokenBounds:
    """Bounds that hold for every text; 0 and infinity where the tokenizer is of another kind.

    The upper one counts the special tokens that the tokenizer adds by itself.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._longest, self._added, self._composes = math.inf, math.inf, False
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not _loses_nothing(backend):
            return
        added = backend.get_added_tokens_decoder().values()
        self._composes = {"type": "NFC"} in _parts(backend.normalizer)
        # Llama 2's kind writes a blank before a text and after each added token, which has a byte to spare for it.
        if all(len(token.content.encode()) > 1 for token in added):
            self._added = backend.num_special_tokens_to_add(False) + 1
        # An added token may swallow the blanks beside it, however many.
        if not any(token.lstrip or token.rstrip for token in added):
            self._longest = max(map(len, backend.get_vocab(with_added_tokens=True)))

    def at_least(self, text: str) -> int:
        """Return a lower bound."""
        composed = 1 if self._is_unchanged(text) else LONGEST_COMPOSITION
        return math.ceil(len(text) / composed / self._longest)

    def at_most(self, text: str) -> float:
        """Return an upper bound: each token stands for a byte or more."""
        return len(text.encode()) + self._added if self._is_unchanged(text) else math.inf

    def _is_unchanged(self, text: str) -> bool:
        """Return whether the tokenizer's normalizer leaves a text, and so each part of it, unchanged."""
        return not self._composes or text.isascii() or unicodedata.is_normalized("NFC", text)


def _loses_nothing(backend: Any) -> bool:
    """Return whether a BPE puts every byte of a text, of blanks and unknown characters too, into some token."""
    from tokenizers import pre_tokenizers

    model, vocab = backend.model, backend.get_vocab(with_added_tokens=False)
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    before, cut = _parts(backend.normalizer), _parts(backend.pre_tokenizer)
    if any(part["type"] == "ByteLevel" for part in cut):
        keep, needed = map(_keeps_bytes, cut), pre_tokenizers.ByteLevel.alphabet()
        return all(keep) and all(part["type"] == "NFC" for part in before) and vocab.keys() >= set(needed)
    bytes_and_blank = {f"<0x{byte:02X}>" for byte in range(256)} | {BLANK}
    marks_blanks = all(part in BLANK_MARKS for part in before) and [part["type"] for part in cut] in ([], ["Metaspace"])
    return model.byte_fallback and vocab.keys() >= bytes_and_blank and marks_blanks


def _keeps_bytes(part: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer only cuts a text, or spells its bytes."""
    if part["type"] in ("Split", "Punctuation"):
        return part["behavior"] != "Removed"
    return part["type"] == "Digits" or (part["type"] == "ByteLevel" and not part["add_prefix_space"])


def _parts(step: Any) -> list[dict[str, Any]]:
    """Return the settings of a normalizer or pre-tokenizer, or of each one in a sequence."""
    return list(_flat(json.loads(step.__getstate__()))) if step is not None else []


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for part in state.get("normalizers", state.get("pretokenizers", [])):
        yield from _flat(part)
