"""A few rollouts per evaluation, for people: printed, and kept as jsonl."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROLLOUTS_FOLDER = "rollouts"
_MAX_CHARACTERS = 400


def append_samples(output_dir: str | Path, step: int, samples: Sequence[Mapping[str, Any]]) -> Path:
    """Append samples, one JSON object a line, to `rollouts/step_XXXXXXXX.jsonl` and return that path."""
    folder = Path(output_dir) / ROLLOUTS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")
    return path


def drop_samples(output_dir: str | Path, resume_step: int) -> None:
    """Remove what an earlier run sampled at `resume_step` and later, so that no step stands twice."""
    for path in (Path(output_dir) / ROLLOUTS_FOLDER).glob("step_[0-9]*.jsonl"):
        if int(path.stem.removeprefix("step_")) >= resume_step:
            path.unlink()


def read_samples(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the samples of the last step that has any, without a last line that a kill cut short."""
    files = sorted((Path(output_dir) / ROLLOUTS_FOLDER).glob("step_[0-9]*.jsonl"))
    text = files[-1].read_text("utf-8") if files else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]  # splitlines would split in texts, at U+2028


def format_samples(step: int, samples: Sequence[Mapping[str, Any]]) -> str:
    """Samples as indented text: a rule per sample, then a line per field; unprintables escaped, long texts cut."""
    lines = []
    for number, sample in enumerate(samples, start=1):
        dataset = f", {sample['dataset']}" if "dataset" in sample else ""
        lines.append(f"-- step {step}{dataset}, sample {number} of {len(samples)} " + "-" * 30)
        shown = {key: value for key, value in sample.items() if key not in ("dataset", "passed")}
        width = max(len(key) for key in shown)
        lines.extend(f"   {key.ljust(width)} : {_shown(value)}" for key, value in shown.items())
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text) - _MAX_CHARACTERS} more characters)"
