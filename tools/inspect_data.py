"""Show the prompts of a config as its model will see them, their lengths, and their errors.

.venv/bin/python tools/inspect_data.py CONFIG [key=value ...]
.venv/bin/python tools/inspect_data.py configs/quickstart.yaml --show 1 --tokens

Starts the reward function's process, to find the fields that it reads, but no model and no engine.
"""

import argparse
import math
import os
import statistics
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ["CUDA_VISIBLE_DEVICES"] = ""
from megappo.arguments import inspect_arguments
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, eval_sets, training_task
from megappo.config.loading import load_config
from megappo.config.schema import Config, Data
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.placement.components import shared_vocabulary
from megappo.userland.environments import EnvironmentFault, start_workers
from megappo.userland.rewards import RewardError
from megappo.userland.signatures import InputSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AT_ONCE = 1000
BINS = 10
BAR = 40
RULE = "-" * 80


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompts; return 1 if there are errors."""
    return run(inspect_arguments(arguments))


def run(args: argparse.Namespace) -> int:
    """Print the prompts of a config; return 1 if there are errors."""
    try:
        config = load_config(args.path, args.overrides)
        with config.locating():
            return _inspect(config, args)
    except BrokenPipeError:  # piped into head, for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except ConfigError as error:
        print(*(f"error: {line}" for line in error.errors), sep="\n", file=sys.stderr)
        return 1


def _inspect(config: Config, args: argparse.Namespace) -> int:
    tokenizer = load_tokenizer(config.model.path)
    taken, vocab_size = _taken(config), shared_vocabulary(config)
    data, order_by = config.data, config.data.order_by
    reward = config.reward
    files = [("data.train_files", file, data, order_by, taken[TRAINING], reward) for file in data.files]
    files += [
        (one.key, file, one.data, None, taken[name], one.reward)
        for name, one in eval_sets(config).items()
        for file in one.files
    ]
    num_wrong = 0
    for key, file, data, order_by, takes, reward in files:
        seed = config.trainer.seed
        dataset = PromptDataset([file], tokenizer, data, seed, key, takes, order_by=order_by, reward=reward)
        chosen = _spread(len(dataset), args.records)
        parts = [dataset.check(vocab_size, partial(_spread, most=args.records))]
        wrong = dataset.errors(parts)
        seen = Seen(args.show)
        left_out = {number for [check] in parts for number in check.left_out}
        for prompt in _readable(dataset, [number for number in chosen if number not in left_out]):
            seen.add(prompt)
        print(f"{key}: {file}: {len(dataset):,} records, {len(chosen):,} inspected")
        lines = [
            *(f"wrong: {line}" for line in wrong),
            *(f"warning: {line}" for line in dataset.warnings(parts)),
            *dataset.leave_out(parts),
            *_lengths(sorted(seen.lengths), data),
        ]
        print("\n".join(f"  {line}" for line in lines))
        for prompt in seen.shown:
            print("\n".join(_shown(prompt, tokenizer if args.tokens else None)))
        print()
        num_wrong += len(wrong)
    return 1 if num_wrong else 0


class Seen:
    """Summary of the prompts read so far, of which there may be many.

    Args:
        show: number of prompts to show from the beginning.

    Attributes:
        lengths: length of each prompt in tokens.
    """

    def __init__(self, show: int):
        self.lengths = array("I")
        self._show = show
        self._first: list[Prompt] = []
        self._longest: Prompt | None = None

    def add(self, prompt: Prompt) -> None:
        """Add the next prompt."""
        self.lengths.append(len(prompt.tokens))
        if len(self._first) < self._show:
            self._first.append(prompt)
        if self._longest is None or len(prompt.tokens) > len(self._longest.tokens):
            self._longest = prompt

    @property
    def shown(self) -> list[Prompt]:
        """Return the first prompts, and the longest one if it is not among them."""
        more = [self._longest] if self._longest and self._longest not in self._first else []
        return [*self._first, *more]


def _taken(config: Config) -> dict[str, InputSpec]:
    """Return the fields that reward function and environment read, for training and for each evaluation set."""
    single = config.changed("reward.num_workers", 1).changed("rollout.num_environment_workers", 1)
    tasks = {TRAINING: training_task(single)} | eval_sets(single)
    with ExitStack() as ending:
        return {name: workers.takes for name, workers in start_workers(tasks, ending, _naming).items()}


@contextmanager
def _naming(key: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # nothing is named like this
        raise ConfigError(str(error)) from error
    except (RewardError, EnvironmentFault) as error:
        raise ConfigError(f"{key}: {error}") from error


def _spread(size: int, most: int) -> Sequence[int]:
    """Return `most` of the first `size` numbers, evenly spread; all of them if `most` is 0."""
    count = min(size, most or size)
    return [i * size // count for i in range(count)]


def _readable(dataset: PromptDataset, chosen: Sequence[int]) -> Iterator[Prompt]:
    """Yield the prompts of the chosen records, without records that are not valid.

    Prompts that are too long come untruncated where that is an error.
    """
    for start in range(0, len(chosen), AT_ONCE):
        part = chosen[start : start + AT_ONCE]
        try:
            yield from dataset.at(part)
        except ValueError:  # reported elsewhere: skip the bad record, keep the others
            for index in part:
                with suppress(ValueError):
                    yield from dataset.at([index])


def _lengths(lengths: Sequence[int], data: Data) -> Iterator[str]:
    """Yield a histogram of the prompts' lengths in tokens after truncation; `lengths` are sorted."""
    if not lengths:
        return
    yield (
        f"tokens: {lengths[0]} to {lengths[-1]}, median {statistics.median_low(lengths)}, 95 % have at most "
        f"{lengths[math.ceil(0.95 * len(lengths)) - 1]}; data.max_prompt_length {data.max_prompt_length}"
    )
    width = max(1, -(-(lengths[-1] + 1 - lengths[0]) // BINS))
    bins = Counter((length - lengths[0]) // width for length in lengths)
    for i in range(max(bins) + 1):
        first = lengths[0] + i * width
        bar = "#" * round(BAR * bins[i] / max(bins.values()))
        yield f"{first:>7} to {first + width - 1:<7} {bins[i]:>9,} {bar}".rstrip()


def _shown(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase | None") -> Iterator[str]:
    yield RULE
    yield f"record {prompt.index + 1}: {len(prompt.tokens)} tokens, label {prompt.label!r}"
    for column, value in prompt.columns.items():
        yield f"  {column}: {value!r}"
    yield prompt.text
    if tokenizer:
        special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        pieces = ((token, f"{token}={tokenizer.decode([token])!r}") for token in prompt.tokens)
        yield " ".join(f"[{piece}]" if token in special else piece for token, piece in pieces)


if __name__ == "__main__":
    sys.exit(main())
