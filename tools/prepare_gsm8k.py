"""Turn GSM8K's published files into prompts for reward.function=gsm8k.

.venv/bin/python tools/prepare_gsm8k.py --input train.jsonl test.jsonl --output data/gsm8k

The files: grade_school_math/data/{train,test}.jsonl of https://github.com/openai/grade-school-math, or the parquet
files in main/ of https://huggingface.co/datasets/openai/gsm8k. The label is the number behind the answer's ####.
"""

import sys

from preparing import Record, records_of, run

from megappo.userland.graders.answers import MARK

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""The instruction in verl's examples."""


def prepared(record: Record) -> Record:
    """Return a question with the instruction, and the answer's number without its commas."""
    _, mark, label = record["answer"].rpartition(MARK)
    if not mark or not label.strip():
        raise ValueError(f"the answer has nothing behind a {MARK}")
    return {"prompt": f"{record['question']} {INSTRUCTION}", "label": label.strip().replace(",", "")}


if __name__ == "__main__":
    sys.exit(run(__doc__, records_of, prepared))
