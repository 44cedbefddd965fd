"""Order of prompts: epochs, files with weights, ascending by a field."""

import json
import random
from collections import Counter
from fractions import Fraction
from itertools import count, islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from planning import errors_of, plan_here, write_run
from transformers import PreTrainedTokenizerBase

from megappo.config.schema import Data
from megappo.data.order import Order, Turns
from megappo.data.prompts import PromptDataset
from megappo.data.record_dataset import share
from megappo.data.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(folder / "model"))


def webster(weights: list[str], number: int) -> list[int]:
    """The part whose turn it is, from the first turn on: all turns of all parts, sorted by when they come."""
    turns = [(Fraction(2 * i + 1, 2) / Fraction(w), k) for k, w in enumerate(weights) for i in range(number)]
    return [whose for _, whose in sorted(turns)[:number]]


@pytest.mark.parametrize(
    "weights",
    [["1"], ["0.7", "0.3"], ["1", "1", "1"], ["0.1", "0.2", "0.7"], ["7473", "12000", "1"], ["1e-3", "1", "0.3333"]],
    ids=",".join,
)
def test_turns_are_those_of_websters_method_wherever_one_begins(weights):
    expected = webster(weights, 600)
    turns = Turns(list(map(float, weights)))
    for first in (*range(20), 137, 599):
        assert [whose for whose, _ in turns.between(first, 600)] == expected[first:]
    had = Counter()
    for whose, nth in turns.between(0, 600):
        assert nth == had[whose]
        had[whose] += 1


@pytest.mark.parametrize("weights", [[0.7, 0.3], [5, 3, 1, 1], [0.9, 0.05, 0.05]])
def test_each_has_its_share_of_any_steps(weights):
    taken = [whose for whose, _ in Turns(weights).between(10**9, 10**9 + 400)]
    for size in (1, 10, 64, 256):
        for first in range(0, len(taken) - size, 7):
            for whose, weight in enumerate(weights):
                exact = size * weight / sum(weights)
                assert abs(taken[first : first + size].count(whose) - exact) < 2


def test_an_epoch_is_shuffled_as_it_always_was():
    """The order equals Python's own shuffle of a list, so that a resumed run keeps its order."""
    order = Order("3", 100, shuffle=True, values=None)
    for epoch in range(3):
        expected = list(range(100))
        random.Random(f"3/{epoch}").shuffle(expected)
        assert [order[100 * epoch + i] for i in range(100)] == expected


def write(folder: Path, name: str, levels: list[object]) -> str:
    """Prompts whose labels are their places in the file."""
    records = [{"prompt": "1+1=", "label": i, "info": {"level": level}} for i, level in enumerate(levels)]
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder / name)


def opened(files: list[str], tokenizer: PreTrainedTokenizerBase, *weights: float, **keys: object) -> PromptDataset:
    data = Data(train_files=tuple(files), **keys)
    dataset = PromptDataset(files, tokenizer, data, 0, weights=weights, order_by=data.order_by)
    parts = [dataset.check(100, lambda size, rank=rank: share(range(size), rank, 3)) for rank in range(3)]
    assert dataset.errors(parts) == []
    dataset.leave_out(parts)
    return dataset


def taken(dataset: PromptDataset, number: int) -> list[int]:
    size = dataset.config.train_batch_size
    return list(islice((index for place in count(0, size) for index in dataset.indices(place)), number - number % size))


def test_files_with_weights_have_epochs_of_their_own(folder, tokenizer):
    files = [
        write(folder, "a.jsonl", [0] * 10),
        write(folder, "b.parquet", [0] * 30),
        write(folder, "c.jsonl", [0] * 5),
    ]
    data = opened(files, tokenizer, 0.5, 0.4, 0.1, train_batch_size=10)
    indices = taken(data, 300)
    steps = [indices[first : first + 10] for first in range(0, 300, 10)]
    assert {(sum(i < 10 for i in step), sum(10 <= i < 40 for i in step)) for step in steps} == {(5, 4)}
    for start, size, epochs in ((0, 10, 15), (10, 30, 4), (40, 5, 6)):
        of_file = [index for index in indices if start <= index < start + size]
        orders = {tuple(of_file[size * epoch : size * (epoch + 1)]) for epoch in range(epochs)}
        assert len(orders) == epochs and all(sorted(order) == list(range(start, start + size)) for order in orders)
    assert opened(files, tokenizer, 5, 4, 1, train_batch_size=10).indices(170) == steps[17]
    assert data.batch_errors() == []


def test_a_file_that_gives_a_step_more_than_it_has_is_refused(folder, tokenizer):
    files = [write(folder, "a.jsonl", [0] * 10), write(folder, "b.jsonl", [0] * 30)]
    data = opened(files, tokenizer, 0.5, 0.5, train_batch_size=22)
    assert data.batch_errors() == [
        f"data.train_batch_size 22 takes 11 prompts of {folder}/a.jsonl, which has 10, so that a step would hold some "
        "twice: lower it, or name more files"
    ]
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 7)
    [error] = errors_of(plan_here(folder, "run.yaml", "data.train_files={train.jsonl: 1, b.jsonl: 1}"))
    assert error.startswith("error: data.train_batch_size 16 takes 8 prompts of train.jsonl, which has 7, so that a")


LEVELS = [3, 1, 2.5, 1, -4, 3, 1, 2**70, 0, 1, 3, 1]


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize("key", ["info.level", "-info.level"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_ascends_or_descends(folder, tokenizer, name, key, shuffle):
    levels = list(map(float, LEVELS))
    file = write(folder, name, levels)
    indices = taken(opened([file], tokenizer, train_batch_size=4, order_by=key, shuffle=shuffle), 36)
    epochs = [indices[first : first + 12] for first in (0, 12, 24)]
    in_order = sorted(range(12), key=lambda i: -levels[i] if key[0] == "-" else levels[i])  # equal ones as in the file
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
        assert [levels[i] for i in epoch] == [levels[i] for i in in_order]
    assert (epochs == [in_order] * 3) != shuffle


def test_what_is_left_out_has_no_place_in_the_order(folder, tokenizer):
    file = write(folder, "d.jsonl", [5, "hard", 4, True, None, 3, 10**400])
    data = opened([file, write(folder, "e.jsonl", [4.5])], tokenizer, order_by="info.level", on_bad_row="skip")
    data.config = data.config.model_copy(update={"train_batch_size": 4})
    assert data.indices(0) == [5, 2, 7, 0]


def test_a_field_to_order_by_that_is_missing_or_no_number_is_an_error(folder):
    write(folder, "train.jsonl", [1] * 20 + ["hard"])
    [error] = errors_of(plan_here(folder, "run.yaml", "data.order_by=level"))
    assert "train.jsonl lines 1, 2, 3 and 18 more: no field 'level': correct data.order_by" in error
    [error] = errors_of(plan_here(folder, "run.yaml", "data.order_by=info.level"))
    assert "train.jsonl line 21: expected a number for data.order_by, found 'hard' (data.on_bad_row=skip" in error
