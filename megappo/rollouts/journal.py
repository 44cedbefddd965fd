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
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megappo.config.config_error import counted
from megappo.data.prompts import Prompt
from megappo.engines.generations import Generation
from megappo.observe.files import json_lines, write_json_lines
from megappo.observe.metrics import Metric, metrics_from_json
from megappo.rollouts.fingerprint import PROMPTS, changed_settings, prompt_digest
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade

JOURNAL_FOLDER, CHOICES_FILE = "ahead", "choices.jsonl"


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
        position: of the prompt, in the order in which prompts are drawn.
        version: steps that the weights had been trained for when the group was begun.
        prompt: its `prompt_digest`.
        samples: the finished responses.
        written: sample_index -> first tokens of an unfinished response.
        failures: see `Scored.failure_metrics`.
        is_equal: algorithm.filter_groups leaves the group out, unless there are too few others.
        is_finished: all responses are finished and have their grades.
    """

    position: int
    version: int
    prompt: str = ""
    samples: list[Sample] = field(default_factory=list)
    written: dict[int, Generation] = field(default_factory=dict)
    failures: dict[str, Metric] = field(default_factory=dict)
    is_equal: bool = False
    is_finished: bool = False

    @property
    def facts(self) -> GroupFacts:
        """Return the facts that all ranks get."""
        return GroupFacts(self.position, self.is_equal)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(one.num_policy_tokens for one in self.samples)

    def fill_grades(self) -> None:
        """Do nothing: the samples of a finished group have their grades."""

    def failure_metrics(self) -> dict[str, Metric]:
        """Return those of `Scored`."""
        return self.failures


class Choice(NamedTuple):
    """The groups that a step removed from the queue, by the positions of their prompts.

    Attributes:
        chosen: the step trained on them.
        left_out: algorithm.filter_groups left them out.
        num_draws: batches of prompts that were drawn while the step waited for them.
    """

    step: int
    chosen: list[int]
    left_out: list[int]
    num_draws: int


class Journal:
    """Journal of one rank's engine, which takes over files of an earlier process that may have had more engines.

    Args:
        number: of this rank's engine, among `num_engines`; None without one.
        settings: see `rollout_settings`.
    """

    def __init__(self, output_dir: Path, number: int | None, num_engines: int, settings: Mapping[str, Any]):
        self._folder, self._number, self._num_engines = output_dir / JOURNAL_FOLDER, number, num_engines
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
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"engine_{self._number}_version_{group.version:08d}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(json.dumps(self._settings) + "\n")
            line = {"position": group.position, "prompt": group.prompt, **facts}
            file.write(json.dumps(line, default=_plain) + "\n")

    def read(self) -> dict[tuple[int, str], Group]:
        """Return the groups of an earlier process, by position and `prompt_digest`; delete those of other settings.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        groups: dict[tuple[int, str], Group] = {}
        for version, path in self._files():
            settings, *lines = json_lines(path) or [{}]
            if changed := changed_settings(settings, self._settings):
                print(f"{path} is deleted: its responses have other settings: {', '.join(changed)}", flush=True)
                path.unlink()
                continue
            write_json_lines(path, [settings, *lines])  # without a line that a kill cut short
            for line in lines:
                key = position, prompt = line["position"], line["prompt"]
                _add(groups.setdefault(key, Group(position, version, prompt)), line)
        return groups

    def forget(self, oldest: int) -> None:
        """Delete the groups that were begun with weights before version `oldest`."""
        for version, path in self._files():
            if version < oldest:
                path.unlink()

    def write_choice(self, choice: Choice) -> None:
        """Append the choice of a step."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / CHOICES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(choice._asdict()) + "\n")

    def forget_choices(self, last: int) -> dict[int, Choice]:
        """Delete the choices of steps up to this one; return the others, by step."""
        path = self._folder / CHOICES_FILE
        if not path.exists():
            return {}
        lines = [line for line in json_lines(path) if line["step"] > last]
        write_json_lines(path, lines)  # without a line that a kill cut short
        return {line["step"]: Choice(**line) for line in lines}

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield version and path of each file of this engine."""
        for path in sorted(self._folder.glob("engine_*_version_*.jsonl")):
            _, number, _, version = path.stem.split("_")
            if self._number is not None and int(number) % self._num_engines == self._number:
                yield int(version), path


def unchanged(groups: Sequence[Group], prompts: Sequence[Prompt]) -> dict[int, Group]:
    """Return the groups, by position, that have these prompts with the same label and further fields."""
    digests = map(prompt_digest, prompts)
    found = {group.position: group for group, digest in zip(groups, digests, strict=True) if group.prompt == digest}
    if num_changed := len(groups) - len(found):
        print(f"responses to {counted(num_changed, 'prompt')} are sampled again: {PROMPTS} have changed", flush=True)
    return found


def _add(group: Group, line: Mapping[str, Any]) -> None:
    """Add what a line of the journal holds."""
    if "sample" in line:
        group.samples.append(_sample(**line["sample"]))
    elif "written" in line:
        group.written[line["sample_index"]] = Generation(**_with_bytes(line["written"]))
    else:
        for sample, grade in zip(group.samples, line["grades"], strict=True):
            sample.grade = Grade(*grade)
        group.failures = metrics_from_json(line["failures"])
        group.is_equal, group.is_finished = line["is_equal"], True


def _sample(*, segments: Sequence[Mapping[str, Any]], **fields: Any) -> Sample:
    return Sample(segments=[Segment(**_with_bytes(one)) for one in segments], **fields)


def _plain(value: Any) -> Any:
    """Return bytes in base64, and the fields of anything else that JSON does not know."""
    return b64encode(value).decode() if isinstance(value, bytes) else vars(value)


def _with_bytes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "choices": b64decode(fields["choices"])}
