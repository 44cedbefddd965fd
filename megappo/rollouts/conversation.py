"""The tree of the turns that the policy writes in an episode.

Tokens that the policy wrote are kept as sampled. Messages become text by the chat template, and the text decides where
a turn stands in the tree. Three rules are tried in this order:

1. Each message that is a turn gets the turn's text as sampled. If the rendering begins, to the character, with the text
   of turns, the longest one is the parent, and the tokens of the rest are appended to its tokens.
2. If the template changes only blanks at the ends of the last known turn, or refuses its text as sampled, the
   difference of two renderings is appended to that turn: with the messages after it, and without them.
3. Otherwise the rendering is a prompt of its own. The template drops earlier thoughts, as Qwen3's does, or the history
   was rewritten, or a token would span the end of a turn and the text after it.

A prompt that is plain text has no template, so only the first rule applies.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megappo.data.chat import Chat, PromptContent, Tools
from megappo.data.tokenizer import RenderedText, added_tokens, encode, with_context
from megappo.engines.generations import Generation
from megappo.rollouts.sample_rows import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN_THOUGHT = re.compile(r"(<[^<>/]*think[^<>/]*>|\[THINK\])\s*\Z", re.IGNORECASE)
"""Beginning of a thought at the end of a generation prompt. Templates read it in the content of a message."""


@dataclass(frozen=True)
class TurnPlace:
    """The place of the next turn.

    Attributes:
        text, tokens: the whole prompt.
        begun: text of the turn that the prompt ends with.
        parent: the turn whose text begins the prompt.
        rendered: the messages as the template rendered them.
        follows: number of the parent; without one, of the last turn that the messages hold, or 0.
    """

    text: str
    tokens: list[int]
    begun: str = ""
    parent: "Turn | None" = None
    rendered: str = ""
    follows: int = 0


@dataclass(eq=False)
class Turn:
    """A turn of the policy.

    Attributes:
        number: number of the request that it answers, from 1.
        added: tokens of the prompt after the parent's.
        own_text: text of the prompt after the parent's, and of the turn.
        content: text of the turn without the special token that ends it.
        end: text of that token, or "".
        num_tokens: tokens of prompt and turn.
        num_after: tokens of them after the prompt of the segment.
        extends: the turn is appended to its parent's segment.
        reward: reward of its last token, or of each token.
        parent, begun, rendered, follows: as of `TurnPlace`.
    """

    number: int
    generation: Generation
    parent: "Turn | None"
    follows: int
    begun: str
    rendered: str
    added: list[int]
    own_text: str
    content: str
    end: str
    num_tokens: int
    num_after: int
    extends: bool
    reward: float | list[float] = 0.0

    @property
    def text(self) -> str:
        """Text of prompt and turn, as the engine saw it."""
        return "".join(turn.own_text for turn in self._path())

    @property
    def context(self) -> list[int]:
        """Tokens of prompt and turn."""
        return [token for turn in self._path() for token in (*turn.added, *turn.generation.tokens)]

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt, as the engine saw them."""
        return self.context[: self.num_tokens - len(self.generation.tokens)]

    def _path(self) -> list["Turn"]:
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]


