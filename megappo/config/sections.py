"""Keys of what a step does: prompts and held-out data sets, rollouts and engines, scoring, advantages and KL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import StrictBool

from megappo.config.config_error import Errors
from megappo.config.methods import ESTIMATORS, LENGTH_PENALTIES, TRANSPORTS, Estimator, Method
from megappo.config.values import (
    AtLeastOne,
    BetweenZeroAndOne,
    FilePath,
    FilePaths,
    Float,
    Fraction,
    KLKind,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    Port,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Processes,
    ReadIf,
    Rejection,
    Seconds,
    Section,
    SomeFilePaths,
    Texts,
    TooLong,
    TopK,
    key,
)

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
OTHER_KIND = f"is neither {', '.join(ENDINGS[:-1])} nor {ENDINGS[-1]}: convert it"
OTHER_KIND += " (pandas: table.to_json('NEW.jsonl', orient='records', lines=True))"
"""Follows the name of a file with another ending."""
UNTRUE = "the log-probs of its tokens would belong to another distribution than they are sampled from"
SAMPLING_ARGUMENTS = {
    "preferred_sampling_params": None,
    "enable_strict_thinking": False,
    "enable_watermark": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}
"""SGLang's ServerArgs (0.5.23) that change the distribution of every request, and their values that do not: a grammar,
a bias or penalties for all, a grammar of thoughts, a watermark, draft tokens that are accepted too often. The log-probs
stay the model's: under a grammar they differ by 10."""
NONE = "none"
"""Value of a data set's `environment` or `reward`: it has none, even if training has one."""
_WHITENING = ", ".join(name for name, method in ESTIMATORS.items() if method.whitens)
_WITH_VALUES = ", ".join(name for name, method in ESTIMATORS.items() if method.needs_values)

HAS_VALUES = ReadIf(
    "algorithm.adv_estimator",
    lambda config: config.has_values,
    "{} {} does without values, which gae needs",
)
HAS_HELD_OUT = ReadIf(
    "data.val_files",
    lambda config: config.held_out_names,
    "{} and eval.datasets are empty",
    others=("eval.datasets",),
)
SAMPLES = ReadIf(
    "trainer.replay_rollouts",
    lambda config: not config.replays,
    "the recorded groups of {} are used as they are",
)
SUMS_SCORES = ReadIf(
    "algorithm.adv_estimator",
    lambda config: not config.algorithm.method.needs_score_components,
    "{} {} takes the scores one by one, not their sum",
)
BUILDS_MODELS = ReadIf("trainer.rollout_only", lambda config: not config.trainer.rollout_only, "{} true samples with the weights of model.path")
BUILDS_ACTOR = ReadIf(
    "critic.model_path",
    lambda config: config.samples or config.recipe.trains != "critic" or not config.critic.has_own_weights,
    "only a critic with weights of its own is built",
    others=("critic.dist_checkpointing_path", "trainer.replay_rollouts"),
)
OWN_ENGINES = ReadIf("rollout.engines", lambda config: not config.rollout.engines, "{} are already running")
PARSES_CALLS = ReadIf("rollout.tools", lambda config: config.offers_tools or config.runs_agents, "{} is empty, and no agent is named")
RUNS_AGENTS = ReadIf("rollout.agent", lambda config: config.runs_agents)
PLAYS_EPISODES = ReadIf("rollout.environment", lambda config: config.plays_episodes)
ADAPTS_KL = ReadIf("algorithm.kl_ctrl.type", lambda config: config.algorithm.kl_ctrl.type == "adaptive")
KL_IN_REWARD = ReadIf("algorithm.use_kl_in_reward")
WEIGHTS_ROWS = ReadIf("algorithm.rollout_correction.level", lambda config: config.algorithm.rollout_correction.level != "none")
FILTERS = ReadIf("algorithm.filter_groups.enable")
ONE_BACKBONE = ReadIf("algorithm.shared_backbone")
HAS_ENSEMBLE = ReadIf("critic.ensemble", lambda config: config.critic.ensemble > 1, "one critic cannot disagree")
HAS_ENTROPY_BONUS = ReadIf("actor.entropy_coeff")
TRAINS_ACTOR = ReadIf("trainer.train", lambda config: config.trains_actor, "{} leaves the actor as it is")
OLD_FROM_TRAINER = ReadIf("algorithm.old_log_probs", lambda config: config.algorithm.old_log_probs == "trainer")
RUNS_AHEAD = ReadIf("rollout.max_staleness")
SINGLE_RESPONSES = ReadIf("rollout.environment", lambda config: not config.rollout.has_episodes, "episodes begin again, as {} does not save its state")
CONTINUES_AT_SYNC = ReadIf("rollout.on_sync", lambda config: config.rollout.on_sync == "continue")

