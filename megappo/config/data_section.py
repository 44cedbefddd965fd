"""Keys of the prompts, of held-out data sets, and of scoring."""

from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import StrictBool

from megappo.config.methods import LENGTH_PENALTIES, Method
from megappo.config.section import KeyRule, ReadIf, Section, key
from megappo.config.values import (
    FieldName,
    FilePath,
    FilePaths,
    Float,
    GiB,
    NonNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Processes,
    Seconds,
    SomeFilePaths,
    Texts,
    TokenCount,
    TooLong,
    TopK,
)

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
OTHER_KIND = f"is neither {', '.join(ENDINGS[:-1])} nor {ENDINGS[-1]}: convert it"
"""Follows the name of a file with another ending."""
NONE = "none"
"""As an environment or a reward function of a data set: it has none, whatever training has."""

SUMS_SCORES = ReadIf(
    ("algorithm.adv_estimator",),
    lambda run: not run.algorithm.method.needs_score_components,
    "{} {} takes the scores one by one, not their sum",
)


def ending(file: str) -> str:
    """Return a data file's ending; "" for a file of another kind."""
    return next((known for known in ENDINGS if file.endswith(known)), "")


def stem(file: str) -> str:
    """Return a data file's name without folder and ending."""
    return Path(file).name.removesuffix(ending(file))


