"""Prompts that are left out or cut, where the config allows it: which, the report, and what a run then uses."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from planning import all_of, errors_of, plan_here, write_run

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer

LINES = ["1+1=", "{", "1" * 30, "2+2=", "", "2" * 31, "1+2="]
"""Prompts of one token a character, a line that is no JSON and an empty one."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose data are LINES; 24 tokens are the most."""
    write_run(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(map(line_of, LINES)))
    return tmp_path


def line_of(prompt: str) -> str:
    return f"{prompt}\n" if prompt in ("", "{") else json.dumps({"prompt": prompt, "label": len(prompt)}) + "\n"


def dataset(folder: Path, name: str = "train.jsonl", **keys: object) -> PromptDataset:
    files = (str(folder / name),)
    data = Data(train_files=files, max_prompt_length=24, train_batch_size=3, **keys)
    return PromptDataset(files, load_tokenizer(str(folder / "model")), data, seed=0)


def checked(data: PromptDataset, num_ranks: int = 2, vocab_size: int = 100) -> tuple[list[str], list[str]]:
    """Return what ranks that share the check find: errors, and records left out or cut; without the file's folder."""
    parts = [data.check(vocab_size, lambda size, rank=rank: range(rank, size, num_ranks)) for rank in range(num_ranks)]
    folder = str(Path(data.files[0].path).parent)
    return tuple([line.replace(f"{folder}/", "") for line in found(parts)] for found in (data.errors, data.leave_out))


NO_JSON = "line 2: not valid JSON: Expecting property name enclosed in double quotes (column 2)"
EMPTY = "line 5: the line is empty"
REMEDY = " (data.on_bad_row=skip leaves such out)"
LONG = "the prompt has more tokens than data.max_prompt_length 24"


def test_nothing_is_left_out_unasked(folder):
    data = dataset(folder)
    errors, left_out = checked(data)
    assert (len(errors), left_out, len(data)) == (4, [], 7)


def test_bad_rows_and_long_prompts_are_left_out_and_reported(folder):
    data = dataset(folder, on_bad_row="skip", too_long="skip")
    assert checked(data) == (
        [],
        [
            "left out: data.train_files: 4 of 7 records",
            f"left out: data.train_files: train.jsonl {NO_JSON}",
            f"left out: data.train_files: train.jsonl lines 3, 6: {LONG}",
            f"left out: data.train_files: train.jsonl {EMPTY}",
        ],
    )
    assert [prompt.text for prompt in all_of(data)] == ["1+1=", "2+2=", "1+2="]
    assert [prompt.index for prompt in all_of(data)] == [0, 3, 6]  # places in the file, as before


def test_one_kind_may_be_left_out_and_the_other_not(folder):
    errors, left_out = checked(dataset(folder, too_long="skip"))
    assert errors == [f"data.train_files: train.jsonl {fault}{REMEDY}" for fault in (NO_JSON, EMPTY)]
    assert left_out == [
        "left out: data.train_files: 2 of 7 records",
        f"left out: data.train_files: train.jsonl lines 3, 6: {LONG}",
    ]
    errors, left_out = checked(dataset(folder, on_bad_row="skip"))
    assert [error.partition(":")[2][:22] for error in errors] == [" train.jsonl line 3: t", " train.jsonl line 6: t"]
    assert len(left_out) == 3


