"""Prompt files, tokenisation, order, and the messages of broken files."""

import gzip
import json
import resource
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import pyarrow
import pyarrow.parquet
import pytest
from planning import all_of
from spawn import run_ranks
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.config.config_error import ConfigError
from megappo.config.schema import Config, Data
from megappo.data.prompts import PromptDataset, open_datasets
from megappo.data.record_dataset import share
from megappo.data.records import RecordsError
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.signatures import NO_INPUT, InputSpec

WORDS = {word: i for i, word in enumerate(["[UNK]", "[BOS]", "user", "writes", "go", "1", "2", "3", "+", "="])}
TEMPLATE = (
    "{{ '[BOS]' }}{% for m in messages %} {{ m.role }} writes {{ m.content }}{% endfor %}"
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


def dataset(
    files: list[str], tokenizer: PreTrainedTokenizerBase, seed: int = 0, takes: InputSpec = NO_INPUT, **keys: object
) -> PromptDataset:
    return PromptDataset(files, tokenizer, Data(train_files=tuple(files), **keys), seed, takes=takes)


def errors_of(file: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int = 100, **keys: object) -> list[str]:
    """Return the errors of a file, found by one rank; without the file's name."""
    data = dataset([file], tokenizer, **keys)
    errors = data.errors([data.check(vocab_size)])
    assert all(file in error for error in errors)
    return [error.replace(file, "FILE") for error in errors]


def numbered(tmp_path: Path, count: int) -> list[str]:
    return [write(tmp_path / "d.jsonl", *({"prompt": "1 + 2 =", "label": i} for i in range(count)))]


def test_strings_get_the_tokenizers_special_tokens(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", {"prompt": "1 + 2 =", "label": "3", "more": 1})
    (prompt,) = all_of(dataset([file], tokenizer))
    assert prompt.tokens == [1, 5, 8, 6, 9]
    assert (prompt.index, prompt.text, prompt.label) == (0, "1 + 2 =", "3")


def test_messages_go_through_the_chat_template_with_one_bos(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", {"q": [{"role": "user", "content": "1 + 2"}], "a": [3, None]})
    (prompt,) = all_of(dataset([file], tokenizer, prompt_key="q", label_key="a"))
    assert prompt.text == "[BOS] user writes 1 + 2 go"
    assert prompt.tokens == [1, 2, 3, 5, 8, 6, 4]
    assert prompt.label == [3, None]


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path, tokenizer):
    records = [{"prompt": [{"role": "user", "content": str(i)}], "label": i} for i in (1, 2, 3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet", row_group_size=2)
    parquet = all_of(dataset([str(tmp_path / "d.parquet")], tokenizer))
    jsonl = all_of(dataset([write(tmp_path / "d.jsonl", *records)], tokenizer))
    assert [(p.tokens, p.label) for p in parquet] == [(p.tokens, p.label) for p in jsonl]
    assert len(parquet) == 3


def test_several_files_are_numbered_through(tmp_path, tokenizer):
    files = [write(tmp_path / f"{i}.jsonl", {"prompt": str(i), "label": i}) for i in (1, 2)]
    prompts = all_of(dataset(files, tokenizer))
    assert [(p.index, p.label) for p in prompts] == [(0, 1), (1, 2)]


def test_every_epoch_is_another_permutation_and_batches_run_on(tmp_path, tokenizer):
    data = dataset(numbered(tmp_path, 10), tokenizer, train_batch_size=4)
    seen = [prompt.index for place in range(0, 20, 4) for prompt in data.batch(place)]  # 20 prompts = 2 epochs
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10)) != first


def test_the_order_is_a_pure_function_of_seed_and_place(tmp_path, tokenizer):
    files = numbered(tmp_path, 10)
    data = dataset(files, tokenizer, train_batch_size=4)
    forward = [data.batch(place) for place in range(0, 32, 4)]
    fresh = dataset(files, tokenizer, train_batch_size=4)
    assert [fresh.batch(place) for place in reversed(range(0, 32, 4))] == forward[::-1]
    assert [dataset(files, tokenizer, seed=1, train_batch_size=4).batch(place) for place in range(0, 32, 4)] != forward
    # Written down: another version of the program must go on in the same order.
    assert [prompt.index for prompt in data.batch(0)] == [1, 0, 2, 4]


def test_without_shuffle_the_file_order_repeats_also_in_batches_longer_than_the_file(tmp_path, tokenizer):
    data = dataset(numbered(tmp_path, 3), tokenizer, train_batch_size=7, shuffle=False)
    assert [prompt.index for prompt in data.batch(7)] == [1, 2, 0, 1, 2, 0, 1]


GOOD = {"prompt": "1", "label": "1"}
NESTED = "[" * 100 + "]" * 100


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the line is empty"),
        ("{broken", "not valid JSON: Expecting property name enclosed in double quotes (column 2)"),
        ("[1]", "expected a JSON object, found list"),
        ({"label": "1"}, "no field 'prompt': correct data.prompt_key"),
        ({"prompt": "1"}, "no field 'label': correct data.label_key"),
        ({"prompt": "", "label": 1}, "the prompt is empty"),
        ({"prompt": None, "label": 1}, "expected a string or a list of {'role': str, 'content': str}, found None"),
        ({"prompt": [{"role": "user"}], "label": 1}, "expected a string or a list of"),
        ({"prompt": [], "label": 1}, "expected a string or a list of"),
        ({"prompt": "1 1 1 1 1", "label": 1}, "the prompt has 6 tokens, more than data.max_prompt_length 5: raise it"),
        (
            '{"prompt": "1 \\ud800", "label": 1}',
            "the prompt is not JSON ('utf-8' codec can't encode character '\\ud800'",
        ),
        (
            '{"prompt": "1", "label": {"\\udfff": 1}}',
            "the label is not JSON ('utf-8' codec can't encode character '\\udfff'",
        ),
        ('{"prompt": [{"role": "\\udc00", "content": ""}], "label": 1}', "the prompt is not JSON ("),
        ('{"prompt": "1", "label": ' + "[" * 100_000 + "}", "not readable JSON: maximum recursion depth exceeded"),
        ('{"prompt": "1", "label": ' + "7" * 5000 + "}", "not readable JSON: Exceeds the limit (4300 digits)"),
        ('{"prompt": "1", "label": 1e999}', "not readable JSON: the number 1e999 is too large"),
        ('{"prompt": "1", "label": NaN}', "not readable JSON: NaN is not JSON: write a number, null or text"),
        (
            '{"prompt": "1", "label": 1, "prompt": "2"}',
            "not readable JSON: the key 'prompt' stands twice in one object",
        ),
        ('{"prompt": "1", "label": -Infinity}', "not readable JSON: -Infinity is not JSON"),
        ('{"prompt": "1\0", "label": 1}', "not valid JSON: Invalid control character at (column 14)"),
        (
            b'{"prompt": "\xff\xfe", "label": 1}',
            "not readable JSON: 'utf-8' codec can't decode byte 0xff in position 12",
        ),
    ],
)
def test_bad_lines_are_named_with_their_file(tmp_path, tokenizer, line, message):
    lines = [json.dumps(x).encode() if isinstance(x, dict) else x for x in (GOOD, line, GOOD)]
    content = b"\n".join(x.encode() if isinstance(x, str) else x for x in lines)
    (tmp_path / "d.jsonl").write_bytes(b" " * 5000 + content)  # binary files are known by their beginning
    [error] = errors_of(str(tmp_path / "d.jsonl"), tokenizer, max_prompt_length=5)
    assert error.startswith("data.train_files: FILE line 2: ")
    assert message in error and "\n" not in error


