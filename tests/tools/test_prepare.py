"""Published data sets become prompts whose labels suit their graders."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megappo.userland.graders.answers import gsm8k, math

TOOLS = Path(__file__).parents[2] / "tools"
# the first two of GSM8K's training set, and one of its answers with a comma
GSM8K = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
        "How many clips did Natalia sell altogether in April and May?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips "
        "altogether in April and May.\n#### 72",
    },
    {
        "question": "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How "
        "much did she earn?",
        "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nWorking 50 minutes, she earned 0.2 x 50 = "
        "$<<0.2*50=10>>10.\n#### 10",
    },
    {"question": "How many are ten hundreds?", "answer": "10 x 100 = 1,000\n#### 1,000"},
]
MATH = {
    "problem": "What is $\\frac12+\\frac14$?",
    "level": "Level 2",
    "type": "Prealgebra",
    "solution": "It is $\\boxed{\\frac{3}{4}}$.",
}


def run(tool: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, TOOLS / tool, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_gsm8k(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in GSM8K))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "test-00000-of-00001.parquet")
    inputs = [tmp_path / "train.jsonl", tmp_path / "test-00000-of-00001.parquet"]
    done = run("prepare_gsm8k.py", "--input", *inputs, "--output", tmp_path / "out", "--system", "Think.")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"{tmp_path}/out/train.jsonl: 3 prompts from {tmp_path}/train.jsonl"
    train = lines(tmp_path / "out" / "train.jsonl")
    assert train == lines(tmp_path / "out" / "test-00000-of-00001.jsonl")
    assert [record["label"] for record in train] == ["72", "10", "1000"]
    system, user = train[2]["prompt"]
    assert system == {"role": "system", "content": "Think."}
    question = 'How many are ten hundreds? Let\'s think step by step and output the final answer after "####".'
    assert user == {"role": "user", "content": question}
    published = [record["answer"] for record in GSM8K]
    assert all(gsm8k(one, record["label"])["score"] for one, record in zip(published, train, strict=True))


def test_math(tmp_path):
    for subject, number in (("algebra", 2), ("algebra", 10), ("geometry", 1)):
        file = tmp_path / "train" / subject / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps(MATH | {"problem": f"{subject} {number}", "level": "Level ?" if number == 1 else "Level 5"})
        )
    (tmp_path / "test.jsonl").write_text(
        json.dumps({**MATH, "level": 3, "subject": "Algebra", "unique_id": "test/1.json", "answer": "\\frac{3}{4}"})
        + "\n"
    )
    out = tmp_path / "out"
    done = run("prepare_math.py", "--input", tmp_path / "train", tmp_path / "test.jsonl", "--output", out, "--text")
    assert (done.returncode, done.stderr) == (0, "")
    train, [test] = lines(out / "train.jsonl"), lines(out / "test.jsonl")
    assert [(record["prompt"][:9], record["level"]) for record in train] == [
        ("algebra 1", 5),
        ("algebra 2", 5),
        ("geometry ", None),
    ]
    assert test == {
        "prompt": "What is $\\frac12+\\frac14$? Let's think step by step and output the final answer within \\boxed{}.",
        "label": "\\frac{3}{4}",
        "level": 3,
        "subject": "Prealgebra",
    }
    assert all(math(MATH["solution"], record["label"])["score"] for record in (*train, test))


@pytest.mark.parametrize(
    ("tool", "record", "message"),
    [
        ("prepare_gsm8k.py", {"question": "?", "answer": "5"}, "record 2: the answer has nothing behind a ####"),
        ("prepare_gsm8k.py", MATH, "record 2: no field 'answer'; it has problem, level, type, solution: is this the"),
        ("prepare_math.py", MATH | {"solution": "5"}, "record 2: the solution boxes no answer"),
        ("prepare_gsm8k.py", {"question": "?", "answer": None}, "record 2: "),
        ("prepare_math.py", [MATH], "record 2: expected an object, found list"),
        ("prepare_math.py", GSM8K[0], "record 2: no field 'solution'; it has question, answer: is this the right"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path, tool, record, message):
    right = GSM8K[0] if "gsm8k" in tool else MATH
    (tmp_path / "data.jsonl").write_text(json.dumps(right) + "\n" + json.dumps(record) + "\n")
    done = run(tool, "--input", tmp_path / "data.jsonl", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/data.jsonl, {message}")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(tmp_path):
    for name in ("a/train.jsonl", "b/train.jsonl.gz"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes((gzip.compress if name.endswith("gz") else bytes)(json.dumps(MATH).encode()))
    one, other, to = tmp_path / "a" / "train.jsonl", tmp_path / "b" / "train.jsonl.gz", ("--output", tmp_path / "out")
    done = run("prepare_math.py", "--input", one, other, *to)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: several inputs would become {tmp_path}/out/train.jsonl: prepare them one by")
    assert run("prepare_math.py", "--input", other, *to).returncode == 0
    done = run("prepare_math.py", "--input", one, *to)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/out/train.jsonl is there already: remove it, or choose another --output\n"


@pytest.mark.parametrize(
    ("tool", "name", "message"),
    [
        ("prepare_gsm8k.py", "absent.jsonl", "absent.jsonl (No such file or directory): correct the path"),
        ("prepare_gsm8k.py", "data.csv", "is neither .jsonl, .jsonl.gz nor .parquet"),
        ("prepare_math.py", "", "holds no .json files: name the folder train or test of MATH's archive"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path, tool, name, message):
    done = run(tool, "--input", tmp_path / name, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and message in done.stderr and "Traceback" not in done.stderr
