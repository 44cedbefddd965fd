"""Show the rollouts that a run has recorded (trainer.record_rollouts).

.venv/bin/python tools/show_rollouts.py FOLDER                summary of each step
.venv/bin/python tools/show_rollouts.py FOLDER --step 12      prompts, responses and scores of a step
.venv/bin/python tools/show_rollouts.py FILE --tokens --num 1 token by token
.venv/bin/python tools/show_rollouts.py FOLDER --jsonl        every response as a line of JSON, for trainer.kind=critic
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.batch.fields import field_of
from megappo.batch.rows import Rows
from megappo.batch.rows_file import RowsFile
from megappo.data.tokenizer import load_tokenizer
from megappo.errors import ActionableError
from megappo.observe.files import recorded_steps, rows_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADER = ("step", "weights of", "prompts", "responses", "tokens", "mean score", "best", "worst", "truncated")
RULE = "-" * 80


def main() -> int:
    """Print the rollouts; return 1 if they cannot be read."""
    args = _arguments()
    try:
        for line in _lines(args):
            print(line)
    except BrokenPipeError:  # piped into head, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (ActionableError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder of a record, or one of its files")
    parser.add_argument("--step", type=int, help="show the responses of this step of a folder")
    parser.add_argument("--num", type=int, default=10, help="responses to show at most (default: 10)")
    parser.add_argument("--order", choices=["prompt", "best", "worst"], default="prompt", help="which come first")
    parser.add_argument("--prompt", type=int, help="responses to this prompt only, by its number in the step, from 0")
    parser.add_argument("--tokens", action="store_true", help="show each token of a response with its log-prob")
    parser.add_argument(
        "--jsonl",
        action="store_true",
        help="write all responses, or the ones of --step and --prompt, as trajectories with tokens, texts and scores",
    )
    parser.add_argument("--tokenizer", help="folder of the tokenizer (default: the recorded run's model.path)")
    args = parser.parse_args()
    for name in ("num", "order", "tokens"):
        if args.jsonl and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} changes what is shown, but --jsonl writes all of a step or prompt: drop one")
    return args


def _lines(args: argparse.Namespace) -> Iterator[str]:
    if args.path.is_dir() and args.step is not None and args.step not in (steps := recorded_steps(args.path)):
        raise ActionableError(f"{args.path} has no step {args.step}: it has {', '.join(map(str, steps)) or 'none'}")
    if args.jsonl:
        yield from _trajectories(args)
        return
    if args.path.is_dir() and args.step is None:
        yield from _overview(args.path)
        return
    with RowsFile(rows_file(args.path, args.step) if args.path.is_dir() else args.path) as file:
        tokenizer = load_tokenizer(args.tokenizer or file.facts["model"])
        yield f"step {file.facts['step']}, by the weights after step {file.facts['weights_step']}"
        yield ", ".join(f"{key} {value}" for key, value in file.facts.get("sampling", {}).items())
        for row in _chosen(file, args):
            yield from _response(file.rows(row, row + 1), file, tokenizer, args.tokens)


def _trajectories(args: argparse.Namespace) -> Iterator[str]:
    """Yield the responses of a record as lines of JSON, step after step."""
    files = [args.path]
    if args.path.is_dir():
        files = [rows_file(args.path, step) for step in recorded_steps(args.path) if args.step in (None, step)]
    num_masked = 0
    for path in files:
        with RowsFile(path) as file:
            tokenizer = load_tokenizer(args.tokenizer or file.facts["model"])
            for row in range(len(file.table)):
                one = file.rows(row, row + 1)
                if args.prompt not in (None, int(one.prompt_ids)):
                    continue
                if not one.response_mask.any():
                    num_masked += 1
                    continue
                facts = {"step": file.facts["step"], "label": _label(file, int(one.prompt_ids))}
                yield json.dumps(facts | _trajectory(one, path, tokenizer), ensure_ascii=False)
    if num_masked:
        print(f"left out: {num_masked} responses without a token to train on", file=sys.stderr)


def _label(file: RowsFile, prompt: int) -> Any:
    return file.facts["labels"][prompt] if "labels" in file.facts else None


def _trajectory(row: Rows, path: Path, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return a response as trainer.kind=critic reads it: its tokens, and its score without the rewards of its steps.

    Raises:
        ActionableError: a line cannot express it.
    """
    segments = row.fields.get("segments")
    weights = row.fields.get("loss_weights")
    if "prompt_records" in row.fields:
        raise ActionableError(f"{path} is of prompts with images, which a record does not hold: sample instead")
    if (segments is not None and segments.any()) or (weights is not None and (weights != 1).any()):
        what = "an episode of several segments" if weights is None or (weights == 1).all() else "a loss_weight"
        raise ActionableError(f"{path} has {what}, which a line cannot express: set trainer.replay_rollouts instead")
    size = int(row.response_lengths)
    prompt, response = row.input_ids[:-size].tolist(), row.input_ids[-size:].tolist()
    mask = [int(number) for number in row.response_mask[0, :size]]
    rewards = row.fields["turn_rewards"][0, :size].tolist() if "turn_rewards" in row.fields else []
    steps = [[end, reward] for end, reward in enumerate(rewards, 1) if reward]
    found = {
        "prompt": tokenizer.decode(prompt),
        "response": tokenizer.decode(response, skip_special_tokens=True),
        "score": float(row.fields["scores"]) - sum(rewards),
        "prompt_tokens": prompt,
        "response_tokens": response,
    }
    if steps:
        found["steps"] = steps
    if not all(mask):
        found["response_mask"] = mask
    if row.fields["truncated"].any():
        found["truncated"] = True
    return found


