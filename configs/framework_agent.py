"""The calculator's task by OpenAI's agent framework, whose loop calls the tool and keeps the history. The framework is
installed with `pip install -r requirements-agents.txt`."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from calculator import calculator
from calculator_agent import OPENAI

set_tracing_disabled(True)  # traces would go to OpenAI
TOOL = function_tool(calculator, strict_mode=False)  # strict tools change what may be sampled, so they are refused


async def solve(base_url, api_key, row):
    """Return 1 for the right product."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    agent = Agent(name="pupil", tools=[TOOL], model=OpenAIChatCompletionsModel("policy", client))
    result = await Runner.run(agent, row["prompt"], max_turns=100)  # rollout.max_turns ends an episode
    return float(str(result.final_output).rpartition("=")[2] == row["label"])
