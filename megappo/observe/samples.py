"""A few rollouts per evaluation, for people: printed, kept as jsonl, and shown in the report."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megappo.config.config_error import printable
from megappo.observe.loggers import Logger, RunInfo

ROLLOUTS_FOLDER = "rollouts"
PRINTED_CHARACTERS = 400
REPORTED_CHARACTERS = 20_000
TITLE_CHARACTERS = 80
NOT_SHOWN = ("dataset", "step", "passed")
"""Fields that are in the title of a rollout."""
MARKS = {
    True: '<span class="right" title="passed">&#10003;</span>',
    False: '<span class="wrong" title="not passed">&#10007;</span>',
    None: "",
}


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


def drop_samples(output_dir: str | Path, resume_step: int) -> None:
    """Remove what an earlier run sampled at `resume_step` and later, so that no step stands twice."""
    for path in _files(output_dir):
        if int(path.stem.removeprefix("step_")) >= resume_step:
            path.unlink()


def read_samples(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the samples of the last step that has any, without a last line that a kill cut short."""
    files = _files(output_dir)
    text = files[-1].read_text("utf-8") if files else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]  # splitlines would split in texts, at U+2028


def _files(output_dir: str | Path) -> list[Path]:
    return sorted((Path(output_dir) / ROLLOUTS_FOLDER).glob("step_[0-9]*.jsonl"))


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


def sample_sections(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield HTML for each data set: for each prompt a line with whether the response passed, which opens to show
    all."""
    for dataset, of_set in groupby(samples, key=lambda sample: sample.get("dataset")):
        shown = list(of_set)
        title = f"Responses at step {shown[0].get('step')}" + (f": {dataset}" if dataset else "")
        yield f"<h2>{html.escape(title)}</h2>\n" + "\n".join(map(_details, shown))


def _details(sample: Mapping[str, Any]) -> str:
    prompt = " ".join(str(sample.get("prompt", "")).split())
    fields = _shown(sample, REPORTED_CHARACTERS)
    parts = [f"{html.escape(name)}<pre>{html.escape(text)}</pre>" for name, text in fields.items()]
    title = f"{MARKS[sample.get('passed')]} {html.escape(prompt[-TITLE_CHARACTERS:])}"
    return f"<details><summary>{title}</summary>{''.join(parts)}</details>"


def _shown(sample: Mapping[str, Any], limit: int) -> dict[str, str]:
    """Return the fields of a sample as texts of at most `limit` characters."""
    texts = {}
    for name, value in sample.items():
        if name not in NOT_SHOWN:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            more = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
            texts[name] = text[:limit] + more
    return texts
