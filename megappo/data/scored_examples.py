"""Trajectories with scores, of which a critic learns: conversations as examples of fine-tuning have them, or tokens."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from megappo.data.chat import Chat
from megappo.data.entries import finite_number
from megappo.data.examples import FORMS, Encoded, Example, ExampleDataset, ExampleText
from megappo.data.records import Records
from megappo.data.tokenizer import token_texts
from megappo.userland.grades import Step, read_steps

OUTCOME_FIELDS = ("score", "steps", "truncated", "response_mask")
"""Fields beside the conversation; a record may lack all but the first."""


class Outcome(NamedTuple):
    """Score of a record, and further facts that the text of its conversation lacks.

    Attributes:
        steps: rewards of parts of `response`, which is a text, messages or tokens.
        encoded: tokens of the whole with their mask, if the record has tokens in place of text.
    """

    score: float
    steps: Sequence[Step]
    truncated: bool
    response: Any
    encoded: Encoded | None


class ScoredDataset(ExampleDataset):
    """Trajectories of some files; arguments as of `ConversationDataset`.

    Args:
        shapings: keys that change the score of a response, and so cannot apply to rewards of steps.
    """

    noun = "trajectories"
    forms = ({"prompt": "prompt_tokens", "response": "response_tokens"}, *FORMS)
    hint = "{messages: dialogue, score: reward}"
    fields = ("scores", "truncated", "episodes", "segments", "turns", "turn_rewards")

    def __init__(self, *args: Any, shapings: Sequence[str], **settings: Any):
        super().__init__(*args, **settings)
        self._shapings = shapings

    def _form(self, file: Records) -> Mapping[str, str]:
        return {name: name for name in OUTCOME_FIELDS} | dict(super()._form(file))

    def _texts_of(self, record: Any, file: Records) -> list[ExampleText]:
        if isinstance(record, dict):
            record = dict.fromkeys(OUTCOME_FIELDS[1:]) | record
        return super()._texts_of(record, file)

    def _texts(self, chat: Chat, parts: Mapping[str, Any]) -> list[ExampleText]:
        score, steps, truncated, mask = (parts[name] for name in OUTCOME_FIELDS)
        prompt = parts.get("prompt")
        response = parts["messages"] if "messages" in parts else parts["response"]
        if truncated not in (None, False, True):  # 0 and 1 are equal to these
            raise ValueError(f"expected true or false as truncated, found {truncated!r:.40}")
        encoded = None
        if _are_tokens(prompt) or _are_tokens(response) or mask is not None:
            encoded = _masked(prompt, response, mask)
            text = ExampleText([""], "")
        else:
            [text] = super()._texts(chat, parts)
        num_messages = len(response) if isinstance(response, list) else 1
        if truncated and not encoded and (not text.ends or text.ends[-1] == num_messages):  # without an end token
            *others, last = text.parts
            for ending in self._endings:
                last = last.removesuffix(ending)
            text = text._replace(parts=[*others, last])
        read = read_steps(steps or [], len(response), name="steps")
        if read and self._shapings:
            raise ValueError(f"{self._shapings[0]} changes the score, not the rewards of steps: drop one")
        score = finite_number(score, "the score")
        return [text._replace(outcome=Outcome(score, read, bool(truncated), response, encoded))]

    def _encoded(self, records: Sequence[Sequence[ExampleText]]) -> Iterator[Iterator[Encoded]]:
        of_texts = super()._encoded([texts for texts in records if not texts[0].outcome.encoded])
        for [text] in records:
            yield iter([text.outcome.encoded]) if text.outcome.encoded else next(of_texts)

    def _entry(self, index: int, texts: Sequence[ExampleText], encoded: Sequence[Encoded]) -> Example:
        """Return a trajectory: an episode of one segment.

        The reward of a step is on the token that completes it, or on the last one with a loss before its end. A step
        that ends before the first of these is in no return.
        """
        [(tokens, mask)] = encoded
        outcome = texts[0].outcome
        turns = _turns(mask)
        rewards = [0.0] * len(tokens)
        learned = [place for place, turn in enumerate(turns) if turn]
        counts = self._counts(texts[0], tokens, turns, learned) if outcome.steps else []
        for end, reward in outcome.steps:
            if found := bisect_right(counts, end):
                rewards[learned[found - 1]] += reward
        fields = {"truncated": float(outcome.truncated), "turns": turns, "turn_rewards": rewards}
        fields |= {"scores": outcome.score + sum(rewards), "episodes": 0.0, "segments": 0.0}
        return Example(index, tokens, mask, fields)

    def _counts(
        self, text: ExampleText, tokens: Sequence[int], turns: Sequence[int], learned: Sequence[int]
    ) -> list[int]:
        """Return the least end of a step that each token with a loss completes, or precedes as the last of these.

        Raises:
            ValueError: the tokens do not show how many.
        """
        outcome = text.outcome
        if outcome.encoded:
            start = len(tokens) - len(outcome.response)
            return [place + 1 - start for place in learned]
        if not isinstance(outcome.response, str):
            if max(turns) != len(text.ends):
                raise ValueError("no text is between two messages of the assistant, so steps have no place: join them")
            return [text.ends[turns[place] - 1] for place in learned]
        texts = token_texts([tokens[place] for place in learned], self._tokenizer)
        written = outcome.response.strip()
        begin = "".join(texts).find(written)
        if begin < 0:
            raise ValueError(f"the tokens have another text, {''.join(texts)!r:.80}, so steps have no place in it")
        begin -= outcome.response.index(written)
        return [length + 1 - begin for length in accumulate(map(len, texts[:-1]), initial=0)]


def _masked(prompt: Any, response: Any, given: Any) -> Encoded:
    """Return the tokens of a prompt and a response with their mask.

    Args:
        given: the mask of the response; None: all of it has a loss.
    Raises:
        ValueError: they are no tokens, or no mask.
    """
    if _are_tokens(prompt) and _are_tokens(response):
        mask = [1] * len(response) if given is None else given
        if _are_tokens(mask) and len(mask) == len(response) and max(mask) <= 1:
            return [*prompt, *response], [0] * len(prompt) + mask
    found = repr((prompt, response, given))[:120]
    raise ValueError(f"expected tokens as prompt and response, and 0 or 1 for each as response_mask, found {found}")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} == {int} and min(value) >= 0


def _turns(mask: Sequence[int]) -> list[int]:
    """Return for each token the number, from 1, of its run of tokens with a loss, or 0."""
    numbers = accumulate(is_learned > before for before, is_learned in pairwise([0, *mask]))
    return [number * is_learned for number, is_learned in zip(numbers, mask, strict=True)]
