"""Reward functions known by name, and where they are."""

_GRADERS = "megappo.rewards.graders"
BUILTIN = {
    "exact_match": f"{_GRADERS}.texts:exact_match",
    "regex_match": f"{_GRADERS}.texts:regex_match",
    "multiple_choice": f"{_GRADERS}.texts:multiple_choice",
    "gsm8k": f"{_GRADERS}.gsm8k:gsm8k",
    "math": f"{_GRADERS}.mathematics:math",
    "think_answer": f"{_GRADERS}.forms:think_answer",
    "code": f"{_GRADERS}.code:code",
    "http": f"{_GRADERS}.remote:http",
    "judge": f"{_GRADERS}.remote:judge",
    "repetition": f"{_GRADERS}.forms:repetition",
}
"""reward.function -> module:function."""
WAITING = ("http",)
"""Of these, functions of lists that wait for others: they get many rows at once, however long they take."""
ANSWERS = {
    BUILTIN["exact_match"]: f"{_GRADERS}.texts:whole",
    BUILTIN["multiple_choice"]: f"{_GRADERS}.texts:chosen",
    BUILTIN["gsm8k"]: f"{_GRADERS}.gsm8k:answer",
    BUILTIN["math"]: f"{_GRADERS}.mathematics:answer",
}
"""Of those that compare an answer: the function of a response that finds it, as what can be made a text, or None."""
