"""Responses of an evaluation as HTML, to read."""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

_MARKS = {
    True: '<span class="right" title="passed">&#10003;</span>',
    False: '<span class="wrong" title="not passed">&#10007;</span>',
    None: "",
}
_TITLE_CHARACTERS = 80
_MAX_CHARACTERS = 20_000


def sample_sections(samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A section for each data set: of each prompt a line with whether the response passed, which opens to show all."""
    for dataset, of_set in groupby(samples, key=lambda sample: sample.get("dataset")):
        shown = list(of_set)
        step = f" at step {shown[0]['step']}" if "step" in shown[0] else ""
        title = html.escape(f"Responses{step}" + (f": {dataset}" if dataset else ""))
        yield f"<h2>{title}</h2>\n" + "\n".join(map(_sample, shown))


def _sample(sample: Mapping[str, Any]) -> str:
    prompt = " ".join(str(sample.get("prompt", "")).split())
    title = html.escape(prompt if len(prompt) <= _TITLE_CHARACTERS else f"...{prompt[-_TITLE_CHARACTERS:]}")
    fields = {name: value for name, value in sample.items() if name not in ("dataset", "step", "passed")}
    parts = [f"{html.escape(name)}<pre>{html.escape(_text(value))}</pre>" for name, value in fields.items()]
    return f"<details><summary>{_MARKS[sample.get('passed')]} {title}</summary>{''.join(parts)}</details>"


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    more = len(text) - _MAX_CHARACTERS
    return text if more <= 0 else f"{text[:_MAX_CHARACTERS]} ... ({more:,} more characters)"
