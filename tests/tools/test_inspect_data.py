"""Prompts and errors of a config's data, shown before a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planning import REPOSITORY, run_here, write_run

from megappo_tools.inspect_data import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write 300 prompts of 4 tokens, and held-out ones of 1 to 30 tokens, where the limit is 24."""
    write_run(tmp_path)
    held_out = [{"prompt": "1" * length, "label": length, "source": "ones"} for length in range(1, 31)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(record) + "\n" for record in held_out))
    return tmp_path


def inspect(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run_here(main, folder, "run.yaml", *arguments)


def test_prompts_their_lengths_and_tokens(folder):
    command = [sys.executable, REPOSITORY / "tools" / "inspect_data.py", "run.yaml", "--show", "1", "--tokens"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "data.train_files: train.jsonl: 300 records, 300 inspected",
        "  tokens: 4 to 4, median 4, 95 % have at most 4; data.max_prompt_length 24",
        "        4 to 4             300 " + "#" * 40,
        "-" * 80,
        "record 1: 4 tokens, label '2'",
        "1+1=",
        "2='1' 4='+' 2='1' 5='='",
        "",
    ]


def test_special_tokens_are_marked(folder):
    (folder / "train.jsonl").write_text('{"prompt": "1</s>1", "label": "2"}\n')
    done = inspect(folder, "--show", "1", "--tokens")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-2] == "2='1' [1='</s>'] 2='1'"


def test_errors_are_reported_with_the_exit_code(folder):
    (folder / "reward.py").write_text("def f(responses, source): return [0.0] * len(responses)\n")
    data = ("data.train_files=val.jsonl", "data.val_files=val.jsonl", "reward.function=reward.py:f")
    done = inspect(folder, *data, "--show", "2", "--records", "10")
    assert (done.returncode, done.stderr) == (1, "")
    train, val = done.stdout.strip().split("\n\n")
    assert train == val.replace("data.val_files", "data.train_files")
    lines = val.splitlines()
    assert lines[0] == "data.val_files: val.jsonl: 30 records, 10 inspected"
    too_long = (
        "the prompt has {} tokens, more than data.max_prompt_length 24: raise it, drop this, or set data.too_long"
    )
    assert lines[1:3] == [f"  wrong: data.val_files: val.jsonl line {n}: {too_long.format(n)}" for n in (25, 28)]
    assert "  tokens: 1 to 28, median 13, 95 % have at most 28; data.max_prompt_length 24" in lines
    assert [line for line in lines if line.startswith("record ")] == [
        "record 1: 1 tokens, label 1",
        "record 4: 4 tokens, label 4",
        "record 28: 28 tokens, label 28",
    ]
    assert lines.count("  source: 'ones'") == 3


def test_an_evaluation_set_has_the_fields_of_its_own_function(folder):
    (folder / "reward.py").write_text("def f(responses, source): return [0.0] * len(responses)\n")
    own = "eval.datasets.plain={files: train.jsonl, reward: exact_match}"
    data = ("data.train_files=val.jsonl", "data.val_files=[]", "data.too_long=skip", "trainer.eval_interval=1", own)
    done = inspect(folder, "--show", "0", "reward.function=reward.py:f", *data)
    assert (done.returncode, done.stderr) == (0, "")
    assert "eval.datasets.plain.files: train.jsonl: 300 records, 300 inspected" in done.stdout


def test_lines_that_are_no_prompts_do_not_hide_the_others(folder):
    with (folder / "train.jsonl").open("a") as file:
        file.write("{\n")
    done = inspect(folder, "--show", "0")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "data.train_files: train.jsonl: 301 records, 301 inspected"
    assert lines[1].startswith("  wrong: data.train_files: train.jsonl line 301: not valid JSON")
    assert lines[2].startswith("  tokens: 4 to 4, median 4")


def test_what_a_run_leaves_out_is_not_shown_among_what_it_takes(folder):
    done = inspect(folder, "data.train_files=val.jsonl", "data.val_files=[]", "data.too_long=skip", "--show", "1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1] == "  left out: data.train_files: 6 of 30 records"
    assert lines[3].startswith("  tokens: 1 to 24, median 12, ")
    assert [line for line in lines if line.startswith("record ")] == [
        "record 1: 1 tokens, label 1",
        "record 24: 24 tokens, label 24",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=absent", "error: command line: model.path: no tokenizer in absent"),
        ("data.train_files=absent.jsonl", "error: command line: data.train_files: cannot read absent.jsonl"),
        ("data.train_fils=x", "error: command line: data.train_fils"),
        ("reward.function=absent", "error: command line: reward.function 'absent': expected exact_match"),
    ],
)
def test_what_cannot_be_looked_at_is_an_error(folder, override, message):
    done = inspect(folder, override)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message), done.stderr


@pytest.mark.parametrize(
    ("kind", "record", "num_tokens", "num_trained", "shown"),
    [
        ("sft", {"prompt": "1+1=", "response": "2"}, 6, 2, ["1 + 1 => 2 </s><"]),
        ("reward_model", {"prompt": "1+1=", "chosen": "2", "rejected": "1"}, 5, 1, ["1 + 1 => 2<", "1 + 1 => 1<"]),
    ],
)
def test_examples_and_pairs_show_where_they_have_a_loss(folder, kind, record, num_tokens, num_trained, shown):
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "mine.yaml").write_text(
        "model: {path: model, dtype: fp32}\n"
        "data: {train_files: data.jsonl, val_files: data.jsonl, train_batch_size: 1, max_length: 16}\n"
        f"trainer: {{kind: {kind}, output_dir: out, total_steps: 1}}\n"
    )
    done = run_here(main, folder, "mine.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    train, val = done.stdout.strip().split("\n\n")
    assert val == train.replace("data.train_files", "data.val_files")
    first, lengths, _, _, *rows = train.splitlines()
    assert first == "data.train_files: data.jsonl: 1 records, 1 inspected"
    assert lengths.endswith(f"95 % have at most {num_tokens}; data.max_length 16")
    marked = "with a loss" if kind == "sft" else "scored"
    length = f"record 1: {num_tokens} tokens, {num_trained} of them, between > and <, {marked}"
    assert rows == [line for text in shown for line in (length, text)]
