"""A response of a run as text, for `megappo samples`."""

from collections.abc import Iterator, Mapping
from typing import Any

from megappo.errors import escaped
from megappo.observe.samples import beginning, turn_indent

TEXTS = ("prompt", "response", "label")
NAME_CHARACTERS = 9
"""Least width of the column with the names of texts."""


def sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a response: its data set, score and ending, then its texts."""
    outcome = {True: ", passed", False: ", not passed", None: ""}[sample["passed"]]
    ending = f", ended by {sample['finish_reason']}" if "finish_reason" in sample else ""
    parts = "".join(f", {name} {number:g}" for name, number in (sample.get("parts") or {}).items())
    yield escaped(f"-- {sample['dataset']}, score {sample['score']:.4g}{outcome}{ending}{parts}")
    texts = [(name, sample[name]) for name in TEXTS]
    if turns := sample.get("turns"):
        texts[1:2] = [(_writer(turn), turn["text"]) for turn in turns]
    width = max(NAME_CHARACTERS, *(len(name) for name, _ in texts))
    for name, text in texts:
        for number, line in enumerate(str(text).splitlines() or [""]):
            yield f"   {'' if number else name:<{width}} {escaped(line)}".rstrip()


def _writer(turn: Mapping[str, Any]) -> str:
    """Return who wrote a turn, and the reward that it got."""
    writer = f"policy {turn['turn']}" if turn["turn"] else escaped(beginning(turn)) or "environment"
    reward = f", reward {turn['reward']:.4g}" if turn["reward"] else ""
    return f"{turn_indent(turn)}{writer}{reward}"
