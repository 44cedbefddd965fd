"""The tokenizer of a folder: loading, end tokens and stop strings."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.config.config_error import ConfigError
from megappo.data.tokenizer import TEXTS_AT_ONCE, RenderedText, encode, load_tokenizer, stop_token_ids

WORDS = {"[UNK]": 0, "yes": 1, "no": 2, "</s>": 3, "</a>": 4}


@pytest.fixture
def folder(tmp_path):
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="[UNK]").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder))


def test_a_folder_without_tokenizer_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="^model.path: no tokenizer in .*: expected tokenizer_config.json"):
        load_tokenizer(str(tmp_path / "empty"))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(
        ConfigError, match="^model.path: cannot load the tokenizer in .*: complete the download$"
    ) as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "has_config", "remedy"),
    [
        ("tekken.json", False, "convert_tekken_tokenizer"),
        ("tekken.json", True, "convert_tekken_tokenizer"),
        ("qwen.tiktoken", True, "TikTokenConverter"),
        ("tiktoken.model", True, "TikTokenConverter"),
        ("tokenizer.model.v3", False, "transformers.LlamaTokenizerFast"),
        ("tokenizer.model", True, "transformers.LlamaTokenizerFast"),
    ],
)
def test_a_tokenizer_of_another_kind_is_named_with_its_remedy(tmp_path, folder, file, has_config, remedy):
    (folder / file).touch()
    load_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    if not has_config:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=f"has its tokenizer in {file}, which is not read: add tokenizer.*{remedy}"):
        load_tokenizer(str(folder))


def test_responses_keep_their_blanks_despite_the_config(folder):
    """Clean-up writes "yes." for "yes ."; the reward function would get another text than was sampled."""
    backend = Tokenizer(models.WordLevel(WORDS | {".": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    cleaning.save_pretrained(folder)
    assert cleaning.decode([1, 5]) == "yes." and load_tokenizer(str(folder)).decode([1, 5]) == "yes ."


def test_many_texts_give_the_tokens_of_each(tokenizer):
    texts = ["yes " * 10, "no", *["yes no"] * TEXTS_AT_ONCE, "no no", "", "yes"]
    assert encode([RenderedText(text, is_chat=False) for text in texts], tokenizer) == [
        tokenizer(text)["input_ids"] for text in texts
    ]


def test_the_end_tokens_are_those_of_the_tokenizer_and_both_configs(folder, tokenizer):
    assert stop_token_ids(str(folder), ["no"], tokenizer) == (3, 2)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert stop_token_ids(str(folder), [], tokenizer) == (1, 3)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3]}))
    assert stop_token_ids(str(folder), ["no", "</s>"], tokenizer) == (4, 3, 2)


def test_a_stop_string_of_several_tokens_and_no_end_token_are_errors(folder, tokenizer):
    with pytest.raises(ConfigError, match=r"^rollout.stop: 'yes no' is 2 tokens \(\[1, 2\]\) to this tokenizer"):
        stop_token_ids(str(folder), ["no", "yes no"], tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="^model.path: neither the tokenizer nor generation_config.json in"):
        stop_token_ids(str(folder), [], tokenizer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "generation_config.json: it is not valid JSON (Expecting property name"),
        ("[]", "generation_config.json: it is not a JSON object: copy it again"),
        ('{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id: expected token id or list of them"),
    ],
)
def test_a_broken_generation_config_is_named(folder, tokenizer, text, message):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        stop_token_ids(str(folder), [], tokenizer)
    assert str(caught.value).startswith("model.path: ") and message in str(caught.value)
