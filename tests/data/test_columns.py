"""Fields by dotted names, and the columns that go to the reward function."""

import json
import re
from datetime import datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from planning import all_of, write_run
from transformers import PreTrainedTokenizerBase
from verl_style import CHAT_TEMPLATE, record, write_gsm8k

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.signatures import NO_INPUT, InputSpec

KINDS = pytest.mark.parametrize("kind", ["jsonl", "parquet"])
ALL = InputSpec((), None)


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


def opened(
    file: str, tokenizer: PreTrainedTokenizerBase, takes: InputSpec = NO_INPUT, label_key: str = "label", **keys: object
) -> PromptDataset:
    return PromptDataset([file], tokenizer, Data(train_files=(file,), label_key=label_key, **keys), 0, takes=takes)


def errors_of(data: PromptDataset) -> list[str]:
    """Without the file's name."""
    [file] = data.files
    return [error.replace(file.path, "FILE") for error in data.errors([data.check(1000)])]


@KINDS
def test_dotted_names_lead_into_objects(tmp_path, tokenizer, kind):
    rows = [{"a": {"q": f"{n}+1=", "b": {"c.d": n, "e": 0}}, "label": -1} for n in range(3)]
    data = opened(write(tmp_path, kind, *rows), tokenizer, prompt_key="a.q", label_key="a.b.c.d")
    assert errors_of(data) == []
    assert [(prompt.text, prompt.label) for prompt in all_of(data)] == [("0+1=", 0), ("1+1=", 1), ("2+1=", 2)]


@KINDS
def test_a_field_of_that_very_name_wins(tmp_path, tokenizer, kind):
    rows = [{"prompt": "1", "a.b": "whole", "a": {"b": "nested"}}]
    [prompt] = all_of(opened(write(tmp_path, kind, *rows), tokenizer, label_key="a.b"))
    assert prompt.label == "whole"


def test_verls_parquet_is_read_as_it_is(tmp_path, tokenizer):
    data = opened(write_gsm8k(tmp_path / "train.parquet"), tokenizer, label_key="reward_model.ground_truth")
    assert errors_of(data) == []
    assert [prompt.label for prompt in all_of(data)] == [str(82 + 8 * index) for index in range(200)]
    assert all_of(data)[7].text == f"user:{record(7)['prompt'][0]['content']}\nassistant:"
    assert all_of(data)[7].columns == {}


@pytest.mark.parametrize("key", ["reward_model.truth", "ability.truth", "reward.ground_truth", "reward_model."])
def test_a_dotted_name_that_leads_nowhere(tmp_path, tokenizer, key):
    file = write_gsm8k(tmp_path / "train.parquet", 20)
    [error] = errors_of(opened(file, tokenizer, label_key=key))
    assert error.startswith(
        f"data.train_files: FILE rows 1, 2, 3 and 17 more: no field {key!r}: correct data.label_key"
    )
    assert error.endswith("; the file has: data_source, prompt, ability, reward_model, extra_info")


REMEDY = " (data.on_bad_row=skip leaves such out)"
HAS = "; the file has: prompt, label, level, tags"
ROWS = [{"prompt": "1", "label": 1, "level": 3, "tags": ["x"]}, {"prompt": "2", "label": 2, "level": 4, "tags": None}]


@KINDS
@pytest.mark.parametrize(
    ("takes", "columns"),
    [
        (NO_INPUT, {}),
        (InputSpec(("level",)), {"level": 3}),
        (InputSpec((), ("tags", "nowhere")), {"tags": ["x"]}),
        (InputSpec(("tags",), ("level", "prompt")), {"tags": ["x"], "level": 3, "prompt": "1"}),
        (ALL, {"label": 1, "level": 3, "tags": ["x"]}),
        (InputSpec((), (), raw_prompts=True), {"prompts": "1"}),
    ],
)
def test_only_what_the_function_takes_goes_with_a_prompt(tmp_path, tokenizer, kind, takes, columns):
    data = opened(write(tmp_path, kind, *ROWS), tokenizer, takes)
    assert errors_of(data) == []
    assert all_of(data)[0].columns == columns


