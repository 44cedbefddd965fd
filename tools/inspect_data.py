"""Show the prompts of a config, or its examples or pairs, as the model will see them, their lengths, and their errors.

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
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ["CUDA_VISIBLE_DEVICES"] = ""
from megappo.commands.arguments import inspect_arguments
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING, eval_sets, training_task
from megappo.config.loading import load_config
from megappo.config.schema import Config
from megappo.data.examples import Example
from megappo.data.image_files import image_reader
from megappo.data.preferences import Pair, open_examples
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.record_dataset import RecordDataset
from megappo.data.tokenizer import load_tokenizer, stop_token_ids, token_texts
from megappo.placement.components import shared_vocabulary
from megappo.userland.environments import start_workers
from megappo.userland.episode_pool import EnvironmentFault
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
    vocab_size = shared_vocabulary(config)
    num_wrong = 0
    for key, file, dataset in (_prompts if config.recipe.has_rollouts else _examples)(config, tokenizer):
        chosen = _spread(len(dataset), args.records)
        parts = [dataset.check(vocab_size, partial(_spread, most=args.records))]
        wrong = dataset.errors(parts)
        seen = Seen(args.show)
        left_out = {number for [check] in parts for number in check.left_out}
        for entry in _readable(dataset, [number for number in chosen if number not in left_out]):
            seen.add(entry)
        print(f"{key}: {file}: {len(dataset):,} records, {len(chosen):,} inspected")
        lines = [
            *(f"wrong: {line}" for line in wrong),
            *(f"warning: {line}" for line in dataset.warnings(parts)),
            *dataset.leave_out(parts),
            *_lengths(sorted(seen.lengths), dataset),
        ]
        print("\n".join(f"  {line}" for line in lines))
        for entry in seen.shown:
            print(RULE)
            marked = "scored" if isinstance(entry, Pair) else "with a loss"
            for row in _rows(entry):
                print("\n".join(_shown(row, tokenizer, marked, with_tokens=args.tokens)))
        print()
        num_wrong += len(wrong)
    return 1 if num_wrong else 0


def _prompts(config: Config, tokenizer: "PreTrainedTokenizerBase") -> Iterator[tuple[str, str, RecordDataset]]:
    """Yield the prompts of each file, with the key that names it."""
    taken, data = _taken(config), config.data
    images = image_reader(config, tokenizer)
    files = [("data.train_files", file, data, data.order_by, taken[TRAINING], config.reward) for file in data.files]
    files += [
        (one.key, file, one.data, None, taken[name], one.reward)
        for name, one in eval_sets(config).items()
        for file in one.files
    ]
    for key, file, data, order_by, takes, reward in files:
        seed = config.trainer.seed
        own = {"order_by": order_by, "reward": reward, "images": images}
        yield key, file, PromptDataset([file], tokenizer, data, seed, key, takes, **own)


def _examples(config: Config, tokenizer: "PreTrainedTokenizerBase") -> Iterator[tuple[str, str, RecordDataset]]:
    """Yield the examples or pairs of each file, with the key that names it."""
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    for file in config.data.files:
        train, _ = open_examples(config.changed("data.train_files", (file,)), tokenizer, ends)
        yield "data.train_files", file, train
    _, held_out = open_examples(config, tokenizer, ends)
    for file, dataset in zip(config.data.val_files, held_out.values(), strict=True):
        yield "data.val_files", file, dataset


def _rows(entry: Prompt | Example | Pair) -> Sequence[Prompt | Example]:
    return [entry] if isinstance(entry, Prompt) else entry.rows


class Seen:
    """Summary of the entries read so far, of which there may be many.

    Args:
        show: number of entries to show from the beginning.

    Attributes:
        lengths: length of each of their rows in tokens.
    """

    def __init__(self, show: int):
        self.lengths = array("I")
        self._show = show
        self._first: list[Prompt | Example | Pair] = []
        self._longest: Prompt | Example | Pair | None = None
        self._most = 0

    def add(self, entry: Prompt | Example | Pair) -> None:
        """Add the next entry."""
        lengths = [len(row.tokens) for row in _rows(entry)]
        self.lengths.extend(lengths)
        if len(self._first) < self._show:
            self._first.append(entry)
        if max(lengths) > self._most:
            self._longest, self._most = entry, max(lengths)

    @property
    def shown(self) -> list[Prompt | Example | Pair]:
        """Return the first entries, and the longest one if it is not among them."""
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


def _readable(dataset: RecordDataset, chosen: Sequence[int]) -> Iterator[Prompt | Example | Pair]:
    """Yield the entries of the chosen records, without records that are not valid.

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


def _lengths(lengths: Sequence[int], dataset: RecordDataset) -> Iterator[str]:
    """Yield a histogram of lengths in tokens after truncation; `lengths` are sorted."""
    if not lengths:
        return
    key = "max_prompt_length" if isinstance(dataset, PromptDataset) else "max_length"
    yield (
        f"tokens: {lengths[0]} to {lengths[-1]}, median {statistics.median_low(lengths)}, 95 % have at most "
        f"{lengths[math.ceil(0.95 * len(lengths)) - 1]}; data.{key} {getattr(dataset.config, key)}"
    )
    width = max(1, -(-(lengths[-1] + 1 - lengths[0]) // BINS))
    bins = Counter((length - lengths[0]) // width for length in lengths)
    for i in range(max(bins) + 1):
        first = lengths[0] + i * width
        bar = "#" * round(BAR * bins[i] / max(bins.values()))
        yield f"{first:>7} to {first + width - 1:<7} {bins[i]:>9,} {bar}".rstrip()


def _shown(
    row: Prompt | Example, tokenizer: "PreTrainedTokenizerBase", marked: str, *, with_tokens: bool
) -> Iterator[str]:
    if isinstance(row, Prompt):
        yield f"record {row.index + 1}: {len(row.tokens)} tokens, label {row.label!r}"
        for column, value in row.columns.items():
            yield f"  {column}: {value!r}"
        yield row.text
    else:
        yield f"record {row.index + 1}: {len(row.tokens)} tokens, {sum(row.mask)} of them, between > and <, {marked}"
        text = ""
        for is_trained, pairs in groupby(zip(row.mask, token_texts(row.tokens, tokenizer), strict=True), itemgetter(0)):
            part = "".join(piece for _, piece in pairs)
            text += f">{part}<" if is_trained else part
        yield text
    if with_tokens:
        special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
        pieces = ((token, f"{token}={tokenizer.decode([token])!r}") for token in row.tokens)
        yield " ".join(f"[{piece}]" if token in special else piece for token, piece in pieces)


if __name__ == "__main__":
    sys.exit(main())
