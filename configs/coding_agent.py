"""A coding agent as a command, for configs/coding_agent_qwen3_8b_8gpu.yaml: a task of MBPP, a tool that runs Python.
It ends when the policy answers without a call. The answer's last block of Python is graded by reward.function.

Programs of the policy run with limits, but as your user: start the command in a container of your own to confine them.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile

from openai import OpenAI

SYSTEM = (
    "You are a careful programmer. Try your program with the tool run_python before you answer. Your answer ends with "
    "the whole program in a block of ```python."
)
SUMMARISE = "Summarise what you have tried, what failed and what to do next. Only your summary will remain."
PROGRAM = {"type": "string", "description": "the whole program"}
TOOL = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": "Run a Python program and return what it prints.",
        "parameters": {"type": "object", "properties": {"program": PROGRAM}, "required": ["program"]},
    },
}
SECONDS = 10
MEMORY_BYTES = 2**30
SHOWN_BYTES = 2_000
TURN_TOKENS = 4_096
COMPACT_TOKENS = 9_000
"""Tokens of a conversation after which only a summary of it remains."""


def main() -> None:
    """Work on the task of MEGAPPO_ROW."""
    with open(os.environ["MEGAPPO_ROW"], encoding="utf-8") as file:
        row = json.load(file)
    client = OpenAI(max_retries=0, timeout=None)  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    task = f"{row['prompt']}\nThe program must pass this test, and further ones: {row['label'][0]}"
    start = messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    while True:
        answer, num_tokens = ask(client, messages)
        if not answer.tool_calls:
            return
        results = [{"role": "tool", "tool_call_id": one.id, "content": call(one.function)} for one in answer.tool_calls]
        messages = [*messages, answer.model_dump(exclude_none=True), *results]
        if num_tokens > COMPACT_TOKENS:
            summary, _ = ask(client, [*messages, {"role": "user", "content": SUMMARISE}])
            messages = [*start, {"role": "user", "content": f"What you know already: {summary.content}"}]


def ask(client, messages):
    """Return the policy's turn, and the tokens of the conversation with it."""
    reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], max_tokens=TURN_TOKENS)
    return reply.choices[0].message, reply.usage.total_tokens


def call(function) -> str:
    """Return the result of a call; of a wrong one, what is wrong."""
    arguments = json.loads(function.arguments)
    if function.name != "run_python" or not isinstance(arguments.get("program"), str):
        return "There is only run_python, with a text as program."
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", arguments["program"]],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                preexec_fn=limit,
            )
        except (subprocess.TimeoutExpired, ValueError) as error:  # ValueError: a null byte
            return str(error)[:SHOWN_BYTES]
    return done.stdout[-SHOWN_BYTES:].decode(errors="replace") or f"no output, exit code {done.returncode}"


def limit() -> None:
    """Limit the memory and files of a program."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    main()
