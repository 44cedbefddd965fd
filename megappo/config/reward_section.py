"""The keys of scoring."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megappo.config.conditions import SUMS_SCORES
from megappo.config.kinds import (
    FilePath,
    Float,
    NonNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Processes,
    Seconds,
    Tokens,
)
from megappo.config.methods import LENGTH_PENALTIES, Method
from megappo.config.section import Section


class Reward(Section):
    read_if = (SUMS_SCORES,)

    function: FilePath | dict[FilePath, Float] | None = Field("exact_match", description="null: none, where rollout.environment gives the rewards; else built-in name, or FILE.py:FUNCTION or package.module:FUNCTION of (prompts, responses, labels, **columns) -> list of scores, or of lists of them; or of verl's or TRL's form. Of several, each with its weight, as {gsm8k: 1, my_rewards.py:brevity: 0.1}, a response has all the scores; 0 leaves one out that base names")
    num_workers: Processes = Field(1, description="processes that run the function, for each engine")
    timeout_seconds: Seconds = Field(60.0, description="how long one call of the function may take: for one response, or for all that a function of lists is called with")
    memory_limit_gib: Annotated[float, Field(gt=0, le=10**6)] | None = Field(16.0, description="memory that each of these processes may take, and each that it starts; null = any")
    pass_env: tuple[str, ...] = Field((), description="environment variables that the function gets although their names are those of secrets, such as OPENAI_API_KEY")
    on_error: Literal["raise", "zero"] = Field("raise", description="raise: a call that raises, hangs, ends its process or returns something else ends the run; zero: its response has score 0, and is counted")
    batch_size: Positive | None = Field(None, description="most responses that a function of lists is called with, as they are written; null = an equal share for each process, once all are written")
    options: dict[FilePath, dict[str, Any]] = Field({}, description="arguments that functions get in every call, as {my_rewards.py:brevity: {limit: 100}}")
    skip_special_tokens: bool = Field(True, description="functions get responses as text without special tokens; false = without those alone that begin, end or pad a text: where <think> or <answer> are special")
    scale: PositiveFloat = Field(1.0, description="factor of every score; the first of the shaping steps")
    clip: PositiveFloat | None = Field(None, description="clip scaled scores to +- this; null = off")
    normalize: Literal["none", "running", "batch", "group"] = Field("none", description="shift and scale scores to mean 0, deviation 1: over all steps so far, this step, or the responses to a prompt")
    length_penalty: Annotated[str, OneOf(LENGTH_PENALTIES)] = Field("none", description="added last: DAPO's soft overlong punishment, or -length_penalty_factor x length / rollout.max_response_length")
    overlong_buffer: Tokens = Field(256, description="overlong: tokens before rollout.max_response_length over which the penalty grows")
    length_penalty_factor: NonNegativeFloat = Field(1.0, description="the largest length penalty")

    @property
    def weights(self) -> dict[str, float]:
        """Each function with the factor of its scores; a weight of 0 leaves out one that a base file names."""
        given = {self.function: 1.0} if isinstance(self.function, str) else self.function or {}
        return {function: weight for function, weight in given.items() if weight}

    @property
    def penalty(self) -> Method:
        """What length_penalty reads."""
        return LENGTH_PENALTIES[self.length_penalty]
