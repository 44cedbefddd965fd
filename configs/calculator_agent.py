"""The calculator of configs/calculator.yaml as an agent: a program with a loop of its own, which sends requests to the
policy by the plain `openai` client."""

import json

from calculator import calculator
from openai import AsyncOpenAI

OPENAI = AsyncOpenAI(base_url="", api_key="", max_retries=0, timeout=None)
"""Made once, as a client reads all certificates; each episode has a copy."""
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12*34"}},
            "required": ["expression"],
        },
    },
}


def results(calls):
    """Return a message with the result of each call; the result of a call that fails is its error."""
    for call in calls:
        try:
            result = calculator(**json.loads(call.function.arguments))
        except (TypeError, ValueError) as error:
            result = f"error: {error}"
        yield {"role": "tool", "tool_call_id": call.id, "content": result}


async def solve(base_url, api_key, row):
    """Let the policy call the calculator until it answers; return 1 for the right product."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    messages = list(row["prompt"])
    while True:
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        answer = reply.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return float((answer.content or "").rpartition("=")[2] == row["label"])
        messages += results(answer.tool_calls)
