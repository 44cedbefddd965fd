"""The journal of a run that samples ahead: finished groups of responses, so that no kill loses one.

    ahead/
      engine_0_version_00000012.jsonl    groups that engine 0 began with the weights after step 12
      choices.jsonl                      the groups that each step trained on

The first line of an engine's file holds the settings that its groups were sampled with, each further line a group. A
group is trained on `rollout.max_staleness` + 1 steps after its version at the latest, so old files are deleted as a
whole. A run that resumes trains on the same groups in the steps that an earlier process has done after the checkpoint.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.observe.files import json_lines, write_json_lines
from megappo.observe.metrics import Metric
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade

JOURNAL_FOLDER, CHOICES_FILE = "ahead", "choices.jsonl"
_FILE = re.compile(r"engine_(\d+)_version_(\d+)\.jsonl")


@dataclass(frozen=True)
class FinishedGroup:
    """All responses to a prompt, with their grades.

    Attributes:
        position: of the prompt, in the order in which prompts are drawn.
        version: steps that the weights had been trained for when the group was begun.
        order: place among the run's finished groups.
        counts: a step can train on it; False for groups that algorithm.filter_groups leaves out.
        failures: see `Scored.failure_metrics`.
    """

    position: int
    version: int
    order: int
    counts: bool
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
    """The journal as one rank sees it. An engine takes over files of an earlier process, which may have had more.

    Args:
        number: of this rank's engine, among `num_engines`; None without one.
        settings: see `record.rollout_settings`.
    """

    def __init__(self, output_dir: Path, number: int | None, num_engines: int, settings: Mapping[str, Any]):
        self._folder, self._number, self._num_engines = output_dir / JOURNAL_FOLDER, number, num_engines
        self._settings = json.loads(json.dumps(settings))

    def write(self, group: FinishedGroup) -> None:
        """Append a group.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"engine_{self._number}_version_{group.version:08d}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(json.dumps(self._settings) + "\n")
            file.write(json.dumps(group, default=vars) + "\n")

    def read(self) -> dict[int, FinishedGroup]:
        """Return the groups of an earlier process, by position; groups of other settings are deleted.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        groups = {}
        for _, path in self._files():
            lines = json_lines(path)
            if lines and lines[0] == self._settings:
                write_json_lines(path, lines)  # without a line that a kill cut short
                groups |= {group.position: group for group in map(_group, lines[1:])}
            else:
                path.unlink()
        return groups

    def forget(self, oldest: int | None = None) -> None:
        """Delete the groups that were begun with weights before version `oldest`; None: all."""
        for version, path in self._files():
            if oldest is None or version < oldest:
                path.unlink()

    def write_choice(self, step: int, positions: list[int]) -> None:
        """Append the groups that a step trains on, by the positions of their prompts."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / CHOICES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "positions": positions}) + "\n")

    def read_choices(self) -> dict[int, list[int]]:
        """Return the positions of each step that an earlier process has chosen."""
        path = self._folder / CHOICES_FILE
        lines = json_lines(path) if path.exists() else []
        if lines:
            write_json_lines(path, lines)  # without a line that a kill cut short
        return {line["step"]: line["positions"] for line in lines}

    def forget_choices(self, last: int) -> None:
        """Delete the choices of steps up to this one."""
        choices = self.read_choices()
        if choices:
            kept = [{"step": step, "positions": positions} for step, positions in choices.items() if step > last]
            write_json_lines(self._folder / CHOICES_FILE, kept)

    def _files(self) -> Iterator[tuple[int, Path]]:
        """Yield version and path of each file of this engine."""
        for path in [] if self._number is None else sorted(self._folder.glob("*.jsonl")):
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) % self._num_engines == self._number:
                yield int(match[2]), path


def _group(line: Mapping[str, Any]) -> FinishedGroup:
    samples = [_sample(**fields) for fields in line["samples"]]
    failures = {name: Metric(tuple(part), reduction) for name, (part, reduction) in line["failures"].items()}
    return FinishedGroup(**{**line, "samples": samples, "failures": failures})


def _sample(*, segments: Sequence[Mapping[str, Any]], grade: Sequence[Any], **fields: Any) -> Sample:
    return Sample(segments=[Segment(**one) for one in segments], grade=Grade(*grade), **fields)
