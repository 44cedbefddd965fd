"""Make the quickstart's dataset and model: sums of two-digit numbers, and a small Qwen2 that mostly forgets the carry.

The model is warm-started here by supervised steps on the answers of a careless pupil, who forgets each carry with
probability FORGET ("37+45=" -> "72"). So its greedy answers to held-out questions are mostly wrong wherever a carry is
due, while its samples often carry: PPO has the right answer to find and reinforce. No held-out question, in either
order of its numbers, is used in training.
"""

import argparse
import gc
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.status import STATUS

if __name__ == "__main__":
    STATUS.start("imports")

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = [PAD, EOS, UNKNOWN, *"0123456789+-="]
NUMBERS = range(10, 100)
HELD_OUT_PAIRS = 200  # unordered; each gives one question, or two when its numbers differ
FORGET = 0.6
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # about 1 / sqrt(hidden_size); the default, meant for large models, learns late
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(EOS),
    "pad_token_id": VOCABULARY.index(PAD),
}
"""The model's config."""

STEPS = 1000
BATCH_SIZE = 128
PEAK_LR = 4e-3
WARMUP_STEPS = 100
MAX_ANSWER_TOKENS = 4  # three digits and <eos>
IGNORED = -100  # label of a token without loss

PARTS = ("train.jsonl", "val.jsonl", "model")


# --- questions ---


