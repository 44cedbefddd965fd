"""The keys of sampling, of the engines, and of the way of the weights to them."""

from typing import Annotated, Literal

from pydantic import Field

from megappo.config.conditions import HAS_HELD_OUT, ReadIf
from megappo.config.kinds import (
    LARGEST_PORT,
    Bytes,
    FilePath,
    Float,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    OpenFraction,
    Positive,
    PositiveFloat,
    Processes,
    Seconds,
    Tokens,
    TopK,
    Ways,
)
from megappo.config.section import Section
from megappo.config.transports import AUTO, TRANSPORTS


class Sync(Section):
    transport: Annotated[str, OneOf(TRANSPORTS, AUTO)] = Field(AUTO, description="way of the weights to the engines: ipc (CUDA handles; shared memory on a CPU) needs the engine's first rank among the actor's (all of them where the engine is on several nodes), broadcast that the engine is not on the GPU of a rank that sends, disk a file system that all nodes share; auto = ipc where it can be, else broadcast")
    bucket_bytes: Bytes | None = Field(None, description="bytes of weights handed to the engine at a time, two such buckets being in flight; null = 2 GiB (on a CPU: 128 MiB)")
    verify: bool = Field(True, description="before training, overwrite the engines' weights, sync, and compare the engines' own checksums with those of the weights they had loaded")
    probe_interval: NonNegative = Field(1, description="after the first sync and every so many after it, each engine continues a few prompts, and the actor must agree about the log-probs; 0 = only the rollouts are compared")
    probe_tolerance: PositiveFloat = Field(0.05, description="warn, and count it, when trainer and engine log-probs of the probe or the rollouts differ by more than this on average (fp32: 1e-3), and stop when by more than 5 times this")


class Rollout(Section):
    read_if = (
        HAS_HELD_OUT,
        ReadIf(
            "mem_fraction_static sleep max_total_tokens max_engine_restarts port server_args",
            "rollout.engines",
            unless=True,
            reason="{} run already",
        ),
        ReadIf("tool_call_parser", "rollout.tools", by="offers_tools", reason="{} is empty"),
        ReadIf(
            "max_turns num_environment_workers environment_timeout_seconds", "rollout.environment", by="plays_episodes"
        ),
    )

    n: Positive = Field(1, description="responses per prompt")
    temperature: PositiveFloat = Field(1.0, description="sampling temperature of training rollouts")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus sampling")
    top_k: TopK = Field(-1, description="top-k sampling; -1 = off")
    max_response_length: Tokens = Field(1024, description="tokens a response may have before it is truncated")
    stop: tuple[str, ...] = Field((), description="strings that end a response, besides the tokenizer's end token; each must be one token")
    val_n: Positive = Field(1, description="responses per prompt of evaluations")
    val_temperature: NonNegativeFloat = Field(0.0, description="sampling temperature of evaluations; 0 = greedy")
    val_top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus sampling of evaluations")
    val_top_k: TopK = Field(-1, description="top-k sampling of evaluations; -1 = off")
    val_pass_threshold: Float = Field(1.0, description="score from which on a response of evaluations passes, for pass@k")
    tensor_parallel: Ways = Field(1, description="GPUs per SGLang engine; placement's rollout ranks are cut into groups of this size, each on one node or on several with as many ranks on each")
    max_running_requests: Positive = Field(256, description="sequences an engine decodes at once")
    mem_fraction_static: OpenFraction = Field(0.5, description="share of GPU memory for the engine's weights and KV cache (GPU only)")
    sleep: Literal["always", "auto", "never"] = Field("always", description="when an engine gives its memory to the models on its GPUs; auto = where memory needs it (GPU only)")
    max_total_tokens: Tokens | None = Field(None, description="KV-cache tokens of an engine; null = from mem_fraction_static (on a CPU: 65536)")
    start_timeout_seconds: Seconds = Field(1500.0, description="how long an engine may take to start; the first on a GPU compiles kernels")
    request_timeout_seconds: Seconds = Field(1800.0, description="how long a request of a rollout may go without a further response, or an engine take to read weights from a disk")
    max_engine_restarts: NonNegative = Field(3, description="how often in a row an engine that crashes, hangs or gives invalid answers is restarted before the run saves and ends")
    engines: tuple[str, ...] = Field((), description="addresses, http://host:port, of SGLang servers that you started and look after, in place of engines of megappo's own; the environment variable MEGAPPO_ENGINE_API_KEY has their key")
    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)] = Field(0, description="first port of the engines on a node (engine i takes port + i); 0 = any free port")
    server_args: dict[str, FilePath | int | float | bool] = Field({}, description="further SGLang ServerArgs by name, passed through; those that SGLang does not know or megappo sets itself are errors")
    environment: FilePath | None = Field(None, description="FILE.py:CLASS or package.module:CLASS with reset(row) and step(message) -> (observation, reward, done), which answers what the policy writes: episodes of several turns; null = one response to a prompt")
    tools: tuple[FilePath, ...] = Field((), description="FILE.py:FUNCTION or package.module:FUNCTION each, in place of an environment: the policy's calls are made until it writes a turn without any; the chat template tells of them, by the schema of signature and docstring; reward.function scores the whole")
    tool_call_parser: str | None = Field(None, description="SGLang's name of the parser for the calls, such as qwen25 or llama3")
    max_turns: Positive = Field(10, description="environment: turns of the policy before an episode is truncated; rollout.max_response_length bounds its tokens, observations included")
    num_environment_workers: Processes = Field(1, description="environment: processes, for each engine, each with any number of environments at once; they get the memory and the variables that the reward function's get")
    environment_timeout_seconds: Seconds = Field(60.0, description="environment: how long a reset, step or close may take; an episode in which a reset or step takes longer is truncated and counted")
    sync: Sync = Field(Sync(), description="weight hand-over after each update")

    @property
    def has_environment(self) -> bool:
        """Whether responses are episodes."""
        return self.environment is not None or bool(self.tools)
