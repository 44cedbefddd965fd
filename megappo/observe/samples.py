"""A few rollouts per evaluation, for people: printed, and kept as jsonl."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from megappo.config.config_error import printable
from megappo.config.loading import leaves
from megappo.config.text_files import json_lines
from megappo.observe.files import ROLLOUTS_FOLDER, files_named, number_of
from megappo.observe.findings import Samples
from megappo.observe.loggers import Logger, RunInfo
from megappo.observe.run_file import config_of
from megappo.runtime.durable_files import append
from megappo.table import resolved

TRAINING = "training"
"""The data set of kept rollouts, as held-out data sets have their names."""
COLUMNS = [
    "step",
    "dataset",
    "prompt",
    "images",
    "response",
    "label",
    "score",
    "parts",
    "passed",
    "finish_reason",
    "turns",
]
"""Columns of kept rollouts that are shown."""
VERDICTS = {-1.0, 0.0, 1.0}
"""Scores of a reward that is 1 for a right response."""
FACTS = {"label": "label {}", "score": "score {:.4g}"}
"""Fields that are printed after prompt and response, and how."""
LINE_CHARACTERS = 120
REMEDY = "remove the file"


class StoredTurn(BaseModel, strict=True, allow_inf_nan=False):
    """Types of a turn's fields in a file of JSON lines."""

    turn: int
    text: str
    reward: float
    begins: str = ""
    follows: int = 0
    depth: int = 0


class StoredSample(BaseModel, strict=True, allow_inf_nan=False):
    """Types of a sample's fields in a file of JSON lines."""

    step: int = Field(ge=0)
    dataset: str = ""
    images: list[str] | None = None
    score: float = 0.0
    passed: bool | None = None
    finish_reason: str = ""
    parts: dict[str, float] = {}
    turns: list[StoredTurn] = []


class SampleFiles(Logger):
    """Keeps the samples of each evaluation in `rollouts/`."""

    def on_start(self, run: RunInfo) -> None:
        """Remove what an earlier run sampled for `resume_step` and later, so that no step stands twice."""
        self._output_dir = run.output_dir
        drop_samples(run.output_dir, run.resume_step)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Append the samples, one JSON object a line, to `rollouts/step_XXXXXXXX.jsonl`."""
        path = self._output_dir / ROLLOUTS_FOLDER / f"step_{step:08d}.jsonl"
        lines = (json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
        append(path, "".join(lines))


def drop_samples(output_dir: str | Path, resume_step: int, ending: str = "jsonl") -> None:
    """Remove what an earlier run sampled at `resume_step` and later, so that no step stands twice."""
    for path in sample_files(output_dir, ending):
        if number_of(path) >= resume_step:
            path.unlink()


def sample_files(output_dir: str | Path, ending: str = "jsonl") -> list[Path]:
    """Return the files of a run's samples, jsonl, or of its kept rollouts, parquet; a file a step, in their order."""
    return files_named(Path(output_dir, ROLLOUTS_FOLDER), "step", ending=ending)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of one of `sample_files`; of kept rollouts without the numbers of their tokens.

    Raises:
        ConfigError: the file cannot be read, or is not what a run writes.
    """
    if path.suffix == ".jsonl":
        return json_lines(path, StoredSample.model_validate, REMEDY)
    read_kept = resolved("megappo.observe.kept_table:read_kept")  # a command refuses a wrong argument at once
    rows = read_kept(path, COLUMNS).to_pylist(maps_as_pydicts="strict")
    return [row | {"dataset": row["dataset"] or TRAINING} for row in rows]


def mark_passed(samples: Sequence[dict[str, Any]], folder: Path) -> None:
    """Set `passed` of a run's samples to None where scores are more than right or wrong, as partial rewards are, a
    judge's, and a reward model's, unless the config has another threshold than 1."""
    settings = leaves(config_of(folder))
    if any(path.endswith("pass_threshold") and value not in (None, 1) for path, value in settings):
        return
    graded = {sample.get("dataset") for sample in samples if sample.get("score", 0.0) not in VERDICTS}
    for sample in samples:
        if sample.get("dataset") in graded:
            sample["passed"] = None


def format_samples(samples: Samples) -> str:
    """Return samples as text, unprintables escaped: as many on a line as fit, else prompt, response and score on a line
    each, cut where they are longer. Each turn of an episode has a line: `->` of the policy, `<-` of the environment or
    agent; a branch is indented."""
    lines = [""]
    for sample in samples:
        response = [f"-> {sample.get('response', '')}"]
        if turns := sample.get("turns"):
            response = [_turn_line(turn) for turn in turns]
        facts = [template.format(sample[name]) for name, template in FACTS.items() if sample.get(name) is not None]
        result = f"({', '.join(facts)})" if facts else ""
        parts = [printable(part) for part in (str(sample.get("prompt", "")), *response, result)]
        text = f"  {' '.join(parts)}".rstrip()
        if turns or len(text) > LINE_CHARACTERS:
            lines += [f"  {_fitting(part)}" for part in parts] + [""]
        elif len(lines[-1]) + len(text) <= LINE_CHARACTERS:
            lines[-1] += text
        else:
            lines.append(text)
    return "\n".join(filter(None, lines))


def _turn_line(turn: Mapping[str, Any]) -> str:
    arrow = "->" if turn["turn"] else "<-"
    begins = f"({beginning(turn)}) " if beginning(turn) else ""
    return f"{turn_indent(turn)}{arrow} {begins}{turn['text']}"


def beginning(turn: Mapping[str, Any]) -> str:
    """Return where the segment that a turn begins stands, such as "branch after turn 1"; "" if it begins none."""
    return f"{turn['begins']} after turn {turn['follows']}" if turn.get("begins") else ""


def turn_indent(turn: Mapping[str, Any]) -> str:
    """Return the blanks before a turn of a branch."""
    return "  " * (turn.get("depth") or 0)


def _fitting(text: str) -> str:
    """Return a text cut to a line: start and end of a response show more than its middle."""
    half = (LINE_CHARACTERS - 10) // 2
    return text if len(text) <= LINE_CHARACTERS - 2 else f"{text[:half]} ... {text[-half:]}"


def sample_key(sample: Mapping[str, Any]) -> str:
    """Return the name under which trackers have the samples of this one's data set."""
    dataset = sample.get("dataset", "all")
    return f"{dataset}/samples" if dataset == TRAINING else f"val/{dataset}/samples"


def sample_table(samples: Samples) -> tuple[list[str], list[list[str]]]:
    """Return names of columns, and a row of texts for each sample; "" where it lacks a column."""
    columns = list(dict.fromkeys(name for sample in samples for name in sample))
    return columns, [[str(sample.get(name, "")) for name in columns] for sample in samples]


def sample_text(sample: Mapping[str, Any]) -> str:
    """Return the fields of a sample, a line or more each."""
    return "\n".join(f"{name}: {value}" for name, value in sample.items())
