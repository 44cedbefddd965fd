"""A few rollouts per evaluation, for people: printed, and kept as jsonl."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.config_error import printable
from megappo.observe.files import ROLLOUTS_FOLDER
from megappo.observe.loggers import Logger, RunInfo

PRINTED_CHARACTERS = 400
NOT_SHOWN = ("dataset", "step", "passed")
"""Fields that are in the title of a rollout."""


class SampleFiles(Logger):
    """Keeps the samples of each evaluation in `rollouts/`."""

    def on_start(self, run: RunInfo) -> None:
        """Remove what an earlier run sampled for `resume_step` and later, so that no step stands twice."""
        self._output_dir = run.output_dir
        drop_samples(run.output_dir, run.resume_step)

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples to the step's file."""
        append_samples(self._output_dir, step, samples)


def append_samples(output_dir: str | Path, step: int, samples: Sequence[Mapping[str, Any]]) -> Path:
    """Append samples, one JSON object a line, to `rollouts/step_XXXXXXXX.jsonl` and return that path."""
    path = Path(output_dir) / ROLLOUTS_FOLDER / f"step_{step:08d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")
    return path


def drop_samples(output_dir: str | Path, resume_step: int, ending: str = "jsonl") -> None:
    """Remove what an earlier run sampled at `resume_step` and later, so that no step stands twice."""
    for path in sample_files(output_dir, ending):
        if int(path.stem.removeprefix("step_")) >= resume_step:
            path.unlink()


def sample_files(output_dir: str | Path, ending: str = "jsonl") -> list[Path]:
    """Return the files of a run's samples, jsonl, or of its kept rollouts, parquet; a file a step, in their order."""
    return sorted((Path(output_dir) / ROLLOUTS_FOLDER).glob(f"step_[0-9]*.{ending}"))


def format_samples(step: int, samples: Sequence[Mapping[str, Any]]) -> str:
    """Return samples as indented text: a rule per sample, then a line per field; unprintables escaped, long texts
    cut."""
    lines = []
    for number, sample in enumerate(samples, start=1):
        dataset = f", {sample['dataset']}" if "dataset" in sample else ""
        lines.append(f"-- step {step}{dataset}, sample {number} of {len(samples)} " + "-" * 30)
        for name, text in _shown(sample, PRINTED_CHARACTERS).items():
            lines.append(f"   {name:<8} : {printable(text)}")
    return "\n".join(lines)


def _shown(sample: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Return the fields of a sample as texts of at most `limit` characters."""
    texts = {}
    for name, value in sample.items():
        if name not in NOT_SHOWN:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            more = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
            texts[name] = text[:limit] + more
    return texts
