"""Fields by dotted names."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from planning import write_run
from transformers import PreTrainedTokenizerBase
from verl_style import CHAT_TEMPLATE, record, write_gsm8k

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer

KINDS = pytest.mark.parametrize("kind", ["jsonl", "parquet"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(str(write_run(tmp_path_factory.mktemp("run")) / "model"))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write(folder: Path, kind: str, *records: dict) -> str:
    file = folder / f"d.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def opened(file: str, tokenizer: PreTrainedTokenizerBase, label_key: str, prompt_key: str = "prompt") -> PromptDataset:
    config = Data(train_files=(file,), prompt_key=prompt_key, label_key=label_key)
    return PromptDataset([file], tokenizer, config, 0)


def errors_of(data: PromptDataset) -> list[str]:
    """Without the file's name."""
    [file] = data.files
    return [error.replace(file.path, "FILE") for error in data.fault_lines([data.check(1000)])]


@KINDS
def test_dotted_names_lead_into_objects(tmp_path, tokenizer, kind):
    rows = [{"a": {"q": f"{n}+1=", "b": {"c.d": n, "e": 0}}, "label": -1} for n in range(3)]
    data = opened(write(tmp_path, kind, *rows), tokenizer, prompt_key="a.q", label_key="a.b.c.d")
    assert errors_of(data) == []
    assert [(prompt.text, prompt.label) for prompt in data.all] == [("0+1=", 0), ("1+1=", 1), ("2+1=", 2)]


@KINDS
def test_a_field_of_that_very_name_wins(tmp_path, tokenizer, kind):
    rows = [{"prompt": "1", "a.b": "whole", "a": {"b": "nested"}}]
    [prompt] = opened(write(tmp_path, kind, *rows), tokenizer, label_key="a.b").all
    assert prompt.label == "whole"


def test_verls_parquet_is_read_as_it_is(tmp_path, tokenizer):
    data = opened(write_gsm8k(tmp_path / "train.parquet"), tokenizer, label_key="reward_model.ground_truth")
    assert errors_of(data) == []
    assert [prompt.label for prompt in data.all] == [str(82 + 8 * index) for index in range(200)]
    assert data.all[7].text == f"user:{record(7)['prompt'][0]['content']}\nassistant:"


def test_how_far_a_dotted_name_got_is_told(tmp_path, tokenizer):
    file = write_gsm8k(tmp_path / "train.parquet", 20)
    fields = "set data.label_key; the file has: data_source, prompt, ability, reward_model, extra_info"
    for key, reached in {
        "reward_model.truth": ", as 'reward_model' has only ground_truth, style",
        "ability.truth": ", as 'ability' is no object",
        "reward_model.style.rule": ", as 'reward_model.style' is no object",
        "reward.ground_truth": "",
        "reward_model.": ", as 'reward_model' has only ground_truth, style",
    }.items():
        assert errors_of(opened(file, tokenizer, label_key=key)) == [
            f"data.label_key: FILE has no field {key!r} in any of its 20 rows{reached}: {fields}"
        ]
    rows = [{"prompt": "1", "a": {"b": 1}}] * 3 + [{"prompt": "1", "a": {"c": 1}}, {"prompt": "1", "a": None}]
    assert errors_of(opened(write(tmp_path, "jsonl", *rows), tokenizer, label_key="a.b")) == [
        "data.train_files: FILE line 4: no field 'a.b' (data.label_key), as 'a' has only c",
        "data.train_files: FILE line 5: no field 'a.b' (data.label_key), as 'a' is no object",
    ]
