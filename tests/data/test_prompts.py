"""Prompt files, tokenisation, order, and the messages of broken files."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset, check_vocabulary, load_tokenizer

WORDS = {word: i for i, word in enumerate(["[UNK]", "[BOS]", "user", "says", "go", "1", "2", "3", "+", "="])}
TEMPLATE = (
    "{{ '[BOS]' }}{% for m in messages %} {{ m.role }} says {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} go{% endif %}"
)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A word tokenizer that, like Llama's, puts [BOS] before every text."""
    core = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.add_special_tokens(["[BOS]"])
    core.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", chat_template=TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(tokenizer_folder))


def write(path: Path, *records: object) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in records))
    return str(path)


def dataset(files: list[str], tokenizer: PreTrainedTokenizerBase, seed: int = 0, **keys: object) -> PromptDataset:
    return PromptDataset(files, tokenizer, Data(train_files=tuple(files), **keys), seed)


def numbered(tmp_path: Path, count: int) -> list[str]:
    return [write(tmp_path / "d.jsonl", *({"prompt": "1 + 2 =", "label": i} for i in range(count)))]


def test_strings_get_the_tokenizers_special_tokens(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", {"prompt": "1 + 2 =", "label": "3", "more": 1})
    (prompt,) = dataset([file], tokenizer).prompts
    assert prompt.tokens == [1, 5, 8, 6, 9]
    assert (prompt.index, prompt.text, prompt.label, prompt.source) == (0, "1 + 2 =", "3", file)


def test_messages_go_through_the_chat_template_with_one_bos(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", {"q": [{"role": "user", "content": "1 + 2"}], "a": [3, None]})
    (prompt,) = dataset([file], tokenizer, prompt_key="q", label_key="a").prompts
    assert prompt.text == "[BOS] user says 1 + 2 go"
    assert prompt.tokens == [1, 2, 3, 5, 8, 6, 4]
    assert prompt.label == [3, None]


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path, tokenizer):
    records = [{"prompt": [{"role": "user", "content": str(i)}], "label": i} for i in (1, 2, 3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet", row_group_size=2)
    parquet = dataset([str(tmp_path / "d.parquet")], tokenizer).prompts
    jsonl = dataset([write(tmp_path / "d.jsonl", *records)], tokenizer).prompts
    assert [(p.tokens, p.label) for p in parquet] == [(p.tokens, p.label) for p in jsonl]
    assert len(parquet) == 3


def test_several_files_are_numbered_through(tmp_path, tokenizer):
    files = [write(tmp_path / f"{i}.jsonl", {"prompt": str(i), "label": i}) for i in (1, 2)]
    prompts = dataset(files, tokenizer).prompts
    assert [(p.index, p.label, p.source) for p in prompts] == [(0, 1, files[0]), (1, 2, files[1])]


def test_tokens_that_a_model_does_not_know_are_refused(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", GOOD, {"prompt": "1 + 2 =", "label": 3}, {"prompt": "1 + 1", "label": 2})
    prompts = dataset([file], tokenizer).prompts
    check_vocabulary(prompts, len(WORDS))
    with pytest.raises(ValueError, match=rf"{file}: the prompt '1 \+ 2 =' holds token 9, .* is 9\); .*: 1\. Drop"):
        check_vocabulary(prompts, 9)


def test_every_epoch_is_another_permutation_and_batches_run_on(tmp_path, tokenizer):
    data = dataset(numbered(tmp_path, 10), tokenizer, train_batch_size=4)
    seen = [prompt.index for step in range(5) for prompt in data.batch(step)]  # 20 prompts = 2 epochs
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10)) != first


def test_the_order_is_a_pure_function_of_seed_and_step(tmp_path, tokenizer):
    files = numbered(tmp_path, 10)
    data = dataset(files, tokenizer, train_batch_size=4)
    forward = [data.batch(step) for step in range(8)]
    fresh = dataset(files, tokenizer, train_batch_size=4)
    assert [fresh.batch(step) for step in reversed(range(8))] == forward[::-1]
    assert [dataset(files, tokenizer, seed=1, train_batch_size=4).batch(step) for step in range(8)] != forward
    # Written down: another version of the program must go on in the same order.
    assert [prompt.index for prompt in data.batch(0)] == [1, 0, 2, 4]


def test_without_shuffle_the_file_order_repeats_also_in_batches_longer_than_the_file(tmp_path, tokenizer):
    data = dataset(numbered(tmp_path, 3), tokenizer, train_batch_size=7, shuffle=False)
    assert [prompt.index for prompt in data.batch(1)] == [1, 2, 0, 1, 2, 0, 1]


GOOD = {"prompt": "1", "label": "1"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2: the line is empty"),
        ("{broken", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ({"label": "1"}, r"line 2: no field 'prompt' \(data.prompt_key\); found 'label'"),
        ({"prompt": "1"}, r"line 2: no field 'label' \(data.label_key\); found 'prompt'"),
        ({}, "line 2: no field 'prompt' .* found no fields"),
        ({"prompt": "", "label": 1}, "line 2: the prompt is empty"),
        ({"prompt": None, "label": 1}, "line 2: expected a string or a list of .*, found None"),
        ({"prompt": [{"role": "user"}], "label": 1}, "line 2: expected a string or a list of"),
        ({"prompt": [], "label": 1}, "line 2: expected a string or a list of"),
        ({"prompt": "1 1 1 1 1", "label": 1}, "line 2: the prompt has 6 tokens, more than data.max_prompt_length 5"),
    ],
)
def test_bad_lines_are_named_with_their_file(tmp_path, tokenizer, line, message):
    file = write(tmp_path / "d.jsonl", GOOD, line, GOOD)
    with pytest.raises(ValueError, match=message) as caught:
        dataset([file], tokenizer, max_prompt_length=5)
    assert file in str(caught.value)
    assert str(caught.value).count("\n") == 1, "one line for the one bad prompt"


def test_bytes_that_are_not_utf_8_are_a_bad_line(tmp_path, tokenizer):
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"prompt": "\xff\xfe", "label": 1}\n')
    with pytest.raises(ValueError, match="line 1: not valid JSON"):
        dataset([str(file)], tokenizer)


def test_many_bad_lines_are_listed_up_to_ten_and_counted(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", *["{"] * 12, GOOD)
    with pytest.raises(ValueError, match="(?s)remove these prompts:.*line 1:.*line 10:.*and 2 more") as caught:
        dataset([file], tokenizer)
    assert "line 11" not in str(caught.value)


def test_messages_need_a_chat_template(tmp_path, tokenizer):
    tokenizer.chat_template = None
    file = write(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "1"}], "label": 1})
    with pytest.raises(ValueError, match="line 1: .* the tokenizer has no chat template"):
        dataset([file], tokenizer)


def test_a_template_that_refuses_names_the_line(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write(tmp_path / "d.jsonl", {"prompt": [{"role": "user", "content": "1"}], "label": 1})
    with pytest.raises(ValueError, match="line 1: the chat template refuses the messages: .*roles must alternate"):
        dataset([file], tokenizer)


def test_files_that_are_no_data_are_refused(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        dataset(["nowhere.jsonl"], tokenizer)
    with pytest.raises(ValueError, match="d.csv: expected a name ending in .jsonl or .parquet"):
        dataset([write(tmp_path / "d.csv")], tokenizer)
    with pytest.raises(ValueError, match="empty.jsonl is empty"):
        dataset([write(tmp_path / "empty.jsonl")], tokenizer)
    with pytest.raises(ValueError, match="broken.parquet is not a readable parquet file"):
        dataset([write(tmp_path / "broken.parquet", "no parquet")], tokenizer)


def test_a_folder_without_tokenizer_is_refused(tmp_path, tokenizer_folder):
    with pytest.raises(ValueError, match="no tokenizer in .*: expected tokenizer_config.json"):
        load_tokenizer(str(tmp_path))
    (tokenizer_folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot load the tokenizer in .*/model"):
        load_tokenizer(str(tokenizer_folder))
