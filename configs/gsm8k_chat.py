"""GSM8K's questions as chats, for models that follow instructions.

python configs/gsm8k_chat.py data/gsm8k/train.parquet data/gsm8k/chat_train.jsonl
"""

import json
import sys

import pyarrow.parquet as parquet

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(source: str, target: str) -> None:
    """Write a line for each row: `prompt`, a chat, and `label`, the worked answer."""
    with open(target, "w", encoding="utf-8") as file:
        for row in parquet.read_table(source).to_pylist():
            chat = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
            file.write(json.dumps({"prompt": chat, "label": row["answer"]}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
