"""The journal of a run that samples ahead: the responses that it has, so that no kill loses one.

    ahead/
      engine_0_version_00000012.jsonl    engine 0's responses to prompts begun with the weights after step 12
      choices.jsonl                      the groups that each step trained on

The first line of an engine's file holds the settings that its responses were sampled with. Each further line holds the
checksum of a prompt, and a finished response to it, the first tokens of an unfinished one (`rollout.keep_partial`), or
the grades of all responses. A group is trained on `rollout.max_staleness` + 1 steps after its version at the latest, so
old files are deleted as a whole. A run that resumes trains on the same groups in the steps that an earlier process has
done after the checkpoint.
"""

import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from megappo.config.config_error import ConfigError, counted
from megappo.config.text_files import json_lines
from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.observe.files import write_json_lines
from megappo.observe.metrics import Metric, metrics_from_json
from megappo.rollouts.fingerprint import PROMPT_CONTENT, changed_settings, prompt_digest
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import Sample
from megappo.runtime.durable_files import append
from megappo.userland.grades import Grade

JOURNAL_FOLDER = "ahead"
CHOICES_FILE = "choices.jsonl"
REMEDY = "remove the file: its responses are sampled again"
_ENGINE_FILE = re.compile(r"engine_(\d+)_version_(\d+)\.jsonl")


class GroupFacts(NamedTuple):
    """Facts about a finished group that all ranks have.

    Attributes:
        position, is_equal: as in `Group`.
    """

    position: int
    is_equal: bool


@dataclass
class Group:
    """Responses to a prompt.

    Attributes:
        position: position of the prompt, in the order in which prompts are drawn.
        version: steps that the weights had been trained for when the group was begun.
        prompt: its `prompt_digest`.
        samples: the finished responses.
        written: sample_index -> first tokens of an unfinished response.
        failures: see `Scored.failure_metrics`.
        scoring: what scores the responses in this process; None of a group that an earlier process has scored.
        is_equal: algorithm.filter_groups leaves the group out, unless there are too few others.
        is_finished: all responses are finished, and have their grades where steps are chosen by them.
    """

    position: int
    version: int
    prompt: str = ""
    samples: list[Sample] = field(default_factory=list)
    written: dict[int, Generation] = field(default_factory=dict)
    failures: dict[str, Metric] = field(default_factory=dict)
    scoring: Responses | None = None
    is_equal: bool = False
    is_finished: bool = False

    @property
    def facts(self) -> GroupFacts:
        """Return the facts that all ranks get."""
        return GroupFacts(self.position, self.is_equal)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote, in unfinished responses, too."""
        unfinished = sum(len(one.tokens) for one in self.written.values())
        return unfinished + sum(one.num_policy_tokens for one in self.samples)

    def fill_grades(self) -> None:
        """Do nothing: an earlier process has filled them in."""

    def failure_metrics(self) -> dict[str, Metric]:
        """Return the failure metrics of its responses, see `Scored`."""
        return self.failures


class Choice(NamedTuple):
    """The groups that a step removed from the queue, by the positions of their prompts.

    Attributes:
        chosen: the step trained on them.
        left_out: the step dropped them, finished or not.
        num_draws: draws of prompts while the step waited for them.
    """

    step: int
    chosen: list[int]
    left_out: list[int]
    num_draws: int


_SAMPLE = TypeAdapter(Sample)
_GENERATION = TypeAdapter(Generation)
_GRADES = TypeAdapter(list[Grade])
_CHOICE = TypeAdapter(Choice)


class Journal:
    """Journal of one rank's engine, which takes over files of an earlier process that may have had more engines.

    Args:
        number: number of this rank's engine, among `num_engines`; None without one.
        settings: see `rollout_settings`.
    """

    def __init__(
        self,
        output_dir: Path,
        number: int | None,
        num_engines: int,
        settings: Mapping[str, Any],
    ):
        self._folder = output_dir / JOURNAL_FOLDER
        self._number = number
        self._num_engines = num_engines
        self._settings = settings

    def write_sample(self, group: Group, sample: Sample) -> None:
        """Append a finished response, without its grade.

        Raises:
            OSError: it cannot be written.
        """
        self._append(group, sample={name: value for name, value in vars(sample).items() if name != "grade"})

    def write_partial(self, group: Group, sample_index: int) -> None:
        """Append the first tokens of an unfinished response."""
        self._append(group, sample_index=sample_index, written=group.written[sample_index])

    def write_grades(self, group: Group) -> None:
        """Append the grades of a group whose samples have been appended, in this order."""
        grades = [one.grade for one in group.samples]
        self._append(group, grades=grades, failures=group.failures, is_equal=group.is_equal)

    def _append(self, group: Group, **facts: Any) -> None:
        path = self._folder / f"engine_{self._number}_version_{group.version:08d}.jsonl"
        if not path.exists():
            append(path, json.dumps(self._settings) + "\n")
        line = {"position": group.position, "prompt": group.prompt, **facts}
        append(path, json.dumps(line, default=_plain) + "\n")

    def read(self) -> dict[tuple[int, str], Group]:
        """Return the groups of an earlier process, by position and `prompt_digest`; delete groups of other settings.

        Raises:
            ConfigError: a file cannot be read, or is not what a run writes.
        """
        groups: dict[tuple[int, str], Group] = {}
        for version, path in self._files():
            lines = json_lines(path, bool, REMEDY)
            if changed := changed_settings(lines[0] if lines else {}, self._settings):
                print(f"deleted {path}: its responses were sampled with another {', '.join(changed)}", flush=True)
                path.unlink()
                continue
            write_json_lines(path, lines)  # without a line that a kill cut short
            for number, line in enumerate(lines[1:], start=2):
                try:
                    key = position, prompt = index(line["position"]), str(line["prompt"])
                    _add(groups.setdefault(key, Group(position, version, prompt)), line)
                except (ValueError, TypeError, KeyError) as error:
                    raise ConfigError(
                        f"{path}, line {number}, is not what a run writes: {error!r}; {REMEDY}"
                    ) from error
        return groups

    def forget(self, oldest: int) -> None:
        """Delete the groups that were begun with weights before version `oldest`."""
        for version, path in self._files():
            if version < oldest:
                path.unlink()

    def write_choice(self, choice: Choice) -> None:
        """Append the choice of a step."""
        append(self._folder / CHOICES_FILE, json.dumps(choice._asdict()) + "\n")

    def forget_choices(self, last: int) -> dict[int, Choice]:
        """Delete the choices of steps up to this one; return the others, by step."""
        path = self._folder / CHOICES_FILE
        if not os.path.lexists(path):
            return {}
        lines = [line for line in json_lines(path, _CHOICE.validate_python, "remove the file") if line["step"] > last]
        write_json_lines(path, lines)  # without a line that a kill cut short
        return {line["step"]: Choice(**line) for line in lines}

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield version and path of each file of this engine."""
        for path in sorted(self._folder.glob("engine_*_version_*.jsonl")):
            found = _ENGINE_FILE.fullmatch(path.name)
            if found and self._number is not None and int(found[1]) % self._num_engines == self._number:
                yield int(found[2]), path


