"""Data and a reward function with the schema and the signature of verl's GSM8K examples."""

from pathlib import Path

import pyarrow
import pyarrow.parquet

QUESTION = 'What is {a} plus {b}? Let\'s think step by step and output the final answer after "####".'
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
SCHEMA = pyarrow.schema(
    {
        "data_source": pyarrow.string(),
        "prompt": pyarrow.list_(pyarrow.struct({"content": pyarrow.string(), "role": pyarrow.string()})),
        "ability": pyarrow.string(),
        "reward_model": pyarrow.struct({"ground_truth": pyarrow.string(), "style": pyarrow.string()}),
        "extra_info": pyarrow.struct(
            {
                "answer": pyarrow.string(),
                "index": pyarrow.int64(),
                "question": pyarrow.string(),
                "split": pyarrow.string(),
            }
        ),
    }
)
COMPUTE_SCORE = '''
"""Strict scoring of GSM8K: the number after the first "#### " must be the answer, to the letter."""

import re


def extract_solution(solution_str):
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    return None if found is None else found.group(1).replace(",", "")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    assert extra_info["split"] == "train" and not kwargs
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return {"score": 1.0 if answer == ground_truth else 0.1, "acc": answer == ground_truth}
'''


def record(index: int) -> dict[str, object]:
    """Return a row: the sum of two numbers, of four digits in the last rows."""
    a, b = 37 + 7 * index, 45 + index
    question = QUESTION.format(a=a, b=b)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {
            "split": "train",
            "index": index,
            "answer": f"{a} plus {b} is <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b:,}",
            "question": f"What is {a} plus {b}?",
        },
    }


def write_gsm8k(file: Path, num_rows: int = 200) -> str:
    """Write a parquet file in verl's schema."""
    rows = [record(index) for index in range(num_rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), file, row_group_size=64)
    return str(file)


def write_compute_score(file: Path) -> str:
    """Write a reward.function with verl's signature."""
    file.write_text(COMPUTE_SCORE)
    return f"{file}:compute_score"
