"""Built-in reward functions for the format of a response, whatever its answer.

Apart from the graders of answers: a run warns of special tokens that the file of a reward function names.
"""

import re

TAG = re.compile(r"</?(?:think|answer)>")
WORDS_TOGETHER = 3


def think_answer(solution_str: str) -> bool:
    """1.0 where a response is <think>...</think> <answer>...</answer>, neither empty, and each tag once; else 0.0.

    The first tag may lack: chat templates write it into the prompt.

    Source: DeepSeek-AI 2025, DeepSeek-R1, 2.2.2 (format rewards).
    """
    rest = solution_str.lstrip().removeprefix("<think>")
    if TAG.findall(rest) != ["</think>", "<answer>", "</answer>"]:
        return False
    thought, between, answer, after = map(str.strip, TAG.split(rest))
    return bool(thought and answer) and not between and not after


def repetition(solution_str: str) -> float:
    """Minus the share of a response's runs of 3 words that it has had already: 0.0, down to almost -1.0.

    Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning in LLMs, in the form of open-r1's
        repetition_penalty_reward.
    """
    words = solution_str.lower().split()
    runs = [tuple(words[i : i + WORDS_TOGETHER]) for i in range(len(words) - WORDS_TOGETHER + 1)]
    return len(set(runs)) / len(runs) - 1 if runs else 0.0
