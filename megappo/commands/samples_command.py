"""`megappo samples`: show a run's responses to held-out prompts, and the training rollouts that it kept."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import escaped
from megappo.observe.files import ROLLOUTS_FOLDER, no_run, number_of
from megappo.observe.samples import TRAINING, beginning, mark_passed, read_samples, sample_files, turn_indent

TEXTS = ("prompt", "response", "label")
NAME_CHARACTERS = 9
"""Least width of the column with the names of texts."""
NO_RESPONSE = """no response is like that (scores that are more than right or wrong, such as partial rewards, neither
pass nor fail: use --order worst in place of --wrong)"""
ABSENT = {"dataset": "", "score": math.nan, "passed": None, **dict.fromkeys(TEXTS)}
"""Fields of a sample that are shown, as one without them has them."""


def main(arguments: Sequence[str]) -> int:
    """Print responses of one step; return the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="megappo samples",
        description="Show a run's responses to held-out prompts, and the training rollouts that it kept. A run that "
        "trains a critic alone has only the latter.",
    )
    parser.add_argument("run", type=Path, help="output folder of a run")
    parser.add_argument("--step", type=int, help="a step that has responses (default: the newest)")
    parser.add_argument("--dataset", help=f"a held-out data set, or {TRAINING} (default: all)")
    passed = parser.add_mutually_exclusive_group()
    passed.add_argument("--right", dest="passed", action="store_true", default=None, help="only responses that passed")
    passed.add_argument("--wrong", dest="passed", action="store_false", default=None, help="only responses that failed")
    parser.add_argument("--order", choices=["best", "worst"], help="which come first (default: as they were drawn)")
    parser.add_argument(
        "--search", default="", metavar="TEXT", help="only responses with this text, in prompt or response"
    )
    parser.add_argument("--num", type=int, default=10, help="responses to show at most (default: 10)")
    args = parser.parse_args(arguments)
    files = [*sample_files(args.run), *sample_files(args.run, "parquet")]
    steps = sorted({number_of(path) for path in files})
    if not steps:
        is_run = (args.run / ROLLOUTS_FOLDER).is_dir()
        parser.error(f"{args.run} has no responses yet" if is_run else no_run(args.run, ROLLOUTS_FOLDER))
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        parser.error(f"{args.run} has no responses of step {step}, but of {', '.join(map(str, steps))}")
    every = [ABSENT | sample for path in files if number_of(path) == step for sample in read_samples(path)]
    mark_passed(every, args.run)
    names = sorted({sample["dataset"] for sample in every})
    if args.dataset not in (None, *names):
        parser.error(escaped(f"--dataset {args.dataset}: step {step} has responses of {', '.join(names)}"))
    chosen = []
    for sample in every:
        has_text = args.search in f"{sample['prompt']}\n{sample['response']}"
        if has_text and args.dataset in (None, sample["dataset"]) and args.passed in (None, sample["passed"]):
            chosen.append(sample)
    if args.order:
        chosen.sort(key=lambda sample: sample["score"], reverse=args.order == "best")
    print("\n\n".join("\n".join(sample_lines(sample)) for sample in chosen[: args.num]) or NO_RESPONSE)
    shown = min(args.num, len(chosen))
    print(f"\nstep {step} (of {', '.join(map(str, steps))}): {len(chosen)} of {len(every)} match, {shown} shown")
    return 0


def sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a response: its data set, score and ending, then its texts."""
    outcome = {True: ", passed", False: ", not passed", None: ""}[sample["passed"]]
    ending = f", ended by {sample['finish_reason']}" if "finish_reason" in sample else ""
    parts = "".join(f", {name} {number:g}" for name, number in (sample.get("parts") or {}).items())
    yield escaped(f"-- {sample['dataset']}, score {sample['score']:.4g}{outcome}{ending}{parts}")
    texts = [(name, sample[name]) for name in TEXTS]
    if turns := sample.get("turns"):
        texts[1:2] = [(_writer(turn), turn["text"]) for turn in turns]
    texts[1:1] = [("image", path) for path in sample.get("images") or ()]
    width = max(NAME_CHARACTERS, *(len(name) for name, _ in texts))
    for name, text in texts:
        for number, line in enumerate(str(text).splitlines() or [""]):
            yield f"   {'' if number else name:<{width}} {escaped(line)}".rstrip()


def _writer(turn: Mapping[str, Any]) -> str:
    """Return who wrote a turn, and the reward that it got."""
    writer = f"policy {turn['turn']}" if turn["turn"] else escaped(beginning(turn)) or "environment"
    reward = f", reward {turn['reward']:.4g}" if turn["reward"] else ""
    return f"{turn_indent(turn)}{writer}{reward}"