class Data(Section):
    rules = (
        KeyRule(lambda data: not data.files, "data.train_files: every weight is 0: raise one"),
        KeyRule(
            lambda data: data.draw_size < data.train_batch_size,
            "data.gen_batch_size {gen_batch_size} is below data.train_batch_size {train_batch_size}, the prompts that a "
            "step trains on: raise it, or drop it",
        ),
        KeyRule(
            lambda data: data.prompt_key == data.label_key,
            "data.prompt_key and data.label_key are both '{label_key}': name two different fields",
        ),
    )

    train_files: SomeFilePaths | Annotated[dict[FilePath, NonNegativeFloat], MinLen(1)] = key(..., "jsonl, jsonl.gz or parquet files of training prompts; with weights, as {a.jsonl: 0.7, b.jsonl: 0.3}, each file gives its share of every step and has epochs of its own; weight 0 drops a file that base names")
    val_files: FilePaths = key((), "jsonl, jsonl.gz or parquet files of held-out prompts; each is reported under its name")
    train_batch_size: Positive = key(256, "prompts per step, at most as many as train_files hold")
    gen_batch_size: Positive | None = key(None, "prompts drawn at a time, at least train_batch_size. A step's rollout ends as soon as train_batch_size of them have all their responses (with algorithm.filter_groups: as soon as enough of them have scores that differ), and the unfinished responses are dropped; null = train_batch_size, and wait for all")
    prompt_key: str = key("prompt", "field with the prompt: a string, or chat messages for the tokenizer's template; a dotted name leads into objects")
    label_key: str = key("label", "field passed to the reward function as the right answer; may be dotted, as reward_model.ground_truth")
    apply_chat_template: StrictBool = key(False, "treat a prompt that is a string as a user's message and apply the chat template; false = pass it to the model as it is")
    system_prompt: str | None = key(None, "system message for chat messages that have none; null = none")
    chat_template_kwargs: dict[str, str | int | float | StrictBool] = key({}, "variables of the chat template, such as {enable_thinking: false}")
    max_prompt_length: TokenCount = key(1024, "tokens of a prompt; too_long decides about a longer one")
    too_long: TooLong = key("error", "a prompt longer than max_prompt_length: error = an error that names its line; skip = leave it out; truncate_left = keep its last tokens, without those that the template puts first. The start of the run reports how many were left out or cut")
    on_bad_row: Literal["error", "skip"] = key("error", "a malformed record, or one without a required field: error = an error that names its line; skip = leave it out and count it")
    shuffle: StrictBool = key(True, "a new order each epoch, from trainer.seed")
    order_by: FieldName | None = key(None, "field with a number, such as a difficulty, by which each epoch ascends, or descends with a - before the name; shuffle then applies among equal ones; null = none")

    @property
    def draw_size(self) -> int:
        """Number of prompts drawn at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def shares(self) -> dict[str, float]:
        """Weight of each training file; empty if the files have no weights."""
        given = self.train_files if isinstance(self.train_files, dict) else {}
        return {file: weight for file, weight in given.items() if weight}

    @property
    def files(self) -> tuple[str, ...]:
        """Training files, without those of weight 0."""
        return tuple(self.shares) if isinstance(self.train_files, dict) else self.train_files

    @property
    def val_names(self) -> list[str]:
        """Name under which each of val_files is reported: its name without folder and ending."""
        return [stem(file) for file in self.val_files]


class EvalDataset(Section):
    """A held-out data set. A key that is null has the value for data.val_files."""

    files: SomeFilePaths = key(..., "jsonl, jsonl.gz or parquet files of its prompts")
    n: Positive | None = key(None, "responses per prompt; null = rollout.val_n")
    temperature: NonNegativeFloat | None = key(None, "0 = greedy; null = rollout.val_temperature")
    top_p: PositiveFraction | None = key(None, "null = rollout.val_top_p")
    top_k: TopK | None = key(None, "null = rollout.val_top_k")
    max_response_length: TokenCount | None = key(None, "null = rollout.max_response_length")
    max_prompt_length: TokenCount | None = key(None, "null = data.max_prompt_length")
    prompt_key: str | None = key(None, "null = data.prompt_key")
    label_key: str | None = key(None, "null = data.label_key")
    reward: FilePath | dict[FilePath, Float] | None = key(None, "its reward function, or several with their weights, as in reward.function; none = no function: an environment gives the rewards; null = reward.function")
    environment: FilePath | None = key(None, "its environment, with the limits of rollout.environment; none = one response to a prompt, without tools; null = as in training")
    tools: FilePaths = key((), "its tools, instead of an environment, parsed by rollout.tool_call_parser; [] = see environment")
    pass_threshold: Float | None = key(None, "smallest score with which a response passes; null = rollout.val_pass_threshold")


class Eval(Section):
    datasets: dict[str, EvalDataset] = key({}, "held-out data besides data.val_files: name -> files, sampling, reward function, environment; reported as val/NAME")


class Reward(Section):
    method_key, methods = "length_penalty", LENGTH_PENALTIES
    rules = (
        KeyRule(
            lambda reward: reward.function is not None and not reward.weights,
            "reward.function {function} names no function with a weight other than 0: name one",
        ),
    )

    function: FilePath | dict[FilePath, Float] | None = key("exact_match", "built-in name, or FILE.py:FUNCTION or package.module:FUNCTION of (prompts, responses, labels, **columns) -> list of scores, or of lists of them; verl's and TRL's signatures work, too. Several functions with weights, as {gsm8k: 1, my_rewards.py:brevity: 0.1}, score each response together; weight 0 drops one that base names. null = none: rollout.environment gives the rewards")
    num_workers: Processes = key(1, "worker processes that run the function, per engine")
    timeout_seconds: Seconds = key(60.0, "timeout of one call of the function, for one response or for the whole list")
    memory_limit_gib: GiB | None = key(16.0, "memory limit of each of these processes, and of each that it starts; null = none")
    pass_env: Texts = key((), "environment variables that the function gets although they are named like secrets, such as OPENAI_API_KEY")
    on_error: Literal["raise", "zero"] = key("raise", "a call that raises, hangs, ends its process or returns an invalid value: raise = the run ends; zero = its response gets score 0 and is counted")
    batch_size: Positive | None = key(None, "most responses in one call of a function of lists, which is then called as they are written; null = an equal share for each worker, once all are written")
    options: dict[FilePath, dict[str, Any]] = key({}, "arguments for every call of a function, as {my_rewards.py:brevity: {limit: 100}}")
    skip_special_tokens: StrictBool = key(True, "functions get responses as text without special tokens; false = drop only those that begin, end or pad a text, for models where <think> or <answer> are special")
    scale: PositiveFloat = key(1.0, "factor of every score; the first of the shaping steps", read_if=SUMS_SCORES)
    clip: PositiveFloat | None = key(None, "clip scaled scores to +- this; null = off", read_if=SUMS_SCORES)
    normalize: Literal["none", "running", "batch", "group"] = key("none", "shift and scale scores to mean 0, deviation 1: over all steps so far, this step, or the responses to a prompt", read_if=SUMS_SCORES)
    length_penalty: Annotated[str, OneOf(LENGTH_PENALTIES)] = key("none", "added last: DAPO's soft overlong punishment (overlong), or -length_penalty_factor x length / rollout.max_response_length (linear)", read_if=SUMS_SCORES)
    overlong_buffer: TokenCount = key(256, "overlong: tokens before rollout.max_response_length over which the penalty grows")
    length_penalty_factor: NonNegativeFloat = key(1.0, "the largest length penalty")

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each function's scores, without functions of weight 0."""
        given = {self.function: 1.0} if isinstance(self.function, str) else self.function or {}
        return {function: weight for function, weight in given.items() if weight}

    @property
    def penalty(self) -> Method:
        """Entry of length_penalty."""
        return LENGTH_PENALTIES[self.length_penalty]
