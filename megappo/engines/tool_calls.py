"""Calls of tools that the policy writes, read by SGLang's parsers in worker processes: for plain functions as an
environment, which makes the calls and ends at a turn without one, and for agents (`agents.turn_parser`).
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megappo.engines import sglang_patches
from megappo.user_modules import share_all
from megappo.userland.environment_host import called
from megappo.userland.model_text import model_text
from megappo.userland.user_code import BadFunction, JsonObject, load, named

UNREADABLE = "error: the call cannot be read: it must be JSON that names one of the functions"


class ToolEnvironment:
    """The environment of one episode; a subclass has the functions.

    Attributes:
        functions: functions by name.
        tools: the functions' JSON schemas.
        new_parser: makes a parser of SGLang's.
    """

    columns: tuple[str, ...] = ()
    functions: Mapping[str, Callable[..., Any]]
    tools: Sequence[JsonObject]
    new_parser: Callable[[], Any]

    async def reset(self, row: JsonObject) -> None:
        """Do nothing: the chat template describes the tools."""

    async def step(self, message: JsonObject) -> tuple[Any, float, bool, dict[str, int]]:
        """Return the results of the calls, each a message; the result of a call that fails is its error."""
        parser = self.new_parser()
        if not parser.has_tool_call(message["content"]):
            return None, 0.0, True, {"tool_calls": 0, "tool_errors": 0}
        _, calls = parser.parse_non_stream(message["content"])
        results = await asyncio.gather(*map(self._result, calls)) or [(UNREADABLE, True)]
        counts = {"tool_calls": len(results), "tool_errors": sum(failed for _, failed in results)}
        return [{"role": "tool", "content": text} for text, _ in results], 0.0, False, counts

    async def _result(self, call: Any) -> tuple[str, bool]:
        """Return a call's result as text, and whether it failed.

        Raises:
            BadFunction: JSON has no form for the result.
        """
        try:
            result = await called(lambda: self.functions[call.name](**json.loads(call.parameters)))
        except Exception as error:
            return f"error: {named(error)}", True
        try:
            return model_text(result), False
        except (TypeError, ValueError, RecursionError) as error:
            expected = "text, numbers, dates, lists or dictionaries of these"
            raise BadFunction(f"called {call.name}, whose result is no JSON: {error}; expected {expected}") from error


def tool_environment(functions: Sequence[tuple[str, str]], parser: str) -> type[ToolEnvironment]:
    """Return the environment of some functions.

    Args:
        functions: source and name of each.
        parser: one of SGLang's names.
    Raises:
        BadFunction: there is no such function or parser, or signature and docstring of one do not make a schema.
    """
    new_parser = call_parser(parser)
    from transformers.utils import get_json_schema

    loaded = [load(source, name) for source, name in functions]
    share_all()
    try:
        schemas = [get_json_schema(function) for function in loaded]
    except Exception as error:
        expected = "a docstring with an Args section, and a type for each parameter"
        raise BadFunction(f"have no JSON schema ({named(error)}): expected {expected}") from error
    by_name = {schema["function"]["name"]: function for schema, function in zip(schemas, loaded, strict=True)}
    return type(
        "Tools",
        (ToolEnvironment,),
        {
            "functions": by_name,
            "tools": schemas,
            "new_parser": staticmethod(partial(new_parser, as_tools(schemas))),
        },
    )


def call_parser(name: str) -> Callable[[Sequence[Any]], Any]:
    """Return a function that makes a parser of SGLang's for tools.

    Raises:
        BadFunction: there is no such parser.
    """
    sglang_patches.prepare_import()
    # Imported here, so that only worker processes import SGLang.
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)  # calls that cannot be read are counted
    _check_known(name, "calls", "rollout.tool_call_parser", FunctionCallParser.ToolCallParserEnum)
    return lambda tools: FunctionCallParser(list(tools), name)


def reasoning_parser(name: str) -> Callable[[bool | None], Any]:
    """Return a function that makes a parser of SGLang's for thoughts; True: the thought is open at the beginning.

    Raises:
        BadFunction: there is no such parser.
    """
    sglang_patches.prepare_import()
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    _check_known(name, "thoughts", "rollout.reasoning_parser", ReasoningParser.DetectorMap)
    return lambda is_open: ReasoningParser(name, stream_reasoning=False, force_reasoning=is_open)


def _check_known(name: str, of: str, key: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise BadFunction(f"cannot parse {of} by {name!r}: {key} is one of {', '.join(known)}")


def as_tools(schemas: Sequence[JsonObject]) -> list[Any]:
    """Return tools as SGLang's parsers take them.

    Raises:
        ValueError: a schema is no description of a function.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool

    return [Tool(**schema) for schema in schemas]
