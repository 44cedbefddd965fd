"""Turns of an agent's policy, read as messages by SGLang's parsers."""

import json
from collections.abc import Sequence
from typing import Any

from megappo.userland.user_code import JsonObject, load

PARSERS = "megappo.engines.tool_calls"
"""Loaded only if a parser is named: it imports SGLang."""


class TurnParser:
    """Reads the turns of an agent's policy as messages.

    Args:
        calls, reasoning: SGLang's names of parsers; None: none.
    Attributes:
        parses_calls: a parser of calls is named.
    Raises:
        BadFunction: there is no such parser.
    """

    def __init__(self, calls: str | None, reasoning: str | None):
        self.parses_calls = calls is not None
        self._new_call_parser = calls and load(PARSERS, "call_parser")(calls)
        self._new_reasoning_parser = reasoning and load(PARSERS, "reasoning_parser")(reasoning)

    def tools(self, schemas: Sequence[JsonObject]) -> list[Any]:
        """Return tools as `parse` takes them.

        Raises:
            ValueError: a schema does not describe a function.
        """
        return load(PARSERS, "as_tools")(schemas)

    def parse(self, text: str, tools: Sequence[Any]) -> tuple[str, str, list[tuple[str, JsonObject]]]:
        """Return content, thoughts and calls of a turn. The content is the whole text if nothing else would be there.

        Args:
            tools: as `tools` returns them; without any, no calls are read.
        """
        reasoning, content = "", text
        calls: list[tuple[str, JsonObject]] = []
        try:
            if self._new_reasoning_parser:
                reasoning, content = self._without_thoughts(text)
            if tools:
                content, calls = _without_calls(content, self._new_call_parser(tools))
        except Exception:  # the parsers raise what they like
            return text, "", []
        return (content, reasoning, calls) if content.strip() or calls else (text, "", [])

    def _without_thoughts(self, text: str) -> tuple[str, str]:
        """Return thoughts, and the text after them. A template may have opened the thought in the prompt."""
        detector = self._new_reasoning_parser(None).detector
        start, end = (getattr(detector, f"think_{name}_token", None) for name in ("start", "end"))
        is_open = bool(end) and end in text and start not in text.partition(end)[0]
        reasoning, content = self._new_reasoning_parser(is_open or None).parse_non_stream(text)
        return reasoning or "", content or ""


def _without_calls(text: str, parser: Any) -> tuple[str, list[tuple[str, JsonObject]]]:
    """Return the text without calls, and the calls; the whole text if none can be read."""
    if not parser.has_tool_call(text):
        return text, []
    content, found = parser.parse_non_stream(text)
    calls = [(call.name, _arguments(call.parameters)) for call in found]
    return (content, calls) if calls else (text, [])


def _arguments(text: str) -> JsonObject:
    arguments = json.loads(text or "{}")
    if isinstance(arguments, str):  # some parsers encode an object twice
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("expected a JSON object")
    return arguments
