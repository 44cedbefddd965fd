"""Data as verl's example of GSM8K has them."""

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


def record(index: int) -> dict[str, object]:
    """A row: the sum of two numbers, of four digits in the end."""
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
    """A parquet file in verl's schema."""
    rows = [record(index) for index in range(num_rows)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), file, row_group_size=64)
    return str(file)