Bounds = tuple[PositiveFloat, PositiveFloat]
PLAYERS = ("environment", "tools", "agent", "agent_command")
"""Keys of the rollout section that name the policy's opposite in episodes of several turns."""


def ending(file: str) -> str:
    """Return a data file's ending; "" for a file of another kind."""
    return next((known for known in ENDINGS if file.endswith(known)), "")


def stem(file: str) -> str:
    """Return a data file's name without folder and ending."""
    return Path(file).name.removesuffix(ending(file))


class Parallel(Section):
    tensor: Positive = key(1, "tensor-parallel ranks per model replica")
    context: Positive = key(1, "context-parallel ranks, which split the tokens of each sequence: each holds 1/context of a micro-batch")
    pipeline: Positive = key(1, "pipeline stages per model replica")
    virtual_pipeline: Positive = key(1, "model chunks on each pipeline stage (interleaved schedule: less idle time, more messages)")
    pipeline_split: tuple[Positive, ...] | None = key(None, "layers of each pipeline stage, such as [13, 15], or with virtual_pipeline of each chunk of the model, from the first layer to the last; null = equal shares")
    expert: Positive = key(1, "ranks that share the experts of each layer, among the tensor x context x data ranks of a stage")
    expert_tensor: Positive = key(1, "ranks that split the matrices of each expert, among the same ranks; expert x expert_tensor divides tensor x context x data")
    dispatcher: Literal["alltoall", "deepep"] = key("alltoall", "how tokens get to the ranks of their experts: by NCCL's all-to-all, or by DeepEP's kernels (package deep_ep, on GPUs, in bf16)")
    sequence: StrictBool = key(False, "sequence parallelism: shard activations between tensor-parallel blocks (needs tensor > 1)")

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the layers of the model are cut into."""
        return self.pipeline * self.virtual_pipeline


class Model(Section):
    path: ModelPath = key(..., "Hugging Face folder (config.json, safetensors, tokenizer) that training starts from, or the id of a model on the hub, such as Qwen/Qwen2.5-7B, which a run downloads")
    dist_checkpointing_path: FilePath | None = key(None, "folder of Megatron-LM, slime, Megatron-Bridge or verl (torch_dist), or a component of a checkpoint, whose weights the models of model.path start from instead of its safetensors; null = its safetensors", read_if=(BUILDS_MODELS, BUILDS_ACTOR))
    dtype: Literal["fp32", "bf16"] = key("bf16", "parameter and activation type of every model; fp32 on a CPU")
    layer_spec: Literal["auto", "torch", "transformer_engine"] = key("auto", "transformer layers; auto = TransformerEngine's where it is installed with CUDA and can compute the model, else torch's")


class Data(Section):
    train_files: SomeFilePaths | Annotated[dict[FilePath, NonNegativeFloat], MinLen(1)] = key(..., "jsonl, jsonl.gz or parquet files of training prompts; with weights, as {a.jsonl: 0.7, b.jsonl: 0.3}, each file gives its share of every step and has epochs of its own; weight 0 drops a file that base names")
    val_files: FilePaths = key((), "jsonl, jsonl.gz or parquet files of held-out prompts; each is reported under its name, files with equal names under the folder's name, too: math_test")
    train_batch_size: Positive = key(256, "prompts, examples or pairs per step, at most as many as train_files hold")
    gen_batch_size: Positive | None = key(None, "prompts drawn at a time, at least train_batch_size. A step's rollout ends as soon as train_batch_size of them have all their responses (with algorithm.filter_groups: as soon as enough of them have scores that differ), and the unfinished responses are dropped; null = train_batch_size, and wait for all", read_if=SAMPLES)
    prompt_key: str = key("prompt", "field with the prompt: a string, or chat messages for the tokenizer's template; a dotted name is a path into objects")
    label_key: str = key("label", "field passed to the reward function as the right answer; may be dotted, as reward_model.ground_truth")
    image_key: str = key("images", "field with the images of a prompt, for a model with vision: a list, or one, of paths, file or data URLs, or {bytes: ..., path: ...}; may be dotted. Each takes the place of an <image> in a text, or of a part {type: image} of a message")
    max_image_pixels: Positive | None = key(None, "most pixels of an image: larger ones are made smaller; null = as preprocessor_config.json of the model has it")
    apply_chat_template: StrictBool = key(False, "treat a prompt that is a string as a user's message and apply the chat template; false = pass it to the model as it is")
    system_prompt: str | None = key(None, "system message for chat messages that have none; null = none")
    chat_template_kwargs: dict[str, str | int | float | StrictBool] = key({}, "variables of the chat template, such as {enable_thinking: false}")
    max_prompt_length: Positive = key(1024, "tokens of a prompt; too_long decides about a longer one")
    max_length: Positive = key(2048, "tokens of an example, or of each of a pair, prompts and responses together; too_long decides about a longer one")
    columns: dict[Literal["messages", "prompt", "response", "chosen", "rejected", "margin", "score", "steps"], str] = key({}, "fields of an example, such as {prompt: input, response: target} or {messages: dialogue}; {} = the first that a file has: messages; conversations; prompt and response; prompt and completion; question and answer; instruction and output. Preferences have chosen and rejected, with prompt and margin if a file has them; trajectories have score, and steps if a file has them")
    train_on: Literal["all", "last"] = key("all", "messages of the assistant with a loss: all, or the last one of an example")
    too_long: TooLong = key("error", "a prompt longer than max_prompt_length, or an example longer than max_length: error = an error that names its line; skip = leave it out; truncate_left = keep its last tokens, without the tokens that the template puts first (prompts only). The start of the run reports how many were left out or cut")
    on_bad_row: Literal["error", "skip"] = key("error", "a malformed record, or one without a required field: error = an error that names its line; skip = leave it out and count it")
    shuffle: StrictBool = key(True, "a new order each epoch, from trainer.seed")
    order_by: str | None = key(None, "field with a number, such as a difficulty, by which each epoch is sorted, ascending, or descending with a - before the name; shuffle then applies among equal values; null = none")

    @property
    def draw_size(self) -> int:
        """Number of prompts drawn at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def shares(self) -> dict[str, float]:
        """Weight of each training file; empty if the files have no weights."""
        given = self.train_files if isinstance(self.train_files, dict) else {}
        return {file: weight for file, weight in given.items() if weight}

    @property
    def files(self) -> tuple[str, ...]:
        """Training files, except files of weight 0."""
        return tuple(self.shares) if isinstance(self.train_files, dict) else self.train_files

    @property
    def val_names(self) -> list[str]:
        """Name under which each of val_files is reported: without folder and ending, or, of equal ones, behind the folder's."""
        stems = [stem(file) for file in self.val_files]
        with_folders = [f"{Path(file).absolute().parent.name}_{stem(file)}" for file in self.val_files]
        return [stems[n] if stems.count(stems[n]) == 1 else longer for n, longer in enumerate(with_folders)]

    def contradictions(self) -> Errors:
        if not self.files:
            yield "data.train_files: every weight is 0: raise one"
        if self.draw_size < self.train_batch_size:
            yield (
                f"data.gen_batch_size {self.gen_batch_size} is below data.train_batch_size {self.train_batch_size}, the "
                "prompts that a step trains on: raise it, or drop it"
            )