def test_labels_of_any_json_value_go_to_the_reward_as_they_are(tmp_path, tokenizer):
    labels = [None, True, 1.5, "\u00e9\U0001f600\0", [1, {"a": []}], 10**4000, json.loads(NESTED)]
    file = write(tmp_path / "d.jsonl", *({"prompt": "1", "label": label} for label in labels))
    assert errors_of(file, tokenizer) == []
    assert [prompt.label for prompt in all_of(dataset([file], tokenizer))] == labels


def test_a_fault_of_many_lines_is_reported_once_and_of_many_faults_ten(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", GOOD, *["{"] * 12, "[]", {"prompt": 1, "label": 1}, GOOD)
    first, second, third = errors_of(file, tokenizer)
    assert first.startswith("data.train_files: FILE lines 2, 3, 4 and 9 more: not valid JSON: ")
    remedy = "(data.on_bad_row=skip leaves such out)"
    assert second == f"data.train_files: FILE line 14: expected a JSON object, found list {remedy}"
    file = write(tmp_path / "d.jsonl", *({"prompt": number, "label": 1} for number in range(30)), GOOD)
    *errors, last = errors_of(file, tokenizer)
    assert [error.split(":")[1] for error in errors] == [f" FILE line {number}" for number in range(1, 11)]
    assert last == "data.train_files: FILE lines 11, 12, 13 and 17 more: wrong in other ways"


def test_a_key_that_is_wrong_is_reported_once_with_the_fields_of_the_file(tmp_path, tokenizer):
    records = [{"question": str(number), "answer": number} for number in range(300)]
    file = write(tmp_path / "d.jsonl", *records)
    fault = "FILE {}s 1, 2, 3 and 297 more: no field '{}': correct data.{}_key, or add it"
    has = " (data.on_bad_row=skip leaves such out); the file has: question, answer"
    assert errors_of(file, tokenizer) == [
        f"data.train_files: {fault.format('line', name, name)}{has}" for name in ("prompt", "label")
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    [error] = errors_of(str(tmp_path / "d.parquet"), tokenizer, prompt_key="question")
    assert error == f"data.train_files: {fault.format('row', 'label', 'label')}{has}"


def changed(config: Config, **keys: object) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update=keys)})