def split_questions(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (training, held-out) questions; a held-out (a, b) is absent from training as (b, a) too."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    rng = random.Random(seed)
    rng.shuffle(pairs)
    parts = pairs[HELD_OUT_PAIRS:], pairs[:HELD_OUT_PAIRS]
    train, held_out = ([*part, *((b, a) for a, b in part if a != b)] for part in parts)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def question(a: int, b: int) -> str:
    """Return the prompt, always six tokens."""
    return f"{a}+{b}="


def careless_sum(a: int, b: int, forget: float, rng: random.Random) -> str:
    """Add two two-digit numbers, forgetting each carry with probability `forget`; 0 gives the right sum."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + _carry(ones, forget, rng)
    return f"{'1' * _carry(tens, forget, rng)}{tens % 10}{ones % 10}"


def _carry(column: int, forget: float, rng: random.Random) -> int:
    return int(column >= 10 and rng.random() >= forget)


def write_questions(path: Path, questions: list[tuple[int, int]]) -> None:
    """Write one JSON object a line: the prompt and, as label, the right answer."""
    lines = [json.dumps({"prompt": question(a, b), "label": str(a + b)}) for a, b in questions]
    path.write_text("\n".join(lines) + "\n")


# --- model ---


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per character, which adds nothing to a text."""
    save_tokenizer(folder, VOCABULARY, (PAD, EOS, UNKNOWN), ".")


def save_tokenizer(
    folder: Path, vocabulary: Sequence[str], special: Sequence[str], pattern: str, **settings: Any
) -> None:
    """Write a tokenizer with one token for each text of a vocabulary, by its place there.

    Args:
        special: special ones of these texts.
        pattern: regular expression of the parts of a text that are tokens.
        settings: further settings of tokenizer_config.json.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def new_model() -> Qwen2ForCausalLM:
    """Return a Qwen2 of two layers that divides by two in every parallel dimension."""
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(VOCABULARY), max_position_embeddings=64, **SHAPE))


def warm_start(model: Qwen2ForCausalLM, questions: list[tuple[int, int]], rng: random.Random) -> None:
    """Train on the careless pupil's answers."""
    batches = (_supervised_batch(rng.choices(questions, k=BATCH_SIZE), rng) for _ in itertools.count())
    supervise(model, batches, STEPS, lr_factor)


def supervise(
    model: PreTrainedModel,
    batches: Iterator[Mapping[str, torch.Tensor]],
    num_steps: int,
    factor: Callable[[int], float],
    name: str = "training",
) -> None:
    """Train the parameters that need gradients with supervised steps of Adam.

    Args:
        batches: arguments of the model, such as input_ids and labels [batch, tokens].
        factor: factor of the learning rate, by the number of steps done.
        name: name of the training, for messages.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=PEAK_LR, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    heartbeat.enter(f"supervised {name}")
    for step, batch in enumerate(itertools.islice(batches, num_steps), start=1):
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        heartbeat.count(step, num_steps, f"steps, loss {loss.item():.3f}")


def lr_factor(step: int, num_steps: int = STEPS) -> float:
    """Return the factor of linear warm-up and cosine decay."""
    return min((step + 1) / WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))


def _supervised_batch(questions: list[tuple[int, int]], rng: random.Random) -> dict[str, torch.Tensor]:
    """Return tokens and labels, [batch, 10] each; the loss covers the answer and its <eos> only."""
    prompts = [list(question(a, b)) for a, b in questions]
    answers = [[*careless_sum(a, b, FORGET, rng), EOS] for a, b in questions]
    rows = [p + a + [PAD] * (MAX_ANSWER_TOKENS - len(a)) for p, a in zip(prompts, answers, strict=True)]
    tokens = torch.tensor([[VOCABULARY.index(token) for token in row] for row in rows])
    labels = tokens.masked_fill(tokens == VOCABULARY.index(PAD), IGNORED)
    labels[:, : len(prompts[0])] = IGNORED
    return {"input_ids": tokens, "labels": labels}


def accuracy(folder: Path, val_file: Path, *, sample: bool) -> float:
    """Return the accuracy on held-out questions by exact match: greedily, or sampled at temperature 1."""
    records = [json.loads(line) for line in val_file.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder)
    inputs = tokenizer([record["prompt"] for record in records], return_tensors="pt")
    tokens = model.generate(**inputs, do_sample=sample, max_new_tokens=MAX_ANSWER_TOKENS)
    answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(a == record["label"] for a, record in zip(answers, records, strict=True)) / len(records)


# --- the folder ---


def build(folder: Path, seed: int) -> None:
    """Write the PARTS into `folder`."""
    torch.manual_seed(seed)
    train, held_out = split_questions(seed)
    write_questions(folder / "train.jsonl", train)
    write_questions(folder / "val.jsonl", held_out)
    model = new_model()
    warm_start(model, train, random.Random(seed))
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")


def publish(folder: Path, output: Path) -> None:
    """Move the parts to `output` once they are complete; other files there, such as runs, stay."""
    if not output.exists():
        folder.rename(output)
        return
    for part in sorted(folder.iterdir()):
        target = output / part.name
        if target.is_dir():
            shutil.rmtree(target)
        part.replace(target)


def parse_args(description: str | None, parts: str = ", ".join(PARTS), **more: Any) -> argparse.Namespace:
    """Parse the command line.

    Args:
        parts: what is written, for people.
        more: names of further arguments, with their choices.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, choices in more.items():
        parser.add_argument(name, choices=choices)
    parser.add_argument("--output", type=Path, required=True, help=f"folder to write: {parts}")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the model and its training (default: 0)")
    parser.add_argument("--force", action="store_true", help="replace these parts if the folder exists")
    args = parser.parse_args()
    if args.output.exists() and not args.force:
        parser.error(f"{args.output} exists: choose another --output, or replace its {parts} with --force")
    return args


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """Yield a folder next to the output for the PARTS, which moves into place at the end."""
    start = time.monotonic()
    torch.set_num_threads(1)  # so that the result does not depend on the number of cores
    logging.disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        folder = Path(temporary) / output.name
        folder.mkdir()
        yield folder
        publish(folder, output)
    print(f"wrote {output} in {time.monotonic() - start:.0f} s")


def main() -> None:
    """Build the quickstart's model and data, and print the model's accuracy."""
    args = parse_args(__doc__)
    with building(args.output) as folder:
        build(folder, args.seed)
        greedy, sampled = (accuracy(folder / "model", folder / "val.jsonl", sample=sample) for sample in (False, True))
        print(f"held-out accuracy: {greedy:.1%} greedy, {sampled:.1%} sampled at temperature 1")


if __name__ == "__main__":
    main()
    STATUS.stop()
    gc.freeze()  # or the interpreter looks through all objects of torch as it ends, which takes a second