class EvalDataset(Section):
    """A held-out data set. A key that is null has the value for data.val_files."""

    files: SomeFilePaths = key(..., "jsonl, jsonl.gz or parquet files of its prompts")
    n: Positive | None = key(None, "responses per prompt; null = rollout.val_n")
    temperature: NonNegativeFloat | None = key(None, "0 = greedy; null = rollout.val_temperature")
    top_p: PositiveFraction | None = key(None, "null = rollout.val_top_p")
    top_k: TopK | None = key(None, "null = rollout.val_top_k")
    max_response_length: Positive | None = key(None, "null = rollout.max_response_length")
    max_prompt_length: Positive | None = key(None, "null = data.max_prompt_length")
    prompt_key: str | None = key(None, "null = data.prompt_key")
    label_key: str | None = key(None, "null = data.label_key")
    image_key: str | None = key(None, "null = data.image_key")
    reward: FilePath | dict[FilePath, Float] | None = key(None, "its reward function, or several with their weights, as in reward.function; none = no function: an environment gives the rewards; null = reward.function")
    environment: FilePath | None = key(None, "its environment, with the limits of rollout.environment; none = one response to a prompt, without tools or agent; null = as in training")
    tools: FilePaths = key((), "its tools, instead of an environment, parsed by rollout.tool_call_parser; [] = see environment")
    agent: FilePath | None = key(None, "its agent, instead of an environment, with the limits of rollout.agent; null = see environment")
    pass_threshold: Float | None = key(None, "smallest score with which a response passes; null = rollout.val_pass_threshold")