def test_epochs_are_of_what_is_left_in_an_order_of_their_own(folder):
    keys = {"on_bad_row": "skip", "too_long": "skip"}
    data = dataset(folder, **keys)
    checked(data)
    epochs = [[prompt.index for prompt in data.batch(place)] for place in range(0, 18, 3)]
    assert all(sorted(epoch) == [0, 3, 6] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1
    other = dataset(folder, **keys)
    checked(other, num_ranks=3)  # whatever cut the check
    assert [other.indices(place) for place in range(0, 18, 3)] == epochs
    ordered = dataset(folder, shuffle=False, **keys)
    checked(ordered)
    assert ordered.indices(3) == [0, 3, 6]
    assert data.batch_errors() == []


def test_long_prompts_are_cut_to_their_last_tokens(folder):
    (folder / "train.jsonl").write_text(line_of("1+" * 10 + "2+" * 10 + "=") + line_of("1+1="))
    data = dataset(folder, too_long="truncate_left")
    errors, left_out = checked(data)
    assert (errors, left_out) == ([], [f"cut to its last tokens: data.train_files: train.jsonl line 1: {LONG}"])
    cut, whole = all_of(data)
    assert len(cut.tokens) == 24
    assert cut.text.replace(" ", "") == ("1+" * 10 + "2+" * 10 + "=")[-24:]
    assert cut.label == 41
    assert whole.text == "1+1="


def test_of_a_prompt_that_is_cut_what_is_left_must_be_known(folder):
    """An unknown token is no bad row: the tokenizer is another model's."""
    (folder / "train.jsonl").write_text(line_of("=" * 30 + "1" * 24) + line_of("1" * 24 + "=" * 6))
    data = dataset(folder, too_long="truncate_left", on_bad_row="skip")
    [error], left_out = checked(data, vocab_size=5)  # "=" is token 5
    assert error.startswith("data.train_files: train.jsonl line 2: the prompt has token 5, for which a model has no")
    assert left_out == [f"cut to its last tokens: data.train_files: train.jsonl lines 1, 2: {LONG}"]


def test_data_of_which_nothing_remains_are_an_error_with_the_reasons(folder):
    (folder / "train.jsonl").write_text(line_of("1" * 30) * 3 + "\n")
    errors, _ = checked(dataset(folder, too_long="skip", on_bad_row="skip"))
    assert errors == [
        "data.train_files: no prompt remains: all 4 records that were checked are left out",
        f"data.train_files: train.jsonl lines 1, 2, 3: {LONG}",
        "data.train_files: train.jsonl line 4: the line is empty",
    ]


def test_a_step_cannot_take_more_than_is_left(folder):
    data = dataset(folder, on_bad_row="skip", too_long="skip")
    data.config = data.config.model_copy(update={"train_batch_size": 4})
    checked(data)
    [error] = data.batch_errors()
    assert "data.train_batch_size 4 takes 4 prompts of data.train_files, which has 3" in error


def test_plan_reports_what_a_run_would_leave_out(folder):
    keys = ("data.train_batch_size=3", "actor.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size=3", "rollout.n=1")
    refused = errors_of(plan_here(folder, "run.yaml", *keys))
    assert len([error for error in refused if "train.jsonl" in error]) == 4
    done = plan_here(folder, "run.yaml", *keys, "data.on_bad_row=skip", "data.too_long=skip")
    assert errors_of(done) == []
    assert f"  left out: data.train_files: train.jsonl lines 3, 6: {LONG}\n" in done.stdout
    assert "  exact_match: the response '4' to the first prompt scores 1" in done.stdout


def test_compressed_lines_are_read_as_they_are(folder):
    (folder / "train.jsonl.gz").write_bytes(gzip.compress((folder / "train.jsonl").read_bytes()))
    keys = {"on_bad_row": "skip", "too_long": "skip"}
    plain, compressed = dataset(folder, **keys), dataset(folder, "train.jsonl.gz", **keys)
    lines = checked(plain)[1]
    assert [line.replace(".gz", "") for line in checked(compressed)[1]] == lines
    prompts = [replace(prompt, place=prompt.place.replace(".gz", "")) for prompt in all_of(compressed)]
    assert prompts == all_of(plain)


def test_held_out_files_are_reported_without_their_endings():
    names = Data(train_files=("t.jsonl",), val_files=("a/test.jsonl.gz", "b.v2.parquet", "c.jsonl")).val_names
    assert names == ["test", "b.v2", "c"]
    names = Data(train_files=("t.jsonl",), val_files=("gsm8k/test.jsonl", "math/test.parquet", "c.jsonl")).val_names
    assert names == ["gsm8k_test", "math_test", "c"]


def test_prompts_of_a_dataset_that_lacks_a_field_are_not_left_out_in_silence(folder):
    data = dataset(folder, label_key="answer", on_bad_row="skip", too_long="skip")
    errors, _ = checked(data)
    assert errors[0] == "data.train_files: no prompt remains: all 7 records that were checked are left out"
    assert any("train.jsonl lines 1, 3, 4 and 2 more: no field 'answer': correct data.label" in line for line in errors)
