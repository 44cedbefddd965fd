"""Plain functions as an environment, which makes the calls that the policy writes and ends at a turn without one.

It is made in the environment's worker processes, from `rollout.tools` and `rollout.tool_call_parser`.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
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
    sglang_patches.prepare_import()
    # Imported here, so that only worker processes import SGLang.
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from transformers.utils import get_json_schema

    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)  # calls that cannot be read are counted
    known = FunctionCallParser.ToolCallParserEnum
    if parser not in known:
        raise BadFunction(f"cannot parse calls by {parser!r}: rollout.tool_call_parser is one of {', '.join(known)}")
    loaded = [load(source, name) for source, name in functions]
    share_all()
    try:
        schemas = [get_json_schema(function) for function in loaded]
    except Exception as error:
        expected = "a docstring with an Args section, and a type for each parameter"
        raise BadFunction(f"have no JSON schema ({named(error)}): expected {expected}") from error
    tools = [Tool(**schema) for schema in schemas]
    by_name = {schema["function"]["name"]: function for schema, function in zip(schemas, loaded, strict=True)}
    return type(
        "Tools",
        (ToolEnvironment,),
        {
            "functions": by_name,
            "tools": schemas,
            "new_parser": staticmethod(lambda: FunctionCallParser(tools, parser)),
        },
    )