class Eval(Section):
    datasets: dict[str, EvalDataset] = key({}, "held-out data besides data.val_files: name -> files, sampling, reward function, environment; reported as val/NAME")


class Sync(Section):
    transport: Literal["auto"] | Annotated[str, OneOf(TRANSPORTS)] = key("auto", "how weights reach the engines. ipc: CUDA handles (shared memory on a CPU); the engine's first rank must be one of the actor's, and all of them if the engine spans nodes. broadcast: the engine must not be on the GPU of a rank that sends. disk: a file system that all nodes share. auto = ipc where possible, else broadcast")
    bucket_bytes: Positive | None = key(None, "bytes of weights sent to the engine at a time, with two such buckets in flight; null = 2 GiB (on a CPU: 128 MiB)")
    verify: StrictBool = key(True, "before training, overwrite the engines' weights, sync, and compare the engines' checksums with the checksums of the weights they had loaded; for adapters, compare the SHA-256 of each at every sync over ipc, and once the weights beside them")
    merge_adapters: StrictBool = key(False, "send the actor's weights with its adapters merged, for matrices whose adapters SGLang does not apply, such as experts'; false = send the adapters alone", read_if=ReadIf("actor.lora"))
    probe_interval: NonNegative = key(1, "syncs between probes, the first of them after the first sync: each engine continues a few prompts, and the actor must agree about the log-probs; 0 = compare the rollouts only")
    probe_tolerance: PositiveFloat = key(0.05, "mean difference of trainer and engine log-probs, in the probe or the rollouts, above which the run warns and counts it (fp32: 1e-3); the run stops at 5 times this")


