"""Tokenizer of a Hugging Face folder: loading it, encoding texts, the tokens that end a response."""

import copy
import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megappo.architecture.architecture import Architecture
from megappo.architecture.model_folder import end_tokens
from megappo.config.config_error import ConfigError
from megappo.config.text_files import TextFileError
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.machine import usable

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
OTHER_TOKENIZERS = {
    "*tekken*.json": "transformers.integrations.mistral.convert_tekken_tokenizer(FILE).save_pretrained(FOLDER), with "
    "mistral-common installed, which writes the chat template, too",
    "*tiktoken*": "transformers.convert_slow_tokenizer.TikTokenConverter(FILE, PATTERN, extra_special_tokens=TOKENS)"
    ".converted(), with tiktoken installed and the pattern and tokens of the model's code, saved by "
    "transformers.PreTrainedTokenizerFast(tokenizer_object=..., eos_token=...).save_pretrained(FOLDER)",
    "*.model*": "transformers.LlamaTokenizerFast.from_pretrained(FOLDER).save_pretrained(FOLDER), or by the model's "
    "own class, with transformers 4.57 (5.19 gives two blanks other tokens) and the file named tokenizer.model",
}
"""Names of files of other kinds of tokenizers -> how such a file is converted."""
REPLACEMENT = "\ufffd"
"""Character in place of bytes that are no text."""
MAX_CONTEXT = 200
"""Characters before a text that are tokenized with it."""
TEXTS_AT_ONCE = 200
"""Texts in one call of the tokenizer, which needs some hundred bytes of memory for each character."""


def load_tokenizer(folder: str, key: str = "model.path") -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a local Hugging Face folder, which `key` names; code in the folder is not run.

    A tokenizer.json decides, whatever class tokenizer_config.json names. transformers 5.19 gives some classes steps of
    their own instead: LlamaTokenizer, which many byte-level BPEs name (DeepSeek's among them), has SentencePiece's, so
    their texts lose blanks and line ends.
    https://github.com/huggingface/transformers/issues/45488

    Raises:
        ConfigError: the folder has no usable tokenizer.
    """
    if fault := tokenizer_fault(Path(folder)):
        raise ConfigError(f"{key}: {fault}")
    # Its threads share the texts of a call. Set explicitly, or a process that forks later gets a warning.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    cores = len(usable()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cores)))
    try:
        # Not above: the import takes a second, and with torch four.
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        kept = {"local_files_only": True, "clean_up_tokenization_spaces": False}  # cleaning drops blanks of responses
        if Path(folder, TOKENIZER_FILE).is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, **kept)
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **kept)
        if len(found.get_vocab()) <= len(found.added_tokens_decoder):
            raise ValueError(f"no {TOKENIZER_FILE}, nor another file with a vocabulary")
        return found
    except Exception as error:  # transformers raises whatever its parsers do
        reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise ConfigError(f"{key}: cannot load the tokenizer in {folder} ({reason}): complete the download") from error


def check_vocabularies(tokenizer: "PreTrainedTokenizerBase", folders: Mapping[str, str]) -> None:
    """Check that models that read the actor's tokens take each of them for the same text.

    Args:
        tokenizer: the actor's.
        folders: key -> folder of such a model.
    Raises:
        ConfigError: names the key, and tokens that differ.
    """
    own = tokenizer.get_vocab()
    errors = []
    for key, folder in folders.items():
        others = {number: text for text, number in load_tokenizer(folder, key).get_vocab().items()}
        differing = sorted((number, text) for text, number in own.items() if others.get(number) != text)
        if differing:
            number, text = differing[0]
            found = f"{others[number]!r}" if number in others else "no token"
            errors.append(
                f"{key}: {len(differing):,} of the actor's {len(own):,} tokens differ in {folder}, the first is "
                f"{number}: {text!r} of the actor, {found} there. Their log-probs would be of other texts: choose a "
                "model with the actor's vocabulary"
            )
    if errors:
        raise ConfigError(*errors)


def tokenizer_fault(folder: Path) -> str:
    """Return why a folder holds no tokenizer that can be loaded, with the remedy; "" if it may hold one.

    tokenizer_config.json beside a file of another kind does not help. transformers 5.19 divides the texts of every
    tiktoken file by Llama 3's pattern (convert_slow_tokenizer.TikTokenConverter). It gives two blanks other tokens than
    a SentencePiece model does (SentencePieceExtractor).
    """
    has_config = (folder / "tokenizer_config.json").is_file()
    has_file = (folder / TOKENIZER_FILE).is_file()
    if has_config and has_file:
        return ""
    for pattern, conversion in ({} if has_file else OTHER_TOKENIZERS).items():
        for found in folder.glob(pattern):
            return (
                f"{folder} has its tokenizer in {found.name}, which is not read: add tokenizer.json and "
                "tokenizer_config.json from the model's repository on the Hugging Face hub, or write them by "
                f"{conversion}"
            )
    return "" if has_config else f"no tokenizer in {folder}: expected tokenizer_config.json and tokenizer.json"


def ids_by_file(text: str, tokenizer: "PreTrainedTokenizerBase", *, special: bool) -> list[int] | None:
    """Encode a text by tokenizer.json alone; None where there is none. Arguments as in `encode`."""
    file = Path(tokenizer.name_or_path, TOKENIZER_FILE).resolve()
    return _read(file).encode(text, add_special_tokens=special).ids if file.is_file() else None


@lru_cache(maxsize=1)
def _read(file: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def showing_special(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Return a copy whose `skip_special_tokens` removes only the tokens that begin, end or pad a text."""
    from tokenizers import Tokenizer

    ends = end_token_ids(tokenizer.name_or_path, tokenizer)
    hidden = {*tokenizer.special_tokens_map.values(), *tokenizer.convert_ids_to_tokens(ends)}
    shown = copy.deepcopy(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] &= token["content"] in hidden
    shown._tokenizer = Tokenizer.from_str(json.dumps(state))
    return shown


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the texts of the special tokens, such as the end of a message: a text shows them only by mistake."""
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def keeps_bytes(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether this is a byte-level BPE (GPT-2's kind: Llama 3, Qwen, DeepSeek), whose tokens hold every byte of
    a text in Unicode's normal form C."""
    from tokenizers import models, pre_tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.BPE):
        return False
    steps = repr(backend.pre_tokenizer)
    adds_or_drops = "add_prefix_space=True" in steps or "Removed" in steps
    if repr(backend.normalizer) not in ("None", "NFC()") or "ByteLevel(" not in steps or adds_or_drops:
        return False
    return backend.get_vocab(with_added_tokens=False).keys() >= set(pre_tokenizers.ByteLevel.alphabet())


