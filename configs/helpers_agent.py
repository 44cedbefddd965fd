"""An agent with helpers: two conversations of the same policy, at the same time, answer each call of the main one. The
main conversation gets a result only if the two agree."""

import asyncio
import json

from calculator import calculator
from calculator_agent import CALCULATOR, OPENAI


async def solve(base_url, api_key, row):
    """Return 1 for the right product."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)

    async def converse(messages, call_tool):
        """Let the policy write turns until one is without a call; return what it answers."""
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
            answer = reply.choices[0].message
            if not answer.tool_calls:
                return (answer.content or "").rpartition("=")[2]
            results = await asyncio.gather(*(call_tool(**json.loads(one.function.arguments)) for one in answer.tool_calls))
            calls = zip(answer.tool_calls, results, strict=True)
            tool_messages = [{"role": "tool", "tool_call_id": one.id, "content": result} for one, result in calls]
            messages = [*messages, answer.model_dump(exclude_none=True), *tool_messages]

    async def calculate(expression):
        return calculator(expression)

    async def delegate(expression):
        question = [{"role": "user", "content": f"{expression}="}]
        first, second = await asyncio.gather(*(converse(question, calculate) for _ in range(2)))
        return first if first == second else "0"

    return float(await converse(row["prompt"], delegate) == row["label"])