def _overview(folder: Path) -> Iterator[str]:
    """Yield a line per step."""
    steps = recorded_steps(folder)
    if not steps and (samples := sorted(folder.glob("step_*.jsonl"))):
        raise ActionableError(
            f"{folder} holds samples of evaluations as text, and no rollouts on record: read them as they are, or by "
            f"python3 -m json.tool --json-lines {samples[-1]}; the rollouts of training go to trainer.record_rollouts, "
            "if that is set"
        )
    if not steps:
        raise ActionableError(
            f"{folder} holds no rollouts: expected files step_XXXXXXXX.safetensors in it, which a run writes to its "
            "trainer.record_rollouts, if that is set"
        )
    lines = [HEADER, *(_summary(rows_file(folder, step)) for step in steps)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield from ("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _summary(path: Path) -> tuple[str, ...]:
    with RowsFile(path) as file:
        scores, truncated = file.field("scores"), file.field("truncated")
        numbers = (scores.mean(), scores.max(), scores.min(), truncated.mean())
        counts = (len(file.facts["prompts"]), len(file.table), int(file.table.response_lengths.sum()))
        facts = (file.facts["step"], f"step {file.facts['weights_step']}", *counts)
        return (*map(str, facts), *(f"{float(number):.3f}" for number in numbers))


def _chosen(file: RowsFile, args: argparse.Namespace) -> list[int]:
    """Return the numbers of the rows to show."""
    rows = [row for row, prompt in enumerate(file.table.prompt_ids.tolist()) if args.prompt in (None, prompt)]
    if not rows:
        raise ActionableError(f"step {file.facts['step']} of {args.path} has no response to a prompt {args.prompt}")
    if args.order != "prompt":
        scores = file.field("scores").tolist()
        rows.sort(key=lambda row: scores[row], reverse=args.order == "best")
    return rows[: args.num]


def _response(row: Rows, file: RowsFile, tokenizer: "PreTrainedTokenizerBase", each_token: bool) -> Iterator[str]:
    prompt, tokens, start = int(row.prompt_ids), row.input_ids, int(row.prompt_lengths)
    of_row = [f"{name} {values.squeeze(0).tolist()}" for name, values in row.fields.items() if not _per_token(name)]
    yield RULE
    yield ", ".join([f"prompt {prompt}, response {int(row.ids)}: {len(tokens) - start} tokens", *of_row])
    if "prompts" in file.facts:
        yield f"record {file.facts['prompts'][prompt]} of the data, label {file.facts['labels'][prompt]!r}"
    yield f"[prompt]   {tokenizer.decode(tokens[:start])}"
    yield from _turns(row, tokens[start:].tolist(), tokenizer)
    if each_token:
        yield from _each_token(row, tokens[start:].tolist(), tokenizer)


def _turns(row: Rows, tokens: list[int], tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield the response, turn by turn for an episode."""
    if "turns" not in row.fields:
        yield f"[response] {tokenizer.decode(tokens)}"
        return
    turns, rewards = (row.fields[name][0].tolist() for name in ("turns", "turn_rewards"))
    for turn, places in groupby(range(len(tokens)), key=turns.__getitem__):
        of_turn = list(places)
        who = f"turn {turn:.0f}, reward {sum(rewards[i] for i in of_turn):g}" if turn else "environment"
        yield f"[{who}] {tokenizer.decode([tokens[i] for i in of_turn])}"


def _each_token(row: Rows, tokens: list[int], tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Yield each token with all of its recorded values, such as the engine's log-prob."""
    known = {name: values[0].tolist() for name, values in row.fields.items() if _per_token(name)}
    yield "  ".join(["   token", *known, "text"])
    for i, token in enumerate(tokens):
        numbers = [f"{values[i]:{len(name)}.4g}" for name, values in known.items()]
        yield "  ".join([f"{token:>8}", *numbers, repr(tokenizer.decode([token]))])


def _per_token(name: str) -> bool:
    return field_of(name).per_token


if __name__ == "__main__":
    sys.exit(main())