class NoJournal:
    """Null object with the methods of Journal, for a run that samples in its steps: a step is sampled again."""

    def _do_nothing(self, *args: object) -> dict[Any, Any]:
        """Do nothing; return no groups and no choices."""
        return {}

    write_sample = write_partial = write_grades = write_choice = read = forget = forget_choices = _do_nothing


def unchanged(groups: Sequence[Group], prompts: Sequence[Prompt]) -> dict[int, Group]:
    """Return the groups, by position, that have these prompts with the same label and further fields."""
    digests = map(prompt_digest, prompts)
    found = {group.position: group for group, digest in zip(groups, digests, strict=True) if group.prompt == digest}
    if num_changed := len(groups) - len(found):
        print(
            f"responses to {counted(num_changed, 'prompt')} are sampled again: {PROMPT_CONTENT} have changed",
            flush=True,
        )
    return found


def _add(group: Group, line: Mapping[str, Any]) -> None:
    """Add what a line of the journal holds."""
    if "sample" in line:
        segments = list(map(_with_bytes, line["sample"]["segments"]))
        sample = _SAMPLE.validate_python({**line["sample"], "segments": segments})
        if any(len(one.tokens) != len(one.log_probs) for one in sample.segments):
            raise ValueError("not every token has a log-prob")
        group.samples.append(sample)
        group.written.pop(sample.sample_index, None)
    elif "written" in line:
        group.written[index(line["sample_index"])] = _GENERATION.validate_python(_with_bytes(line["written"]))
    else:
        for sample, grade in zip(group.samples, _GRADES.validate_python(line["grades"]), strict=True):
            sample.grade = grade
        group.failures = metrics_from_json(line["failures"])
        group.is_equal = bool(line["is_equal"])
        group.is_finished = True


def _plain(value: Any) -> Any:
    """Return bytes in base64, and the fields of anything else that JSON does not know."""
    return b64encode(value).decode() if isinstance(value, bytes) else vars(value)


def _with_bytes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "choices": b64decode(fields["choices"])}