class TurnTree:
    """The turns of an episode. Each is trained once, after the prompt that the engine saw."""

    def __init__(self, chat: Chat, tokenizer: "PreTrainedTokenizerBase"):
        self._chat = chat
        self._tokenizer = tokenizer
        self._turns: dict[Turn, None] = {}  # parents come first

    def place(
        self,
        messages: PromptContent,
        turns: Sequence[Turn | None],
        tools: Tools | None = None,
        *,
        continues: bool = False,
    ) -> TurnPlace:
        """Return the place of the turn that answers these messages, or continues a text.

        Args:
            turns: the turn that each of the messages is; none for a text.
            tools: JSON schemas of the functions that the template lists; None: the chat's.
            continues: the turn continues a last message of the assistant.
        Raises:
            ValueError: the template refuses the messages.
        """
        form = messages
        if not isinstance(messages, str):
            form = [
                message if turn is None else {"role": "assistant", "content": turn.begun + turn.content}
                for message, turn in zip(messages, turns, strict=True)
            ]
        try:
            rendered = self._chat.text_of(form, tools, continues=continues)
        except ValueError:
            form = messages
            rendered = self._chat.text_of(form, tools, continues=continues)
        begun = begun_text(form, rendered, continues=continues)
        known = [turn if turn in self._turns else None for turn in turns]
        for parent, rest in self._continued(form, known, rendered, tools, is_sampled=form is not messages):
            added = self._added(parent.text, rest)
            if added is not None:
                text, tokens = parent.text + rest, parent.context + added
                return TurnPlace(text, tokens, begun, parent, rendered, parent.number)
        [tokens] = encode([RenderedText(rendered, is_chat=not isinstance(form, str))], self._tokenizer)
        follows = next((turn.number for turn in reversed(known) if turn), 0)
        return TurnPlace(rendered, tokens, begun, None, rendered, follows)

    def room(self, place: TurnPlace, limits: tuple[int, int]) -> int:
        """Return the number of tokens that the policy may write at a place.

        Args:
            limits: tokens that a segment may have after its prompt, and together with it.
        """
        after_prompt, total = limits
        num_tokens = len(place.tokens)
        return min(after_prompt - self._num_after(place.parent, num_tokens), total - num_tokens)

    def write(self, place: TurnPlace, generation: Generation, number: int) -> Turn:
        """Add a turn of the policy."""
        tokens = generation.tokens
        end = self._tokenizer.decode(tokens[-1:])
        has_end = bool(tokens) and not self._tokenizer.decode(tokens[-1:], skip_special_tokens=True)
        parent = place.parent if place.parent in self._turns else None
        is_last = not any(turn.parent is parent and turn.extends for turn in self._turns)
        extends = parent is not None and is_last
        num_tokens = len(place.tokens) + len(tokens)
        turn = Turn(
            number,
            generation,
            parent,
            place.follows,
            place.begun,
            place.rendered,
            added=place.tokens[0 if parent is None else parent.num_tokens :],
            own_text=place.text[0 if parent is None else len(parent.text) :] + self._tokenizer.decode(tokens),
            content=self._tokenizer.decode(tokens[:-1] if has_end else tokens),
            end=end if has_end else "",
            num_tokens=num_tokens,
            num_after=self._num_after(parent, num_tokens) if extends else len(tokens),
            extends=extends,
        )
        self._turns[turn] = None
        return turn

    def drop(self, turn: Turn) -> None:
        """Remove a turn that is not trained.

        Raises:
            ValueError: other turns follow it.
        """
        if any(other.parent is turn for other in self._turns):
            raise ValueError(f"turn {turn.number} is the beginning of further turns, so it cannot be dropped")
        del self._turns[turn]

    def segments(self) -> list[Segment]:
        """Return the segments of all turns. A turn that extends the end of a segment is appended to it; any other
        begins a segment with its whole prompt."""
        segments: list[Segment] = []
        ends: dict[Turn | None, Segment] = {}
        for turn in sorted(self._turns, key=lambda turn: turn.number):
            if turn.extends:
                segment = ends[turn.parent]
                segment.observe(turn.added)
            else:
                segment = Segment(turn.prompt, parent=turn.follows)
                segments.append(segment)
            segment.write(turn.generation, turn.number)
            segment.reward(turn.reward)
            ends[turn] = segment
        return segments

    def _num_after(self, parent: Turn | None, num_tokens: int) -> int:
        """Return how many of a context's tokens follow the prompt of the segment that the parent is in."""
        return 0 if parent is None else parent.num_after + num_tokens - parent.num_tokens

    def _continued(
        self,
        form: PromptContent,
        known: Sequence[Turn | None],
        rendered: str,
        tools: Tools | None,
        *,
        is_sampled: bool,
    ) -> Iterator[tuple[Turn, str]]:
        """Yield the turns that the messages may continue, each with the text after it."""
        ends: dict[Turn | None, int] = {None: 0}
        for turn in self._turns:
            start = ends.get(turn.parent)
            if start is not None and rendered.startswith(turn.own_text, start):
                ends[turn] = start + len(turn.own_text)
        longest = max(ends, key=lambda turn: (ends[turn], turn in known))
        if longest is not None:
            yield longest, rendered[ends[longest] :]
        position = max((position for position, turn in enumerate(known) if turn), default=None)
        if position is None or isinstance(form, str):
            return
        turn, until = known[position], form[: position + 1]
        try:
            before = self._chat.text_of(until[:-1], tools, continues=False)
            closed = self._chat.whole_text(until, tools)
        except ValueError:
            return
        if before == turn.rendered and rendered.startswith(closed):
            rest = _after_turn(turn, closed, rendered[len(closed) :], is_sampled=is_sampled)
            if rest is not None:
                yield turn, rest

    def _added(self, before: str, text: str) -> list[int] | None:
        """Return the tokens of a text after another; None if a token would span both."""
        try:
            return added_tokens(*encode(with_context(before, text), self._tokenizer), self._tokenizer)
        except ValueError:
            return None


def _after_turn(turn: Turn, closed: str, rest: str, *, is_sampled: bool) -> str | None:
    """Return the text after a turn; None if the template ends the turn with another token than the policy did, or
    changes its text as sampled by more than blanks.

    Args:
        closed: rendering of the messages up to the turn.
        rest: rendering of the messages after it.
        is_sampled: they were rendered with the text as sampled.
    """
    body = closed.rstrip()
    content = body.removesuffix(turn.end).rstrip()
    if not turn.end or (is_sampled and not content.endswith(turn.content.strip())):
        return None
    if body.endswith(turn.end):
        return closed[len(body) :] + rest
    return rest.removeprefix(turn.end) if rest.startswith(turn.end) else None


def begun_text(messages: PromptContent, rendered: str, *, continues: bool) -> str:
    """Return the text with which a prompt begins the turn after it: a message of the assistant that the turn continues,
    or the beginning of a thought."""
    if continues and not isinstance(messages, str) and messages[-1]["role"] == "assistant":
        return messages[-1]["content"]
    found = OPEN_THOUGHT.search(rendered)
    return found[0] if found else ""