class RenderedText(NamedTuple):
    """A text as the model sees it.

    Attributes:
        is_chat: a chat template made it, with the special tokens in it.
    """

    text: str
    is_chat: bool


def encode(texts: Sequence[RenderedText], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Return the tokens of each text; one BOS where both the text and the tokenizer add one."""
    tokens: list[list[int]] = []
    for is_chat, group in groupby(texts, key=attrgetter("is_chat")):
        alike = [one.text for one in group]
        for start in range(0, len(alike), TEXTS_AT_ONCE):
            heartbeat.beat()
            part = alike[start : start + TEXTS_AT_ONCE]
            special = not is_chat
            tokens += tokenizer(
                part,
                add_special_tokens=special,
                return_attention_mask=False,
                verbose=False,
            )["input_ids"]
    return [one_bos(ids, tokenizer) for ids in tokens]


def one_bos(ids: list[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return tokens without the first of two BOS: a text had one, and the tokenizer added another."""
    return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def with_context(before: str, added: str) -> tuple[RenderedText, RenderedText]:
    """Return the texts that `added_tokens` compares: the end of the text before, alone and with what is added.

    A tokenizer divides a text by the neighbourhood of each place, so that the end suffices.
    """
    end = before[-MAX_CONTEXT:]
    return RenderedText(end, is_chat=True), RenderedText(end + added, is_chat=True)


def added_tokens(before: Sequence[int], whole: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that are added to a text.

    Tokenised alone, the added text could get other tokens: SentencePiece's kind writes a blank before each text.

    Args:
        before, whole: tokens of the texts `with_context`.
    Raises:
        ValueError: the text before has other tokens once the text is added.
    """
    size = len(before)
    if whole[:size] != before:
        alone, here = (tokenizer.decode(ids[max(0, size - 5) : size + 3]) for ids in (before, whole))
        raise ValueError(
            f"one token spans the end of {alone!r} and the text that follows it ({here!r}), but only one of them has a "
            "loss: move blanks and line breaks from one to the other"
        )
    return list(whole[size:])


def token_texts(
    tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase", *, skip_special_tokens: bool = False
) -> list[str]:
    """Return the part of a text that each of its tokens adds; "" for one whose character a later token completes."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=skip_special_tokens)
    try:
        return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
    except Exception:  # a decoder whose texts do not grow token by token, or no tokenizer.json
        return [tokenizer.decode([token], skip_special_tokens=skip_special_tokens) for token in tokens]


def completing_tokens(tokens: Sequence[int], ends: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return for each of `ends` the position of the token that completes `text[:end]`, where `text` is the text of the
    tokens without special ones.

    Where the texts that the tokens add do not make the whole (the end of a truncated response, bytes that are no text),
    prefixes are decoded.
    """
    if not ends:
        return []
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    text = decode(tokens)
    added = token_texts(tokens, tokenizer, skip_special_tokens=True)
    lengths = list(accumulate(map(len, added)))
    known = "".join(added)
    is_known = text.startswith(known) and REPLACEMENT not in known

    def search(end: int) -> int:
        return bisect_left(
            range(len(tokens) - 1), True, key=lambda last: decode(tokens[: last + 1])[:end] == text[:end]
        )

    return [bisect_left(lengths, end) if is_known and end <= len(known) else search(end) for end in ends]


def end_token_ids(folder: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and the ones in generation_config.json and config.json.

    Raises:
        ConfigError: there is none, so every response would be cut off.
    """
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    try:
        tokens = [*end_tokens(Path(folder)), *own]
    except TextFileError as error:
        raise ConfigError(f"model.path: {error}") from error
    if not tokens:
        raise ConfigError(
            f"model.path: neither the tokenizer nor generation_config.json in {folder} has an end token: set its "
            "eos_token_id there"
        )
    return list(dict.fromkeys(tokens))


def stop_token_ids(folder: str, stop: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Return the ids that end a response: `end_token_ids`, and each of the stop strings, which must be one token.

    Raises:
        ConfigError: a stop string is not one token, or there is no end token.
    """
    ids = end_token_ids(folder, tokenizer)
    errors = []
    for text in stop:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        ids += tokens
        if len(tokens) != 1:
            errors.append(
                f"rollout.stop: {text!r} is {len(tokens)} tokens ({tokens}) to this tokenizer, and the engine works on "
                "token ids: choose a string that is exactly one token, or leave it out"
            )
    if errors:
        raise ConfigError(*errors)
    return tuple(dict.fromkeys(ids))


def padding_token(architecture: Architecture, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the token that a reward model does not read at the end of a text: of config.json, else the tokenizer's.

    Without one it is the end token, which readers then pad with.
    """
    found = (architecture.pad_token, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in found if token is not None), None)