class Rollout(Section):
    n: Positive = key(1, "responses per prompt")
    temperature: PositiveFloat = key(1.0, "sampling temperature of training rollouts")
    top_p: PositiveFraction = key(1.0, "nucleus sampling")
    top_k: TopK = key(-1, "top-k sampling; -1 = off")
    max_response_length: Positive = key(1024, "tokens after which a response is truncated")
    stop: Texts = key((), "strings that end a response, besides the tokenizer's end token; each must be one token")
    val_n: Positive = key(1, "responses per prompt in evaluations", read_if=HAS_HELD_OUT)
    val_temperature: NonNegativeFloat = key(0.0, "sampling temperature of evaluations; 0 = greedy", read_if=HAS_HELD_OUT)
    val_top_p: PositiveFraction = key(1.0, "nucleus sampling of evaluations", read_if=HAS_HELD_OUT)
    val_top_k: TopK = key(-1, "top-k sampling of evaluations; -1 = off", read_if=HAS_HELD_OUT)
    val_pass_threshold: Float = key(1.0, "smallest score with which a response of an evaluation passes, for pass@k", read_if=HAS_HELD_OUT)
    tensor_parallel: Positive = key(1, "GPUs per SGLang engine; the ranks of placement.rollout are cut into groups of this size, each on one node or with as many ranks on each of several")
    max_running_requests: Positive = key(256, "sequences that an engine decodes at once")
    mem_fraction_static: BetweenZeroAndOne = key(0.5, "share of GPU memory for the engine's weights and KV cache (GPU only)", read_if=OWN_ENGINES)
    sleep: Literal["always", "auto", "never"] = key("always", "when an engine gives its memory to the models on its GPUs; auto = when memory needs it (GPU only)", read_if=OWN_ENGINES)
    max_total_tokens: Positive | None = key(None, "KV-cache tokens of an engine; null = from mem_fraction_static (on a CPU: 65536)", read_if=OWN_ENGINES)
    start_timeout_seconds: Seconds = key(1500.0, "timeout for the start of an engine; the first on a GPU compiles kernels")
    request_timeout_seconds: Seconds = key(1800.0, "timeout for the next response of a rollout request, and for an engine to read weights from disk")
    max_engine_restarts: NonNegative = key(3, "restarts in a row of an engine that crashes, hangs or gives invalid answers, before the run saves and ends", read_if=OWN_ENGINES)
    engines: Texts = key((), "addresses, http://host:port, of SGLang servers that you start and watch, used instead of megappo's own; their key is in the environment variable MEGAPPO_ENGINE_API_KEY")
    port: Port = key(0, "first port of the engines on a node (engine i takes port + i); 0 = any free port", read_if=OWN_ENGINES)
    server_args: dict[str, FilePath | int | float | StrictBool] = key({}, "further SGLang ServerArgs by name; one that SGLang does not know, or that megappo sets itself, is an error", read_if=OWN_ENGINES)
    environment: FilePath | None = key(None, "FILE.py:CLASS or package.module:CLASS with reset(row) and step(message) -> (observation, reward, done), which replies to the policy in episodes of several turns; null = one response to a prompt")
    tools: FilePaths = key((), "FILE.py:FUNCTION or package.module:FUNCTION each, instead of an environment. The policy may call them until it writes a turn without a call; the chat template lists them, by a schema from signature and docstring; reward.function scores the whole conversation")
    agent: FilePath | None = key(None, "FILE.py:FUNCTION or package.module:FUNCTION of (base_url, api_key, row) -> reward, instead of an environment: a program with a loop of its own, whose requests to an OpenAI-compatible endpoint the policy answers")
    agent_command: str | None = key(None, "the same as a command, a process per episode, which finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY and its record in the JSON file MEGAPPO_ROW; the last line of its output is the reward")
    agent_timeout_seconds: Seconds = key(600.0, "agent: timeout of an episode; rollout.environment_timeout_seconds limits the time between its requests", read_if=RUNS_AGENTS)
    tool_call_parser: str | None = key(None, "SGLang's name of the parser for the calls, such as qwen25 or llama3", read_if=PARSES_CALLS)
    reasoning_parser: str | None = key(None, "agent: SGLang's name of the parser for thoughts, such as qwen3, which an agent then finds in reasoning_content; null = thoughts stay in the text", read_if=RUNS_AGENTS)
    max_turns: Positive = key(10, "environment: turns of the policy after which an episode is truncated, and an agent's requests are refused; rollout.max_response_length limits its tokens, observations included", read_if=PLAYS_EPISODES)
    num_environment_workers: Processes = key(1, "environment: worker processes per engine, each with any number of environments at once; reward.memory_limit_gib and reward.pass_env apply to them", read_if=PLAYS_EPISODES)
    environment_timeout_seconds: Seconds = key(60.0, "environment: timeout of a reset, step or close, and of an agent between its requests; an episode that exceeds it is truncated and counted", read_if=PLAYS_EPISODES)
    routing_replay: StrictBool = key(False, "mixtures of experts: the actor sends each token to the experts that the engine chose when it sampled, in log-probs and updates", read_if=TRAINS_ACTOR)
    sync: Sync = key(Sync(), "weight sync after each update")
    max_staleness: NonNegative = key(0, "training steps by which sampling may run ahead: the engines sample while the models train, and no response is older than this when it is trained; 0 = sample, then train", read_if=SAMPLES)
    on_sync: Literal["continue", "finish"] = key("continue", "responses in progress at a weight sync: continue = pause them, then continue with the new weights; finish = complete them first", read_if=RUNS_AHEAD)
    recompute_cache: StrictBool = key(True, "compute the keys and values of paused responses again with the new weights; false = keep the keys and values of the old weights", read_if=(RUNS_AHEAD, CONTINUES_AT_SYNC))
    keep_partial: StrictBool = key(False, "also save the unfinished responses at each checkpoint, so that a resumed run continues them", read_if=(RUNS_AHEAD, SINGLE_RESPONSES))

    @property
    def players(self) -> list[str]:
        """Names of the PLAYERS that are set: one in a valid config if responses are episodes, else none."""
        return [name for name in PLAYERS if getattr(self, name)]

    @property
    def has_episodes(self) -> bool:
        """True if responses are episodes."""
        return bool(self.players)

    @property
    def has_agent(self) -> bool:
        """True if a program with a loop of its own plays the episodes."""
        return bool(self.agent or self.agent_command)

    @property
    def runs_ahead(self) -> bool:
        """True if the engines sample for later steps while the models train."""
        return self.max_staleness > 0

    def contradictions(self) -> Errors:
        if "" in self.stop:
            yield "rollout.stop holds an empty string, which would end every response at once: remove it"
        if self.engines and self.sync.transport == "ipc":
            yield "rollout.sync.transport ipc reaches no server of rollout.engines: set it to auto"
        for name in changed_sampling(self.server_args):
            yield f"rollout.server_args: {name} may not be set, as {UNTRUE}: remove it"


