"""Turn MATH's published files into prompts for reward.function=math.

.venv/bin/python tools/prepare_math.py --input MATH/train MATH/test --output data/math

Inputs: folders with a .json for each problem, in whatever folders below (the published archive of
https://github.com/hendrycks/math), or .jsonl and .parquet files with "problem" and "solution", as on
https://huggingface.co/datasets: EleutherAI/hendrycks_math, HuggingFaceH4/MATH-500. The label is the answer that the
solution boxes; level, a number, and subject are kept.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from preparing import PrepareError, Record, records_of, run

from megappo.userland.graders.answers import last_boxed

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""The instruction in verl's examples."""


def problems_of(source: Path) -> Iterator[Record]:
    """Yield the problems of a folder, in the order of their files' names, or of a file."""
    if not source.is_dir():
        yield from records_of(source)
        return
    files = sorted(source.rglob("*.json"))
    if not files:
        raise PrepareError(f"{source} holds no .json files: name the folder train or test of MATH's archive")
    for file in files:
        try:
            yield json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise PrepareError(f"{file} is not JSON: {error}") from error


def prepared(record: Record) -> Record:
    """Return a problem with the instruction, its boxed answer, level and subject."""
    label = last_boxed(record["solution"])
    if not label:
        raise ValueError("the solution boxes no answer")
    level = str(record["level"]).removeprefix("Level ")
    return {
        "prompt": f"{record['problem']} {INSTRUCTION}",
        "label": label,
        "level": int(level) if level.isdecimal() else None,  # a few have "Level ?"
        "subject": record["type"] if "type" in record else record["subject"],
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, problems_of, prepared))
