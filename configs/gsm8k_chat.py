"""GSM8K's questions as chats, for models that follow instructions.

python configs/gsm8k_chat.py data/gsm8k/train.parquet data/gsm8k/chat_train.jsonl
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as parquet

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(source: str, target: str) -> None:
    """Write a line for each row: `prompt`, a chat, and `label`, the worked answer."""
    rows = parquet.read_table(source, columns=["question", "answer"]).to_pylist()
    Path(target).write_text("".join(line(**row) for row in rows), encoding="utf-8")


def line(question: str, answer: str) -> str:
    """A row as JSON."""
    chat = [{"role": "user", "content": f"{question} {INSTRUCTION}"}]
    return json.dumps({"prompt": chat, "label": answer}, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