def check_shares(rank: int, world_size: int, folder: Path) -> None:
    """Two ranks check half of the lines each, and both report all faults."""
    import torch.distributed as dist

    from megappo.batch.exchange import Exchange
    from megappo.rollouts.datasets import Datasets

    tokenizer = load_tokenizer(str(folder / "model"))
    config = Config.model_validate(
        {
            "model": {"path": str(folder / "model")},
            "data": {"train_files": [str(folder / "d.jsonl")], "train_batch_size": 10},
            "trainer": {"output_dir": "out"},
        }
    )
    exchange = Exchange(dist.group.WORLD)

    def opened(config: Config) -> Datasets:
        return Datasets(tokenizer, (), 100, *open_datasets(config, tokenizer))

    with pytest.raises(ConfigError) as caught:
        opened(config).check(exchange)
    lines = [error.partition("d.jsonl ")[2].partition(" (data.on_bad_row")[0] for error in caught.value.errors]
    assert lines == ["line 3: the line is empty", "lines 4, 9: expected a JSON object, found list"]
    with pytest.raises(ConfigError) as caught:
        opened(changed(config, label_key="x")).check(exchange)
    assert "lines 1, 2, 5 and 4 more: no field 'x': correct data.label_key" in "".join(caught.value.errors)
    skipping = opened(changed(config, on_bad_row="skip", train_batch_size=7))
    total, *left_out = skipping.check(exchange)
    assert total == "left out: data.train_files: 3 of 10 records"
    assert [line.partition("d.jsonl ")[2] for line in left_out] == lines
    assert len(skipping.train) == 7
    assert exchange.all_gather(skipping.train.indices(0)) == [skipping.train.indices(0)] * world_size
    (folder / f"good{rank}.jsonl").write_text((json.dumps(GOOD) + "\n") * 10)
    good = changed(config, train_files=(str(folder / f"good{rank}.jsonl"),))
    opened(good).check(exchange)
    assert len(opened(good).train.batch(0)) == 10


def test_ranks_share_the_check_and_all_report_everything(tmp_path, tokenizer_folder):
    write(tmp_path / "d.jsonl", GOOD, GOOD, "", "[]", *[GOOD] * 4, "[]", GOOD)
    run_ranks(2, check_shares, tmp_path)


def check_unpacking(rank: int, world_size: int, folder: Path) -> None:
    """Two ranks of a node read what the first of them has written."""
    import torch.distributed as dist

    from megappo.batch.exchange import Exchange
    from megappo.rollouts.datasets import unpacked_once

    exchange = Exchange(dist.group.WORLD)

    def refuse(target: BinaryIO) -> None:
        raise RecordsError("is no file")

    with pytest.MonkeyPatch.context() as patch:
        for ranks_of_node, written in ((2, b"rank 0"), (1, b"rank %d" % rank)):
            patch.setenv("LOCAL_WORLD_SIZE", str(ranks_of_node))
            with unpacked_once(exchange, lambda target: target.write(b"rank %d" % rank)) as file:
                assert file.read() == written
            with pytest.raises(RecordsError, match="^is no file$"):
                unpacked_once(exchange, refuse)