def changed_sampling(server_args: Mapping[str, Any]) -> list[str]:
    """Return the names of the `SAMPLING_ARGUMENTS` that change how an engine with these arguments samples."""
    return [name for name, own in SAMPLING_ARGUMENTS.items() if server_args.get(name, own) != own]


class Reward(Section):
    method_key = "length_penalty"
    methods = LENGTH_PENALTIES

    function: FilePath | dict[FilePath, Float] | None = key("exact_match", "built-in name, or FILE.py:FUNCTION or package.module:FUNCTION of (prompts, responses, labels, **columns) -> list of scores, or of lists of them; verl's and TRL's signatures work, too. Several functions with weights, as {gsm8k: 1, my_rewards.py:brevity: 0.1}, score each response together; weight 0 drops one that base names. null = none: rollout.environment gives the rewards")
    num_workers: Processes = key(1, "worker processes that run the function, per engine")
    timeout_seconds: Seconds = key(60.0, "timeout of one call of the function, for one response or for the whole list")
    memory_limit_gib: PositiveFloat | None = key(16.0, "memory limit of each of these processes, and of each that it starts; null = none")
    pass_env: Texts = key((), "environment variables that the function gets although they are named like secrets, such as OPENAI_API_KEY")
    on_error: Literal["raise", "zero"] = key("raise", "a call that raises, hangs, ends its process or returns an invalid value: raise = the run ends; zero = its response gets score 0 and is counted")
    batch_size: Positive | None = key(None, "most responses in one call of a function of lists, which is then called as they are written; null = an equal share for each worker, once all are written (with rollout.max_staleness: all responses to a prompt)")
    options: dict[FilePath, dict[str, Any]] = key({}, "arguments for every call of a function, as {my_rewards.py:brevity: {limit: 100}}")
    skip_special_tokens: StrictBool = key(True, "functions get responses as text without special tokens; false = drop only special tokens that begin, end or pad a text, for models where <think> or <answer> are special")
    scale: PositiveFloat = key(1.0, "factor of every score; the first of the shaping steps", read_if=SUMS_SCORES)
    clip: PositiveFloat | None = key(None, "clip scaled scores to +- this; null = off", read_if=SUMS_SCORES)
    normalize: Literal["none", "running", "batch", "group"] = key("none", "shift and scale scores to mean 0, deviation 1: over all steps so far, this step, or the responses to a prompt", read_if=SUMS_SCORES)
    length_penalty: Annotated[str, OneOf(LENGTH_PENALTIES)] = key("none", "added last: DAPO's soft overlong punishment (overlong), or -length_penalty_factor x length / rollout.max_response_length (linear)", read_if=SUMS_SCORES)
    overlong_buffer: Positive = key(256, "overlong: tokens before rollout.max_response_length over which the penalty grows")
    length_penalty_factor: NonNegativeFloat = key(1.0, "the largest length penalty")

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each function's scores, without functions of weight 0."""
        given = {self.function: 1.0} if isinstance(self.function, str) else self.function or {}
        return {function: weight for function, weight in given.items() if weight}

    @property
    def penalty(self) -> Method:
        """Entry of length_penalty."""
        return LENGTH_PENALTIES[self.length_penalty]


class KLCtrl(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "fixed: keep kl_coef; adaptive: steer it towards target_kl")
    kl_coef: NonNegativeFloat = key(0.001, "weight of the KL penalty in the reward")
    horizon: Positive = key(10000, "adaptive: responses over which the coefficient adapts", read_if=ADAPTS_KL)
    target_kl: PositiveFloat = key(0.1, "adaptive: KL per response token to hold", read_if=ADAPTS_KL)

    def contradictions(self) -> Errors:
        if self.type == "adaptive" and not self.kl_coef:
            yield "algorithm.kl_ctrl.kl_coef 0 stays 0, as algorithm.kl_ctrl.type adaptive multiplies it: set it above 0"


