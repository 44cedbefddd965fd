"""An agent that compacts its history: the policy lets the calculator multiply, then writes a note. The agent begins a
new conversation with the question and the note alone, so the policy can answer only what it has noted."""

from calculator_agent import CALCULATOR, OPENAI, results


async def solve(base_url, api_key, row):
    """Return 1 for the right product."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)

    async def ask(messages):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        return reply.choices[0].message

    messages = list(row["prompt"])
    call = await ask(messages)
    messages += [call.model_dump(exclude_none=True), *results(call.tool_calls or [])]
    messages.append({"role": "user", "content": "note"})
    note = await ask(messages)
    question = row["prompt"][0]["content"]
    answer = await ask([{"role": "user", "content": f"{question}{note.content}?"}])
    return float((answer.content or "").rpartition("=")[2] == row["label"])