def test_ranks_of_a_node_unpack_a_file_once(tmp_path):
    run_ranks(2, check_unpacking, tmp_path)


def test_tokens_that_a_model_does_not_know_are_refused(tmp_path, tokenizer):
    file = write(tmp_path / "d.jsonl", GOOD, {"prompt": "1 =", "label": 1}, GOOD)
    assert errors_of(file, tokenizer, vocab_size=WORDS["="] + 1) == []
    [error] = errors_of(file, tokenizer, vocab_size=WORDS["="])
    assert error.startswith(
        f"data.train_files: FILE line 2: the prompt has token {WORDS['=']}, for which a model has no"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the prompt is chat messages but the tokenizer has no chat template: use strings, or add one, chat_t"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses the messages: Template",
        ),
        ("{{ messages[5].content }}", "the chat template refuses the messages: UndefinedError: "),
        ("{{ ' ' }}", "the chat template leaves out content of a message of role 'user'"),
        ("{{ messages[0].content and ' ' }}", "the prompt is empty: it has no token"),
    ],
)
def test_trouble_with_the_chat_template_names_the_lines(tmp_path, tokenizer, template, message):
    tokenizer.chat_template = template
    file = write(tmp_path / "d.jsonl", GOOD, *[{"prompt": [{"role": "user", "content": "1"}], "label": 1}] * 2)
    [error] = errors_of(file, tokenizer)
    assert error.startswith(f"data.train_files: FILE lines 2, 3: {message}")


def parquet(**columns: object) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue().to_pybytes()


ROW = parquet(prompt=["1"], label=["1"])
TEXT = json.dumps(GOOD) + "\n"
NO_DATA = {
    "d.csv": (b"1", "is neither .jsonl, .jsonl.gz nor .parquet: convert it"),
    "empty.jsonl": (b"", "is empty: put prompts in it"),
    "empty.parquet": (parquet(prompt=[], label=[]), "is empty: put prompts in it"),
    "gzip.jsonl": (
        gzip.compress(TEXT.encode()),
        "is compressed by gzip: unpack it (gunzip), or end its name in .jsonl.gz",
    ),
    "broken.jsonl.gz": (gzip.compress(TEXT.encode())[:-20], "is not a readable gzip file"),
    "text.jsonl.gz": (TEXT.encode(), "is not a readable gzip file"),
    "gzip.parquet": (gzip.compress(ROW), "is compressed by gzip: unpack it (gunzip), or end its name in .jsonl.gz"),
    "wide.jsonl": (TEXT.encode("utf-16"), "is UTF-16: convert it (iconv -f UTF-16 -t UTF-8)"),
    "wide_without_mark.jsonl": (TEXT.encode("utf-16-le"), "is binary: expected one JSON object a line, in UTF-8"),
    "misnamed.jsonl": (ROW, "is parquet: give it a name that ends in .parquet"),
    "misnamed.parquet": (TEXT.encode(), "is not a readable parquet file ("),
    "pretty.jsonl": (
        json.dumps(GOOD, indent=2).encode(),
        "is JSON spread over lines: write one object a line (jq -c .)",
    ),
    "pretty_list.jsonl": (json.dumps([GOOD], indent=2).encode(), "is a list in JSON: write one object a line (jq -c "),
    "list.jsonl": (json.dumps([GOOD]).encode(), "is a list in JSON: write one object a line (jq -c '.[]')"),
    "pointer.jsonl": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "is a Git LFS pointer, not the file itself",
    ),
    "cut.parquet": (ROW[:-9], "is not a readable parquet file ("),
    "footer.parquet": (ROW[:-20] + bytes(16) + b"PAR1", "is not a readable parquet file ("),
}


