"""An agent with helpers: each call of the main conversation goes to two conversations of the same policy at the same
time, which have the calculator. The main conversation gets their answer if they agree."""

import asyncio
import json

from calculator_agent import CALCULATOR, OPENAI, results


async def solve(base_url, api_key, row):
    """Return 1 for the right product."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)

    async def ask(messages):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        return reply.choices[0].message

    async def helper(question):
        messages = [{"role": "user", "content": question}]
        while (answer := await ask(messages)).tool_calls:
            messages += [answer.model_dump(exclude_none=True), *results(answer.tool_calls)]
        return number_in(answer)

    messages = list(row["prompt"])
    while (answer := await ask(messages)).tool_calls:
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls:
            question = f"{json.loads(call.function.arguments).get('expression')}="
            first, second = await asyncio.gather(helper(question), helper(question))
            agreed = first if first == second else "0"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": agreed})
    return float(number_in(answer) == row["label"])


def number_in(answer):
    """Return the text behind the last =."""
    return (answer.content or "").rpartition("=")[2]
