"""The agents that ship play with a script in place of the policy, without an engine."""

import asyncio
import importlib.metadata
import sys

import pytest
from agent_scripts import agents_of, played

from megappo.userland.agent_sessions import TurnRequest

ROW = {"prompt": [{"role": "user", "content": "43*68="}], "label": "2924"}
is_installed = any(one.name == "openai-agents" for one in importlib.metadata.distributions())
needs_framework = pytest.mark.skipif(not is_installed, reason="requirements-agents.txt")
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"{}": "{}"}}}}\n</tool_call>'


def pupil(request: TurnRequest) -> str:
    """Call the calculator for a product, note a result, and answer with a result or note."""
    given = request.messages[-1]["content"]
    if request.messages[-1]["role"] == "tool":
        return f"={given}"
    if given == "note":
        return request.messages[-2]["content"]
    question, _, note = given.partition("=")
    return f"={note[:-1]}" if note else CALL.format("calculator", "expression", question)


def coder(request: TurnRequest) -> str:
    """Try a program so long that the history is compacted, summarise its result, and answer with the summary."""
    if len(request.messages) == 2:
        return CALL.format("run_python", "program", f"print(43 * 68)  # {'x' * 9_000}")
    if request.messages[-2]["role"] == "tool":
        return f"It printed {request.messages[-2]['content']}"
    return f"```python\n# {request.messages[-1]['content']}```"


@pytest.mark.parametrize(
    ("agent", "numbers_of_messages"),
    [
        pytest.param("calculator_agent", [1, 3], marks=pytest.mark.slow),
        pytest.param("compaction_agent", [1, 4, 1], marks=pytest.mark.slow),
        ("helpers_agent", [1, 1, 1, 3, 3, 3]),
        pytest.param("framework_agent", [1, 3], marks=needs_framework),
    ],
)
def test_functions_solve_a_product(agent: str, numbers_of_messages: list[int]):
    async def script(request: TurnRequest) -> list[str]:
        return [pupil(request)]

    with agents_of(f"configs/{agent}.py:solve", tool_call_parser="qwen25") as pool:
        finished, events = asyncio.run(played(pool, ROW, script))
    assert (finished.error, finished.reward) == ("", 1.0)
    requests = [event for event in events if isinstance(event, TurnRequest)]
    assert [len(request.messages) for request in requests] == numbers_of_messages


@pytest.mark.slow  # that commands are run and compact is in test_agents and in the example of compaction
def test_the_command_runs_programs_until_it_answers():
    async def script(request: TurnRequest) -> list[str]:
        return [coder(request)]

    command = f"{sys.executable} configs/coding_agent.py"
    with agents_of(command=command, tool_call_parser="qwen25", scored=True) as pool:
        row = {"prompt": "Print 43*68.", "label": ["assert True"]}
        finished, events = asyncio.run(played(pool, row, script))
    assert (finished.error, finished.reward, finished.numbers) == ("", None, {"exit_code": 0.0})
    requests = [event for event in events if isinstance(event, TurnRequest)]
    assert [len(request.messages) for request in requests] == [2, 5, 3]
    assert requests[-1].messages[-1]["content"] == "What you know already: It printed 2924\n"
