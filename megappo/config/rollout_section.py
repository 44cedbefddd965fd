"""Keys of sampling, of the engines, and of the weight sync."""

from typing import Annotated, Literal

from pydantic import StrictBool

from megappo.config.section import HAS_HELD_OUT, KeyRule, ReadIf, Section, Usual, key
from megappo.config.transports import AUTO, TRANSPORTS
from megappo.config.values import (
    Bytes,
    FilePath,
    FilePaths,
    Float,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    OpenFraction,
    Port,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Processes,
    Seconds,
    Texts,
    TokenCount,
    TopK,
    Ways,
)

OWN_ENGINES = ReadIf(("rollout.engines",), lambda run: not run.rollout.engines, "{} run already")
OFFERS_TOOLS = ReadIf(("rollout.tools",), lambda run: run.offers_tools, "{} is empty")
PLAYS_EPISODES = ReadIf(("rollout.environment",), lambda run: run.plays_episodes)


class Sync(Section):
    transport: Annotated[str, OneOf(TRANSPORTS, AUTO)] = key(AUTO, "how weights reach the engines. ipc: CUDA handles (shared memory on a CPU); the engine's first rank must be one of the actor's, and all of them if the engine spans nodes. broadcast: the engine must not be on the GPU of a rank that sends. disk: a file system that all nodes share. auto = ipc where possible, else broadcast")
    bucket_bytes: Bytes | None = key(None, "bytes of weights sent to the engine at a time, with two such buckets in flight; null = 2 GiB (on a CPU: 128 MiB)")
    verify: StrictBool = key(True, "before training, overwrite the engines' weights, sync, and compare the engines' checksums with those of the weights they had loaded")
    probe_interval: NonNegative = key(1, "after the first sync and every so many after it, each engine continues a few prompts, and the actor must agree about the log-probs; 0 = compare the rollouts only")
    probe_tolerance: PositiveFloat = key(0.05, "mean difference of trainer and engine log-probs, in the probe or the rollouts, above which the run warns and counts it (fp32: 1e-3); the run stops at 5 times this")


class Rollout(Section):
    rules = (
        KeyRule(
            lambda rollout: rollout.environment is not None and rollout.tools,
            "rollout.environment and rollout.tools are both set: drop one; an environment makes its own calls",
        ),
        KeyRule(
            lambda rollout: "" in rollout.stop,
            "rollout.stop holds an empty string, which would end every response at once: remove it",
        ),
        KeyRule(
            lambda rollout: rollout.engines and rollout.sync.transport == "ipc",
            "rollout.sync.transport ipc reaches no server of rollout.engines: set it to auto",
        ),
    )

    n: Positive = key(1, "responses per prompt")
    temperature: PositiveFloat = key(1.0, "sampling temperature of training rollouts", usual=Usual(0.1, 2, "responses are sampled at about 1"))
    top_p: PositiveFraction = key(1.0, "nucleus sampling", usual=Usual(0.5, 1, "most of the policy's distribution is never sampled"))
    top_k: TopK = key(-1, "top-k sampling; -1 = off")
    max_response_length: TokenCount = key(1024, "tokens after which a response is truncated")
    stop: Texts = key((), "strings that end a response, besides the tokenizer's end token; each must be one token")
    val_n: Positive = key(1, "responses per prompt in evaluations", read_if=HAS_HELD_OUT)
    val_temperature: NonNegativeFloat = key(0.0, "sampling temperature of evaluations; 0 = greedy", read_if=HAS_HELD_OUT)
    val_top_p: PositiveFraction = key(1.0, "nucleus sampling of evaluations", read_if=HAS_HELD_OUT)
    val_top_k: TopK = key(-1, "top-k sampling of evaluations; -1 = off", read_if=HAS_HELD_OUT)
    val_pass_threshold: Float = key(1.0, "smallest score with which a response of an evaluation passes, for pass@k", read_if=HAS_HELD_OUT)
    tensor_parallel: Ways = key(1, "GPUs per SGLang engine; the ranks of placement.rollout are cut into groups of this size, each on one node or with as many ranks on each of several")
    max_running_requests: Positive = key(256, "sequences that an engine decodes at once")
    mem_fraction_static: OpenFraction = key(0.5, "share of GPU memory for the engine's weights and KV cache (GPU only)", read_if=OWN_ENGINES)
    sleep: Literal["always", "auto", "never"] = key("always", "when an engine gives its memory to the models on its GPUs; auto = when memory needs it (GPU only)", read_if=OWN_ENGINES)
    max_total_tokens: TokenCount | None = key(None, "KV-cache tokens of an engine; null = from mem_fraction_static (on a CPU: 65536)", read_if=OWN_ENGINES)
    start_timeout_seconds: Seconds = key(1500.0, "timeout for the start of an engine; the first on a GPU compiles kernels")
    request_timeout_seconds: Seconds = key(1800.0, "timeout for the next response of a rollout request, and for an engine to read weights from disk")
    max_engine_restarts: NonNegative = key(3, "restarts in a row of an engine that crashes, hangs or gives invalid answers, before the run saves and ends", read_if=OWN_ENGINES)
    engines: Texts = key((), "addresses, http://host:port, of SGLang servers that you start and watch, used instead of megappo's own; their key is in the environment variable MEGAPPO_ENGINE_API_KEY")
    port: Port = key(0, "first port of the engines on a node (engine i takes port + i); 0 = any free port", read_if=OWN_ENGINES)
    server_args: dict[str, FilePath | int | float | StrictBool] = key({}, "further SGLang ServerArgs by name; one that SGLang does not know, or that megappo sets itself, is an error", read_if=OWN_ENGINES)
    environment: FilePath | None = key(None, "FILE.py:CLASS or package.module:CLASS with reset(row) and step(message) -> (observation, reward, done), which replies to the policy in episodes of several turns; null = one response to a prompt")
    tools: FilePaths = key((), "FILE.py:FUNCTION or package.module:FUNCTION each, instead of an environment. The policy may call them until it writes a turn without a call; the chat template lists them, by a schema from signature and docstring; reward.function scores the whole conversation")
    tool_call_parser: str | None = key(None, "SGLang's name of the parser for the calls, such as qwen25 or llama3", read_if=OFFERS_TOOLS)
    max_turns: Positive = key(10, "environment: turns of the policy after which an episode is truncated; rollout.max_response_length limits its tokens, observations included", read_if=PLAYS_EPISODES)
    num_environment_workers: Processes = key(1, "environment: worker processes per engine, each with any number of environments at once; reward.memory_limit_gib and reward.pass_env apply to them", read_if=PLAYS_EPISODES)
    environment_timeout_seconds: Seconds = key(60.0, "environment: timeout of a reset, step or close; an episode whose reset or step exceeds it is truncated and counted", read_if=PLAYS_EPISODES)
    sync: Sync = key(Sync(), "weight sync after each update")

    @property
    def has_environment(self) -> bool:
        """True if responses are episodes."""
        return self.environment is not None or bool(self.tools)
