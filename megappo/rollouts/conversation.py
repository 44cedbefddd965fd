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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from megappo.data.chat import Chat, PromptContent, Tools
from megappo.data.tokenizer import RenderedText, added_tokens, encode, with_context
from megappo.engines.generations import Generation
from megappo.rollouts.sample_rows import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN_THOUGHT = re.compile(r"(?:<[^<>/]*think[^<>/]*>|\[THINK\])\s*\Z|\Z", re.IGNORECASE)
"""Beginning of a thought at the end of a generation prompt, or "". Templates read it in the content of a message."""


@dataclass(frozen=True)
class TurnPlace:
    """The place of a turn in the tree.

    Attributes:
        path: the turns before it that begin the prompt, from the root.
        added, added_text: tokens and text of the prompt after these turns.
        rendering: hash of the messages as the template rendered them.
        follows: the last turn in `path`; without one, the last turn that the messages hold.
    """

    path: Sequence["Turn"]
    added: list[int]
    added_text: str
    rendering: int
    follows: "Turn | None" = None

    @property
    def parent(self) -> "Turn | None":
        """The turn whose text begins the prompt."""
        return self.path[-1] if self.path else None

    @property
    def text(self) -> str:
        """Text of the whole prompt."""
        return "".join(turn.own_text for turn in self.path) + self.added_text

    @property
    def tokens(self) -> list[int]:
        """Tokens of the whole prompt, as the engine sees them."""
        before = [token for turn in self.path for token in turn.place.added + turn.generation.tokens]
        return before + self.added


@dataclass(eq=False)
class Turn:
    """A turn of the policy.

    Attributes:
        number: number of the request that it answers, from 1.
        own_text: text of the prompt after the parent, and of the turn.
        begun: text with which the prompt begins it: of a thought, or of the message that it continues.
        content: text of the turn without the special token that ends it.
        end: text of that token, or "".
        reward: reward of its last token, or of each token.
    """

    place: TurnPlace
    number: int
    generation: Generation
    own_text: str
    begun: str
    content: str
    end: str
    reward: float | list[float] = 0.0

    @property
    def text(self) -> str:
        """Text of prompt and turn."""
        return self.place.text + self.content + self.end


class TurnTree:
    """The turns of an episode. Each is trained once, after the prompt that the engine saw."""

    def __init__(self, chat: Chat, tokenizer: "PreTrainedTokenizerBase"):
        self._chat = chat
        self._tokenizer = tokenizer
        self._turns: list[Turn] = []  # parents come first

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
            text = self._chat.text_of(form, tools, continues=continues)
        except ValueError:
            form = messages
            text = self._chat.text_of(form, tools, continues=continues)
        place = self._appended(*self._longest(text), text)
        known = [position for position, turn in enumerate(turns) if turn]
        last = turns[known[-1]] if known else None
        if place is None and last and not isinstance(form, str):
            rest = self._difference(last, form[: known[-1] + 1], text, tools, is_sampled=form is not messages)
            place = self._appended(last, rest, text)
        if place:
            return place
        [tokens] = encode([RenderedText(text, is_chat=not isinstance(form, str))], self._tokenizer)
        return TurnPlace((), tokens, text, hash(text), last)

    def room(self, place: TurnPlace, limits: tuple[int, int]) -> int:
        """Return the number of tokens that the policy may write at a place.

        Args:
            limits: tokens that a path may have after the prompt of its first turn, and in total.
        """
        num_tokens = len(place.tokens)
        start = len(place.path[0].place.added) if place.path else num_tokens
        return min(limits[0] + start, limits[1]) - num_tokens

    def write(self, place: TurnPlace, generation: Generation, number: int, begun: str = "") -> Turn:
        """Add a turn of the policy.

        Args:
            begun: the message that the turn continues.
        """
        tokens, decode = generation.tokens, self._tokenizer.decode
        has_end = not decode(tokens[-1:], skip_special_tokens=True)
        end = decode(tokens[-1:]) if has_end else ""
        content = decode(tokens[:-1] if has_end else tokens)
        begun = begun or OPEN_THOUGHT.findall(place.added_text)[0]
        turn = Turn(place, number, generation, place.added_text + content + end, begun, content, end)
        self._turns.append(turn)
        return turn

    def drop(self, turn: Turn) -> None:
        """Remove a turn, so that it is not trained."""
        self._turns.remove(turn)

    def segments(self) -> list[Segment]:
        """Return the segments of all turns. A turn that extends the end of a segment is appended to it; any other
        begins a segment with its whole prompt. Each of several parallel conversations with equal texts is a segment."""
        segments: list[Segment] = []
        ends: dict[Turn | None, Segment] = {}
        for turn in sorted(self._turns, key=attrgetter("number")):
            place = turn.place
            segment = ends.pop(place.parent if place.parent in ends else _same_end(ends, place), None)
            if segment is None:
                follows = place.follows
                parent = follows.number if follows and follows in self._turns else 0
                segment = Segment(place.tokens, parent=parent)
                segments.append(segment)
            else:
                segment.observe(place.added)
            segment.write(turn.generation, turn.number)
            segment.reward(turn.reward)
            ends[turn] = segment
        return segments

    def _longest(self, text: str) -> tuple[Turn | None, str]:
        """Return the longest turn whose text begins a text, and the rest."""
        ends: dict[Turn | None, int] = {None: 0}
        for turn in self._turns:
            start = ends.get(turn.place.parent, len(text) + 1)
            if text.startswith(turn.own_text, start):
                ends[turn] = start + len(turn.own_text)
        longest = max(ends, key=ends.__getitem__)
        return longest, text[ends[longest] :]

    def _difference(
        self,
        turn: Turn,
        until: list[dict[str, Any]],
        text: str,
        tools: Tools | None,
        *,
        is_sampled: bool,
    ) -> str | None:
        """Return the end of a rendering, after a turn. None if the messages before the turn are rendered otherwise than
        for it, or the turn otherwise than it was sampled, apart from blanks around its end.

        Args:
            until: the messages up to the turn.
            is_sampled: they have the text of turns as sampled.
        """
        try:
            before = self._chat.text_of(until[:-1], tools, continues=False)
            closed = self._chat.whole_text(until, tools)
        except ValueError:
            return None
        content = closed.rstrip().removesuffix(turn.end).rstrip()
        rest = text[len(content) :].lstrip()
        is_same = hash(before) == turn.place.rendering and text.startswith(closed)
        if is_sampled:
            is_same &= content.removeprefix(before.rstrip()).strip() == turn.content.strip()
        return rest.removeprefix(turn.end) if turn.end and is_same and rest.startswith(turn.end) else None

    def _appended(self, parent: Turn | None, rest: str | None, text: str) -> TurnPlace | None:
        """Return the place after a turn; None if one token spans its end and the rest."""
        if parent is None or rest is None:
            return None
        try:
            tokens = added_tokens(*encode(with_context(parent.text, rest), self._tokenizer), self._tokenizer)
        except ValueError:
            return None
        return TurnPlace([*parent.place.path, parent], tokens, rest, hash(text), parent)


def _same_end(ends: Mapping[Turn | None, Segment], place: TurnPlace) -> Turn | None:
    """Return a turn at the end of a segment that has the tokens of a place's path, and leaves as much room after its
    prompt; None without one."""
    if not place.path:
        return None
    before = place.tokens[: len(place.tokens) - len(place.added)]
    start = len(place.path[0].place.added)
    same = (turn for turn, one in ends.items() if len(one.prompt) >= start and one.context == before)
    return next(same, None)
