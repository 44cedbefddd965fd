"""The tool and the reward of configs/calculator.yaml. tools/make_example.py makes its prompts."""


def calculator(expression: str) -> str:
    """Multiply two numbers.

    Args:
        expression: such as 12*34
    """
    first, second = expression.split("*")
    return str(int(first) * int(second))


def right_answer(responses: list[str], labels: list[str]) -> list[float]:
    """1 for what stands behind the last = and is the label."""
    return [
        float("=" in response and response.rpartition("=")[2] == label)
        for response, label in zip(responses, labels, strict=True)
    ]
