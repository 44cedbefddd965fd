"""A graded reward for sums, for configs/smollm2.yaml: few answers are right at first, so partly right ones count."""


def sums(prompts: list[str], responses: list[str], labels: list[str]) -> list[dict[str, float]]:
    """Return the score of each response, and `right`, which is 1 for the right number.

    A number alone with as many digits as the right one scores 0.2, with the right last digit 0.4 more, and with the
    right other digits 0.4 more. Everything else scores at most 0.1, by its share of digits.
    """
    return [_score(response.strip(), label) for response, label in zip(responses, labels, strict=True)]


def _score(text: str, label: str) -> dict[str, float]:
    if not text.isdecimal() or len(text) != len(label):
        return {"score": 0.1 * sum(map(str.isdecimal, text)) / max(len(text), 1), "right": 0.0}
    score = 0.2 + 0.4 * (text[-1] == label[-1]) + 0.4 * (text[:-1] == label[:-1])
    return {"score": score, "right": float(text == label)}
