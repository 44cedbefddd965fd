"""Rewards for the format of a response, whatever its answer."""

import re

TAG = re.compile(r"</?(?:think|answer)>")
WORDS_TOGETHER = 3


def think_answer(responses: list[str]) -> list[float]:
    """1.0 where a response is <think>...</think> <answer>...</answer>, neither empty, and each tag once; else 0.0.

    The first tag may lack: chat templates write it into the prompt.

    Source: DeepSeek-AI 2025, DeepSeek-R1, 2.2.2 (format rewards).
    """
    return [float(_is_think_answer(response)) for response in responses]


def repetition(responses: list[str]) -> list[float]:
    """Minus the share of a response's runs of 3 words that it has had already: 0.0, down to almost -1.0.

    Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning in LLMs, in the form of open-r1's
        repetition_penalty_reward.
    """
    return [-_share_repeated(response.lower().split()) for response in responses]


def _is_think_answer(response: str) -> bool:
    rest = response.lstrip().removeprefix("<think>")
    if TAG.findall(rest) != ["</think>", "<answer>", "</answer>"]:
        return False
    thought, between, answer, after = TAG.split(rest)
    return bool(thought.strip() and answer.strip() and not between.strip() and not after.strip())


def _share_repeated(words: list[str]) -> float:
    runs = [tuple(words[i : i + WORDS_TOGETHER]) for i in range(len(words) - WORDS_TOGETHER + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