class RolloutCorrection(Section):
    level: Literal["none", "token", "sequence", "geometric"] = key("none", "importance weights pi_trainer / pi_engine by token, response (product) or response (geometric mean)")
    mode: Literal["truncate", "mask"] = key("truncate", "a weight beyond the thresholds is bounded (truncate: TIS) or set to 0 (mask: IcePop)", read_if=WEIGHTS_ROWS)
    threshold: AtLeastOne = key(2.0, "largest weight", read_if=WEIGHTS_ROWS)
    threshold_lower: PositiveFloat | None = key(None, "smallest weight; null = none (truncate), 1 / threshold (mask)", read_if=WEIGHTS_ROWS)
    normalize: StrictBool = key(False, "divide the weights by their mean over the batch", read_if=WEIGHTS_ROWS)
    reject: dict[Rejection, PositiveFloat | Bounds] = key({}, "reject tokens (token_*) or responses (seq_*) whose divergence between engine and trainer passes a bound, such as {seq_mean_k1: [0.999, 1.001], token_k3: 0.1}. k1 is the log of pi_engine / pi_trainer; its bounds are two of that ratio, or u for 1 / u and u. k2 = k1^2 / 2 and k3 = e^-k1 - 1 + k1 take the largest. sum, mean and max are over a response. Names: " + ", ".join(get_args(Rejection)))
    reject_geometric: Bounds | None = key(None, "reject responses whose geometric-mean ratio is outside, such as [0.999, 1.001]; null = off")
    veto_threshold: BetweenZeroAndOne | None = key(None, "reject responses with a token whose ratio is below this, such as 1e-4; null = off")

    @property
    def is_on(self) -> bool:
        """True if rows get weights. Metrics are computed in any case."""
        rejects = self.reject or self.reject_geometric is not None or self.veto_threshold is not None
        return self.level != "none" or bool(rejects)

    def contradictions(self) -> Errors:
        section = "algorithm.rollout_correction"
        for name, bounds in self.reject.items():
            takes_ratios = name.endswith("k1")
            if isinstance(bounds, tuple):
                is_wrong = not takes_ratios or bounds[0] > bounds[1]
            else:
                is_wrong = takes_ratios and bounds <= 1
            if is_wrong:
                yield (
                    f"{section}.reject {name} {bounds}: set two ascending bounds or one above 1 for k1, and one number, "
                    "the largest, for k2 and k3"
                )
        if self.reject_geometric and not self.reject_geometric[0] < 1 < self.reject_geometric[1]:
            yield f"{section}.reject_geometric {self.reject_geometric} must enclose 1: set such as [0.999, 1.001]"
        lower = self.threshold_lower or (1 / self.threshold if self.mode == "mask" else 0)
        if self.level != "none" and lower >= self.threshold:
            yield (
                f"{section}.threshold_lower {lower:g} must be below {section}.threshold {self.threshold}: lower it, or "
                "raise threshold"
            )


class FilterGroups(Section):
    enable: StrictBool = key(False, "train on groups whose scores differ, and draw further prompts to replace the others (DAPO's dynamic sampling)", read_if=SAMPLES)
    metric: str = key("score", "number that must differ among the responses to a prompt: score, or the name of one that the reward function returns beside it", read_if=FILTERS)
    max_num_gen_batches: Positive = key(10, "batches of prompts that a step may draw; then the first groups without a difference fill the batch", read_if=FILTERS)


class Distillation(Section):
    signal: Literal["reward", "advantage", "loss"] = key("reward", "what the KL(policy, teacher) of each token does: reward = it is subtracted from the token's reward, so that the estimator, and a critic, credit the tokens before it; advantage = from the token's own advantage, after whitening; loss = it is a term of the actor's loss")
    coef: PositiveFloat = key(1.0, "weight of the KL: in score per nat, in advantage per nat, or in the loss")
    kl_type: KLKind | None = key(None, "KL estimator; full = over the whole vocabulary, for one teacher with the actor's ranks and layout; null = k1, and k1+ for the loss, as k1's own gradient does not depend on the teacher")
    task_reward: StrictBool = key(True, "train the rows of a teacher by the reward section, too; false = their scores are only logged")
    without_teacher: Literal["error", "reward"] = key("error", "a row that no teacher's `when` names: error = an error that names its line; reward = train it by the reward section alone")

    @property
    def kl_kind(self) -> str:
        """The KL estimator."""
        return self.kl_type or ("k1+" if self.signal == "loss" else "k1")

    def contradictions(self) -> Errors:
        if self.signal == "loss" and self.kl_kind in ("k1", "kl"):
            yield (
                f"distillation.kl_type {self.kl_kind} as a loss has a gradient that does not depend on the teacher: "
                "choose k1+, which has the KL's value and gradient, or full"
            )


