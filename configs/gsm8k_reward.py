"""A reward for GSM8K's questions as they are, which ask for no mark before the answer, unlike the prompts of
reward.function gsm8k: does the last number of the response equal the answer's?"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(prompts: list[str], responses: list[str], labels: list[str]) -> list[float]:
    """1.0 where the last numbers of response and label are equal, else 0.0. Labels end in "#### 42".

    Raises:
        ValueError: a label has no number, so no response to it could be right.
    """
    return [float(_last(response) == _right(label)) for response, label in zip(responses, labels, strict=True)]


def _right(label: str) -> float:
    value = _last(label)
    if value is None:
        raise ValueError(f"the label {label!r:.80} has no number; see data.label_key")
    return value


def _last(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
