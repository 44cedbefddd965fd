"""The keys of evaluations."""

from typing import Annotated

from pydantic import Field

from megappo.config.kinds import FilePath, Float, NonNegativeFloat, Positive, Tokens, TopK
from megappo.config.section import Section

NONE = "none"
"""Of an environment or a reward function: there is to be none, whatever training has."""


class EvalDataset(Section):
    """A held-out data set; what is null is as for data.val_files."""

    files: tuple[FilePath, ...] = Field(min_length=1, description="jsonl, jsonl.gz or parquet files of its prompts")
    n: Positive | None = Field(None, description="responses per prompt; null = rollout.val_n")
    temperature: NonNegativeFloat | None = Field(None, description="0 = greedy; null = rollout.val_temperature")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="null = rollout.val_top_p")
    top_k: TopK | None = Field(None, description="null = rollout.val_top_k")
    max_response_length: Tokens | None = Field(None, description="null = rollout.max_response_length")
    max_prompt_length: Tokens | None = Field(None, description="null = data.max_prompt_length")
    prompt_key: str | None = Field(None, description="null = data.prompt_key")
    label_key: str | None = Field(None, description="null = data.label_key")
    reward: FilePath | dict[FilePath, Float] | None = Field(None, description="as reward.function, which it is where this is null, or several with their weights; none = no function: an environment gives the rewards")
    environment: FilePath | None = Field(None, description="as rollout.environment, whose limits hold for it; none = one response to a prompt, without tools, too; null = as in training")
    tools: tuple[FilePath, ...] = Field((), description="as rollout.tools, in place of an environment; rollout.tool_call_parser finds the calls; [] = as environment says")
    pass_threshold: Float | None = Field(None, description="score from which on a response passes; null = rollout.val_pass_threshold")


class Eval(Section):
    datasets: dict[str, EvalDataset] = Field({}, description="held-out data besides data.val_files: name -> files, sampling, reward function, environment; reported as val/NAME")