class Algorithm(Section):
    method_key = "adv_estimator"
    methods = ESTIMATORS

    preset: Literal["verl", "slime", "miles", "openrlhf", "nemo_rl"] | None = key(None, "numerical conventions of another system (whitening, clamps, KL gradient, KL in the reward with a baseline, factor of the value loss, averaging); null = megappo's")
    adv_estimator: Annotated[str, OneOf(ESTIMATORS)] = key("gae", f"advantage estimator; only {_WITH_VALUES} needs a critic")
    gamma: Fraction = key(1.0, "discount per token")
    lam: Fraction = key(1.0, "GAE's lambda")
    lam_alpha: PositiveFloat | None = key(None, "length-adaptive lambda of the actor, 1 - 1 / (lam_alpha x response tokens), in place of lam (VAPO: 0.05); null = off", read_if=HAS_VALUES)
    critic_lam: Fraction | None = key(None, "lambda of the critic's returns (decoupled GAE); null = lam", read_if=HAS_VALUES)
    gae_level: Literal["token", "turn"] = key("token", "gae: unit of action. turn: each turn of an episode has one reward, value and advantage, and gamma and lam are per turn")
    bootstrap_truncated: StrictBool = key(False, "take the critic's value, instead of 0, for the future of a truncated response", read_if=HAS_VALUES)
    mask_truncated: StrictBool = key(False, "leave truncated responses, and episodes that did not end, out of losses and advantages, and with them the last response of a group whose responses are compared (DAPO's overlong filtering)")
    norm_adv_by_std_in_grpo: StrictBool = key(True, "grpo: divide by the group's standard deviation; false = Dr. GRPO")
    whiten_advantages: StrictBool | None = key(None, f"shift and scale advantages to mean 0, variance 1 over all response tokens of a step; null = for {_WHITENING}")
    advantages_clip: PositiveFloat | None = key(None, "clip advantages to +- this, after whitening; null = off")
    mask_agreed: Fraction = key(0.0, "critic.ensemble: share of a step's tokens, those on whose values the critics agree most, that get the advantage 0 after whitening; 0 = none", read_if=(HAS_ENSEMBLE, TRAINS_ACTOR))
    mask_disputed: Fraction = key(0.0, "critic.ensemble: share of a step's tokens, those on whose values the critics disagree most, that get no gradient from the entropy bonus; 0 = none", read_if=(HAS_ENSEMBLE, TRAINS_ACTOR, HAS_ENTROPY_BONUS))
    use_kl_in_reward: StrictBool = key(True, "subtract kl_coef x KL(policy, reference) from each token's reward; builds a reference")
    kl_penalty: KLKind = key("k1", "KL estimator of that penalty", read_if=KL_IN_REWARD)
    kl_ctrl: KLCtrl = key(KLCtrl(), "KL coefficient", read_if=KL_IN_REWARD)
    old_log_probs: Literal["trainer", "engine"] = key("trainer", "log-probs with which the policy loss compares: trainer = the actor's before the step's first update, by a forward pass, or by the update where a step has only one and nothing needs them before; engine = the log-probs with which the tokens were sampled, without that pass")
    rollout_correction: RolloutCorrection = key(RolloutCorrection(), "weights that correct for the mismatch between engine and trainer", read_if=OLD_FROM_TRAINER)
    filter_groups: FilterGroups = key(FilterGroups(), "which groups of responses a step trains on")
    shared_backbone: StrictBool = key(False, "gae: one model with a policy head and a value head instead of a separate critic; the critic's keys of the value loss (value_*, huber_delta, hl_gauss_width) and loss_agg_mode still apply", read_if=HAS_VALUES)
    detach_values: StrictBool = key(False, "shared_backbone: the value loss trains the value head alone, which reads the policy's hidden states: a critic for almost nothing that cannot disturb the policy", read_if=ONE_BACKBONE)
    value_coef: NonNegativeFloat = key(0.5, "shared_backbone: weight of the value loss in the combined loss", read_if=ONE_BACKBONE)

    @property
    def method(self) -> Estimator:
        """Entry of adv_estimator: what it reads and needs."""
        return ESTIMATORS[self.adv_estimator]

    def contradictions(self) -> Errors:
        if self.mask_truncated and self.bootstrap_truncated:
            yield "algorithm.mask_truncated and algorithm.bootstrap_truncated are both true: drop one"
        if self.method.needs_score_components and self.use_kl_in_reward:
            yield (
                f"algorithm.use_kl_in_reward true has no effect, as algorithm.adv_estimator {self.adv_estimator} takes "
                "the scores one by one, not their sum: set it to false (actor.use_kl_loss true is the KL beside it)"
            )
