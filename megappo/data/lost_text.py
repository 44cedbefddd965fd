"""Whether a tokenizer keeps what a text says: one of another alphabet would have the model see next to nothing."""

import unicodedata
from collections import Counter

from megappo.config.errors import shorten


def lost_text(text: str, decoded: str, unknown: str | None) -> str:
    """What to say of a text where at least half of its characters are gone from what its tokens stand for; else "".

    Blanks, case, accents and compatibility forms do not count, which a tokenizer may normalise.

    Args:
        decoded: its tokens as text again, special ones, too, which a chat template may have brought.
        unknown: the token that stands for what the tokenizer does not know.
    """
    said, kept = _counted(text), _counted(decoded.replace(unknown, "") if unknown else decoded)
    lost = (said - kept).total()
    if not lost or 2 * lost < said.total():
        return ""
    return (
        f"the tokenizer loses {lost} of the {said.total()} characters, blanks aside, of {shorten(repr(text))}: the "
        f"model sees {shorten(repr(decoded))}"
    )


def _counted(text: str) -> Counter[str]:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return Counter(letter for letter in letters if not (letter.isspace() or unicodedata.combining(letter)))