def test_the_prompt_as_the_file_has_it_goes_with_it(tmp_path, tokenizer):
    file = write_gsm8k(tmp_path / "train.parquet", 2)
    takes = InputSpec((), ("ability",), raw_prompts=True)
    [_, prompt] = all_of(opened(file, tokenizer, takes, label_key="reward_model.ground_truth"))
    assert prompt.columns == {"ability": "math", "prompts": record(1)["prompt"]}


@KINDS
def test_a_column_that_the_function_needs_and_the_file_lacks(tmp_path, tokenizer, kind):
    unit = "rows" if kind == "parquet" else "lines"
    assert errors_of(opened(write(tmp_path, kind, *ROWS), tokenizer, InputSpec(("level", "subject")))) == [
        f"data.train_files: FILE {unit} 1, 2: no field 'subject': correct reward.function, or add it{REMEDY}; the file "
        "has: prompt, label, level, tags"
    ]


def test_a_column_that_one_line_lacks(tmp_path, tokenizer):
    file = write(tmp_path, "jsonl", *ROWS, {"prompt": "3", "label": 3}, ROWS[0])
    assert errors_of(opened(file, tokenizer, InputSpec(("level",)))) == [
        "data.train_files: FILE line 3: no field 'level': correct reward.function, or add it" + REMEDY + HAS
    ]
    data = opened(file, tokenizer, InputSpec((), ("level",)))
    assert errors_of(data) == [] and [prompt.columns for prompt in all_of(data)][2] == {}


NO_JSON = {
    "bytes": (b"1", "Object of type bytes is not JSON serializable"),
    "a date": (datetime(2020, 1, 1), "Object of type datetime is not JSON serializable"),
    "no number": (float("nan"), "Out of range float values are not JSON compliant"),
}


def test_a_column_that_nobody_names_and_is_not_json_is_left_out_and_reported(tmp_path, tokenizer):
    odd = {name: value for name, (value, _) in NO_JSON.items()}
    rows = [{"prompt": "1", "label": "1", "fine": 1, **odd}, {"prompt": "1", "label": "1", "no number": 0.5}]
    data = opened(write(tmp_path, "parquet", *rows), tokenizer, ALL)
    assert errors_of(data) == []
    assert [prompt.columns for prompt in all_of(data)] == [
        {"label": "1", "fine": 1},
        {"label": "1", "fine": None, "bytes": None, "a date": None, "no number": 0.5},
    ]
    warnings = data.warnings([data.check(1000)])
    assert all(line.startswith(f"data.train_files: {tmp_path}/d.parquet row 1: ") for line in warnings)
    assert [re.search("field '(.*?)'.* is not JSON .*: it is left out$", line)[1] for line in warnings] == list(NO_JSON)


NAMED = [InputSpec(("odd",)), InputSpec((), ("odd",)), InputSpec(("odd",), None)]


@pytest.mark.parametrize("takes", NAMED, ids=["needed", "optional", "needed among all"])
@pytest.mark.parametrize(("value", "reason"), NO_JSON.values(), ids=NO_JSON)
def test_a_column_that_is_taken_and_not_json(tmp_path, tokenizer, takes, value, reason):
    file = write(tmp_path, "parquet", {"prompt": "1", "label": "1", "odd": value})
    assert errors_of(opened(file, tokenizer, takes)) == [
        f"data.train_files: FILE row 1: the field 'odd', which reward.function takes, is not JSON ({reason}): convert "
        "it to text or a number" + REMEDY
    ]
    assert errors_of(opened(file, tokenizer)) == []


def test_columns_that_are_not_taken_are_not_read(tmp_path, tokenizer):
    """A year that Python has not cannot be read."""
    years = pyarrow.array([2**52], pyarrow.timestamp("s"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"], "label": ["1"], "year": years}), tmp_path / "d.parquet")
    file = str(tmp_path / "d.parquet")
    assert errors_of(opened(file, tokenizer, InputSpec((), ("month",)))) == []
    for takes in (ALL, InputSpec((), ("year",))):
        [error] = errors_of(opened(file, tokenizer, takes))
        assert error.startswith("data.train_files: FILE row 1: cannot be read: ")