@pytest.mark.parametrize("name", NO_DATA)
def test_files_that_are_no_data_are_refused(tmp_path, tokenizer, name):
    content, message = NO_DATA[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        dataset([str(tmp_path / name)], tokenizer)
    assert str(caught.value).startswith(f"data.train_files: {tmp_path / name} {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"^data.train_files: cannot read nowhere.jsonl \(No such file"):
        dataset(["nowhere.jsonl"], tokenizer)


def test_odd_columns_of_a_parquet_file(tmp_path, tokenizer):
    file = tmp_path / "d.parquet"
    odd = {
        "the prompt": (parquet(prompt=[1], label=[1]), "row 1: expected a string or a list of"),
        "bytes": (
            parquet(prompt=["1"], label=[b"1"]),
            "row 1: the label is not JSON (Object of type bytes",
        ),
        "a date": (
            parquet(prompt=["1"], label=[datetime(2020, 1, 1)]),
            "row 1: the label is not JSON (Object of",
        ),
        "no number": (parquet(prompt=["1", "1"], label=[1.0, float("nan")]), "row 2: the label is not JSON ("),
        "a year that Python has not": (
            parquet(prompt=["1", "1"], label=pyarrow.array([1, 2**52], pyarrow.timestamp("s"))),
            "row 2: cannot be read: ",
        ),
    }
    for content, message in odd.values():
        file.write_bytes(content)
        assert any(error.startswith(f"data.train_files: FILE {message}") for error in errors_of(str(file), tokenizer))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array(["1"])] * 3, names=["prompt", "label", "label"]), file
    )
    with pytest.raises(
        ConfigError, match="d.parquet has several columns of one name among .*label: rename all but one"
    ):
        dataset([str(file)], tokenizer)


def test_a_mark_before_utf_8_and_ends_of_windows_are_read(tmp_path, tokenizer):
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode() * 2)
    assert errors_of(str(tmp_path / "d.jsonl"), tokenizer) == []
    assert len(all_of(dataset([str(tmp_path / "d.jsonl")], tokenizer))) == 2


def test_a_step_cannot_take_more_prompts_than_there_are(tmp_path, tokenizer):
    files = numbered(tmp_path, 10)
    assert dataset(files, tokenizer, train_batch_size=10).batch_errors() == []
    [error] = dataset(files, tokenizer, train_batch_size=11).batch_errors()
    assert error.startswith("data.train_batch_size 11 takes 11 prompts of data.train_files, which has 10, so that a")


def test_lines_that_are_read_when_a_step_takes_them_must_stay_what_they_were(tmp_path, tokenizer):
    [file] = numbered(tmp_path, 10)
    data = dataset([file], tokenizer, train_batch_size=4)
    data.batch(0)
    with open(file, "a") as more:
        more.write(TEXT)
    with pytest.raises(OSError, match=r"d.jsonl was changed while it is read: leave data files alone, and start again"):
        data.batch(0)
    (tmp_path / "new").write_text(TEXT)
    data = dataset([file], tokenizer, train_batch_size=11)
    before = data.batch(0)
    (tmp_path / "new").rename(file)  # puts another file in its place, of which the run knows nothing
    assert data.batch(0) == before


KINDS = ("d.jsonl", "d.jsonl.gz", "d.parquet")


@pytest.mark.parametrize("name", KINDS[1:])
def test_a_file_that_has_no_room_where_it_is_unpacked_is_an_error(tmp_path, tokenizer, name):
    table = pyarrow.table({"prompt": [str(i) for i in range(3000)], "label": list(range(3000))})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(TEXT.encode() * 3000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=f"{name} does not fit, unpacked, into .*: set TMPDIR to a folder with"):
            dataset([str(tmp_path / name)], tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", KINDS)
def test_any_record_of_a_large_file_is_found(tmp_path, tokenizer, name):
    """More than are read at once, unpacked at once, or are in a row group; of all lengths."""
    records = [{"prompt": "1 " * (1 + i % 7), "label": i, "tags": [str(i)] * (i % 3)} for i in range(2500)]
    text = write(tmp_path / "d.jsonl", *records)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(Path(text).read_bytes()))
    table = pyarrow.Table.from_pylist(records)
    table = table.set_column(1, "label", table["label"].dictionary_encode())  # each row group has one of its own
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=700)
    keys = {"takes": InputSpec(("tags",)), "max_prompt_length": 7, "too_long": "skip"}
    data = dataset([str(tmp_path / name)], tokenizer, **keys)
    parts = [data.check(100, lambda size, rank=rank: share(range(size), rank, 3)) for rank in range(3)]
    assert data.errors(parts) == []
    data.leave_out(parts)
    assert list(data.kept) == [i for i in range(2500) if i % 7 < 6]  # seven words and [BOS] are too many
    chosen = [2499, 0, 1000, 999, 700, 699, 1400, *range(1996, 2004)]
    assert [(p.text, p.label, p.columns["tags"]) for p in data.at(chosen)] == [
        (records[i]["prompt"], i, records[i]["tags"]) for i in chosen
    ]
