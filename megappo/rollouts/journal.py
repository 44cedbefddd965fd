"""The journal of a run that samples ahead: the responses that it has, so that no kill loses one.

    ahead/
      engine_0_version_00000012.jsonl    engine 0's responses to prompts begun with the weights after step 12
      choices.jsonl                      the groups that each step trained on

The first line of an engine's file holds the settings that its responses were sampled with. Each further line holds a
finished response, the first tokens of an unfinished one (`rollout.keep_partial`), or the grades of all responses to a
prompt. A group is trained on `rollout.max_staleness` + 1 steps after its version at the latest, so old files are
deleted as a whole. A run that resumes trains on the same groups in the steps that an earlier process has done after the
checkpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megappo.engines.generations import Generation
from megappo.observe.files import json_lines, write_json_lines
from megappo.observe.metrics import Metric
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade

JOURNAL_FOLDER, CHOICES_FILE = "ahead", "choices.jsonl"
_FILE = re.compile(r"engine_(\d+)_version_(\d+)\.jsonl")


@dataclass
class BegunGroup:
    """Responses to a prompt, not all of which are finished and scored.

    Attributes:
        version: steps that the weights had been trained for when the group was begun.
        samples: the finished ones.
        written: sample_index -> first tokens of an unfinished one.
    """

    version: int
    samples: list[Sample] = field(default_factory=list)
    written: dict[int, Generation] = field(default_factory=dict)


class Choice(NamedTuple):
    """The groups that a step removed from the queue, by the positions of their prompts.

    Attributes:
        chosen: the step trained on them.
        left_out: algorithm.filter_groups left them out.
        num_draws: batches of prompts that were drawn while the step waited for them.
    """

    chosen: list[int]
    left_out: list[int]
    num_draws: int = 0


@dataclass(frozen=True)
class FinishedGroup:
    """All responses to a prompt, with their grades.

    Attributes:
        position: of the prompt, in the order in which prompts are drawn.
        version: steps that the weights had been trained for when the group was begun.
        is_equal: algorithm.filter_groups leaves it out.
        failures: see `Scored.failure_metrics`.
    """

    position: int
    version: int
    is_equal: bool
    samples: list[Sample]
    failures: Mapping[str, Metric]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(one.num_policy_tokens for one in self.samples)

    def fill_grades(self) -> None:
        """Do nothing: the samples have their grades."""

    def failure_metrics(self) -> dict[str, Metric]:
        """Return those of `Scored`."""
        return dict(self.failures)


class Journal:
    """Journal of one rank's engine, which takes over files of an earlier process that may have had more engines.

    Args:
        number: of this rank's engine, among `num_engines`; None without one.
        settings: see `record.rollout_settings`.
    """

    def __init__(self, output_dir: Path, number: int | None, num_engines: int, settings: Mapping[str, Any]):
        self._folder, self._number, self._num_engines = output_dir / JOURNAL_FOLDER, number, num_engines
        self._settings = json.loads(json.dumps(settings))

    def write_sample(self, position: int, version: int, sample: Sample) -> None:
        """Append a finished response to a prompt, without its grade.

        Args:
            position, version: as of `FinishedGroup`.
        Raises:
            OSError: it cannot be written.
        """
        fields = {name: value for name, value in vars(sample).items() if name != "grade"}
        self._append(version, {"position": position, "sample": fields})

    def write_partial(self, position: int, version: int, sample_index: int, written: Generation) -> None:
        """Append the first tokens of an unfinished response."""
        self._append(version, {"position": position, "sample_index": sample_index, "written": written})

    def write_grades(self, group: FinishedGroup) -> None:
        """Append the grades of a group whose samples have been appended, in this order."""
        facts = {name: value for name, value in vars(group).items() if name not in ("version", "samples")}
        self._append(group.version, facts | {"grades": [one.grade for one in group.samples]})

    def _append(self, version: int, facts: Mapping[str, Any]) -> None:
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"engine_{self._number}_version_{version:08d}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(json.dumps(self._settings) + "\n")
            file.write(json.dumps(facts, default=vars) + "\n")

    def read(self) -> tuple[dict[int, FinishedGroup], dict[int, BegunGroup]]:
        """Return the groups of an earlier process, by position; delete those of other settings.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        finished: dict[int, FinishedGroup] = {}
        begun: dict[int, BegunGroup] = {}
        for version, path in self._files():
            lines = json_lines(path)
            if not lines or lines[0] != self._settings:
                print(f"{path} is deleted: its responses have other settings than this run", flush=True)
                path.unlink()
                continue
            write_json_lines(path, lines)  # without a line that a kill cut short
            for line in lines[1:]:
                group = begun.setdefault(line["position"], BegunGroup(version))
                if "sample" in line:
                    group.samples.append(_sample(**line["sample"]))
                elif "written" in line:
                    group.written[line["sample_index"]] = Generation(**line["written"])
                else:
                    finished[line["position"]] = _graded(group, **line)
                    del begun[line["position"]]
        return finished, begun

    def forget(self, oldest: int) -> None:
        """Delete the groups that were begun with weights before version `oldest`."""
        for version, path in self._files():
            if version < oldest:
                path.unlink()

    def write_choice(self, step: int, choice: Choice) -> None:
        """Append the choice of a step."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / CHOICES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **choice._asdict()}) + "\n")

    def read_choices(self) -> dict[int, Choice]:
        """Return the choices of an earlier process, by step."""
        path = self._folder / CHOICES_FILE
        lines = json_lines(path) if path.exists() else []
        if lines:
            write_json_lines(path, lines)  # without a line that a kill cut short
        return {line.pop("step"): Choice(**line) for line in lines}

    def forget_choices(self, last: int) -> None:
        """Delete the choices of steps up to this one."""
        choices = self.read_choices()
        if choices:
            kept = [{"step": step, **choice._asdict()} for step, choice in choices.items() if step > last]
            write_json_lines(self._folder / CHOICES_FILE, kept)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield version and path of each file of this engine."""
        for path in [] if self._number is None else sorted(self._folder.glob("*.jsonl")):
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) % self._num_engines == self._number:
                yield int(match[2]), path


def _graded(
    group: BegunGroup, *, grades: Sequence[Sequence[Any]], failures: Mapping[str, Sequence[Any]], **facts: Any
) -> FinishedGroup:
    for sample, grade in zip(group.samples, grades, strict=True):
        sample.grade = Grade(*grade)
    metrics = {name: Metric(tuple(part), reduction) for name, (part, reduction) in failures.items()}
    return FinishedGroup(version=group.version, samples=group.samples, failures=metrics, **facts)


def _sample(*, segments: Sequence[Mapping[str, Any]], **fields: Any) -> Sample:
    return Sample(segments=[Segment(**one) for one in segments], **fields)
