"""Reward functions known by name. Imported by the worker processes, so: the standard library alone."""

from collections.abc import Callable


def exact_match(prompts: list[str], responses: list[str], labels: list) -> list[float]:
    """1.0 where the stripped response equals the stripped label, else 0.0.

    Raises:
        TypeError: a label is not a string or a number.
    """
    return [float(response.strip() == _text(label)) for response, label in zip(responses, labels, strict=True)]


def _text(label: object) -> str:
    if not isinstance(label, str | int | float):
        raise TypeError(f"exact_match needs strings or numbers as labels, found {label!r:.80}; see data.label_key")
    return str(label).strip()


BUILTIN: dict[str, Callable[[list[str], list[str], list], list[float]]] = {"exact_match": exact_match}
"""reward.function -> function."""
