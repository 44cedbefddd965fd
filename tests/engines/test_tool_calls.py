"""Functions as tools: their schemas, the calls that SGLang's parsers find, and calls that are wrong."""

import asyncio
import json

import pytest
from slow import slow_ones

from megappo.userland.environments import EnvironmentPool
from megappo.userland.episode_pool import EnvironmentFault

FUNCTIONS = '''
import datetime
from dataclasses import dataclass
from decimal import Decimal

import numpy


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def fails(text: str) -> str:
    """Fail.

    Args:
        text: any
    """
    raise ValueError(text)


@dataclass
class Day:
    date: datetime.date
    price: Decimal


def look_up(key: str) -> str:
    """Look up a value.

    Args:
        key: any
    """
    day = Day(datetime.date(2026, 1, 2), Decimal("0.10"))
    return {"day": {"Tag": "schön 好", "day": day, "mean": numpy.float32(0.5)}, "set": {1}, "half": "\\ud83d"}[key]


def no_docstring(a: int) -> int:
    return a
'''


def pool_of(folder, *names: str, parser: str = "qwen25") -> EnvironmentPool:
    file = folder / "functions.py"
    file.write_text(FUNCTIONS)
    functions = [(str(file), name) for name in names]
    code = ["megappo.engines.tool_calls", "tool_environment", functions, parser]
    return EnvironmentPool("of tools", code, num_workers=1, timeout_seconds=60.0)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_made_until_there_are_none(tmp_path, capfd):
    turns = {
        call("add", a=2, b=3): (["5"], 1, 0),
        f"two: {call('add', a=2)}\n{call('add', a=3)}": (["3", "4"], 2, 0),
        call("fails", text="why"): (["error: ValueError: why"], 1, 1),
        call("add", c=3): (["error: TypeError: add() got an unexpected keyword argument 'c'"], 1, 1),
        call("nothing", a=2): (["error: the call cannot be read"], 1, 1),
        '<tool_call>\n{"name": "add", "arguments": {"a": 2\n</tool_call>': (["error: the call cannot be read"], 1, 1),
        '<tool_call>\n{"name": "add", "argu': (["error: the call cannot be read"], 1, 1),
        "no call": ([], 0, 0),
    }

    async def play(pool):
        async with pool.session() as environment:
            assert await environment.reset({}) == []
            return [await environment.step({"content": text, "token_ids": []}) for text in turns]

    with pool_of(tmp_path, "add", "fails") as pool:
        assert [tool["function"]["name"] for tool in pool.takes.tools] == ["add", "fails"]
        assert pool.takes.tools[0]["function"]["parameters"]["required"] == ["a"]
        for (texts, calls, errors), (messages, reward, done, counts) in zip(
            turns.values(), asyncio.run(play(pool)), strict=True
        ):
            assert all(one["content"].startswith(text) for one, text in zip(messages, texts, strict=True)), messages
            assert {one["role"] for one in messages} <= {"tool"} and reward == 0 and done == (not texts)
            assert counts == {"tool_calls": calls, "tool_errors": errors}
    assert "Failed to parse" not in capfd.readouterr().err, "a call that cannot be read is counted, not printed"


def test_results_are_json_as_people_write_it_or_an_error_that_names_the_tool(tmp_path):
    async def play(pool, key):
        async with pool.session() as environment:
            await environment.reset({})
            return await environment.step({"content": call("look_up", key=key), "token_ids": []})

    with pool_of(tmp_path, "look_up") as pool:
        [message], *_ = asyncio.run(play(pool, "day"))
        expected = '{"Tag": "schön 好", "day": {"date": "2026-01-02", "price": 0.1}, "mean": 0.5}'
        assert message == {"role": "tool", "content": expected}
        for name, reason in (("set", ".1. is set"), ("half", "'utf-8' codec can't encode")):
            with pytest.raises(EnvironmentFault, match=f"step called look_up, whose result is no JSON: {reason}"):
                asyncio.run(play(pool, name))


MESSAGES = {
    ("add", "qwen99"): "cannot parse calls by 'qwen99': rollout.tool_call_parser is one of .*qwen25",
    ("no_docstring", "qwen25"): "have no JSON schema .*no_docstring because it has no docstring",
    ("absent", "qwen25"): "does not exist: the file defines Day, add, fails, look_up, no_docstring",
    ("add", "qwen"): None,
}


@pytest.mark.parametrize("case", slow_ones(MESSAGES, list(MESSAGES)[1:]))  # each starts a worker
def test_errors_are_reported_at_the_start(tmp_path, case):
    (name, parser), message = case, MESSAGES[case]
    if message is None:
        pool_of(tmp_path, name, parser=parser).close()
        return
    with pytest.raises(EnvironmentFault, match=f"^environment of tools {message}"):
        pool_of(tmp_path, name, parser=parser)
