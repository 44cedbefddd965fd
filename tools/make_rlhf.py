"""Make the model and the data of launch/rlhf.sh: sums again, but no program of the chain knows what a right answer is.

A pupil learns from demonstrations of careless people, who forget each carry with probability FORGET. A teacher then
compares pairs of answers by a hidden rule: the right sum is better than any other answer. Preferences show it, no
label does. The labels of val.jsonl are for the judge at the end. No held-out question, in either order of its numbers,
is used in training.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import make_quickstart as quickstart
import torch
from transformers import GenerationConfig

FORGET = 0.6
DEMONSTRATIONS, PREFERENCES = 4, 6
"""Answers, and pairs of answers, to each question."""
FAULTS = {"careless": 3, "close": 3, "changed": 3, "missing": 1, "added": 1}
"""Kinds of wrong answers in pairs, with their weights."""
Questions = Iterable[tuple[int, int]]


def worse_answer(a: int, b: int, rng: random.Random) -> str:
    """Return a wrong answer: of a careless adder, close to the right one, or with a digit changed, missing or added."""
    right = answer = str(a + b)
    while answer == right:
        kind = rng.choices(*zip(*FAULTS.items(), strict=True))[0]
        place, digit = rng.randrange(len(right)), rng.choice("0123456789")
        if kind == "careless":
            answer = quickstart.careless_sum(a, b, FORGET, rng)
        elif kind == "close":
            answer = str(abs(a + b + rng.choice((-100, -10, -1, 1, 10, 100))))
        elif kind == "changed":
            answer = right[:place] + digit + right[place + 1 :]
        elif kind == "missing":
            answer = right[:place] + right[place + 1 :]
        else:
            answer = right[:place] + digit + right[place:]
    return answer


def demonstration(a: int, b: int, rng: random.Random) -> dict[str, str]:
    """Return an answer of careless people."""
    return {"response": quickstart.careless_sum(a, b, FORGET, rng)}


def preference(a: int, b: int, rng: random.Random) -> dict[str, str]:
    """Return a pair that the teacher has compared."""
    return {"chosen": str(a + b), "rejected": worse_answer(a, b, rng)}


def write(
    path: Path, questions: Questions, times: int, make: Callable[..., dict[str, Any]], rng: random.Random
) -> None:
    """Write a record for each question, several times, in a random order."""
    records = [{"prompt": quickstart.question(a, b), **make(a, b, rng)} for a, b in questions for _ in range(times)]
    rng.shuffle(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def build(folder: Path, seed: int) -> None:
    """Write the files into `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    train, held_out = quickstart.split_questions(seed)
    for name, questions in (("train", train), ("val", held_out)):
        write(folder / f"demonstrations_{name}.jsonl", questions, DEMONSTRATIONS, demonstration, rng)
        write(folder / f"preferences_{name}.jsonl", questions, PREFERENCES, preference, rng)
    write(folder / "train.jsonl", train, 1, lambda a, b, rng: {}, rng)
    write(folder / "val.jsonl", held_out, 1, lambda a, b, rng: {"label": str(a + b)}, rng)
    model = quickstart.new_model()
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(folder / "model")
    quickstart.write_tokenizer(folder / "model")


def main() -> None:
    """Build the model and the data."""
    args = quickstart.parse_args(__doc__)
    with quickstart.building(args.output) as folder:
        build(folder, args.seed)


if __name__ == "__main__":
    main()
