"""Every key a run's YAML may hold: its type, default and meaning. Immutable once loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import Field, PrivateAttr

from megappo.config.algorithm_section import Algorithm
from megappo.config.conditions import (
    HAS_CRITIC,
    HAS_HELD_OUT,
    HAS_REFERENCE,
    HAS_VALUES,
    ONE_CLIP_RATIO,
    ReadByMethod,
    ReadIf,
)
from megappo.config.data_files import stem
from megappo.config.errors import ConfigError, printable
from megappo.config.eval_section import NONE, Eval
from megappo.config.kinds import (
    ADAPTED_MODULES,
    AdaptedModule,
    Aggregation,
    Decay,
    FilePath,
    Float,
    Fraction,
    KLKind,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Seconds,
    Seed,
    TensorKind,
    Tokens,
    TooLong,
    Ways,
)
from megappo.config.methods import ESTIMATORS, LENGTH_PENALTIES, POLICY_LOSSES, PolicyLoss
from megappo.config.origins import Origins
from megappo.config.reward_section import Reward
from megappo.config.rollout_section import Rollout
from megappo.config.section import Section

_OWN_AVERAGING = ", ".join(name for name, method in POLICY_LOSSES.items() if method.loss_agg_mode)
EVAL_INTERVAL = 10
"""trainer.eval_interval where it is null and there is something to evaluate on."""


class Model(Section):
    path: FilePath = Field(description="Hugging Face folder (config.json, safetensors, tokenizer) that training starts from")
    dtype: Literal["fp32", "bf16"] = Field("bf16", description="parameter and activation type of every model; fp32 on a CPU")
    layer_spec: Literal["auto", "torch", "transformer_engine"] = Field("auto", description="transformer layers: TransformerEngine's where it is installed with CUDA, else torch-only ones")


class Parallel(Section):
    tensor: Ways = Field(1, description="tensor-parallel ranks per model replica")
    context: Ways = Field(1, description="context-parallel ranks: they share out the tokens of each sequence, each holding 1/context of a micro-batch")
    pipeline: Ways = Field(1, description="pipeline stages per model replica")
    virtual_pipeline: Ways = Field(1, description="model chunks on each pipeline stage (interleaved schedule: less idle time, more messages)")
    pipeline_split: tuple[Ways, ...] | None = Field(None, description="layers of each pipeline stage, such as [13, 15], or with virtual_pipeline of each chunk of the model, from the first layer to the last; null = as many on each")
    expert: Ways = Field(1, description="ranks that share out the experts of each layer, among the tensor x context x data ranks of a stage")
    expert_tensor: Ways = Field(1, description="ranks that cut the matrices of each expert, among the same ranks; expert x expert_tensor divides tensor x context x data")
    sequence: bool = Field(False, description="sequence parallelism: shard activations between tensor-parallel blocks (needs tensor > 1)")

    @property
    def num_chunks(self) -> int:
        """Pieces that the layers of the model are cut into."""
        return self.pipeline * self.virtual_pipeline


class Optim(Section):
    lr: PositiveFloat = Field(1e-6, description="peak learning rate (Adam)")
    min_lr: NonNegativeFloat = Field(0.0, description="learning rate at the end of the decay")
    lr_warmup_steps: NonNegative = Field(0, description="optimizer steps of linear warm-up from 0")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field("constant", description="decay from lr to min_lr over the whole run")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled weight decay; not applied to biases and norms")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Adam's moment decays")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon")
    clip_grad: NonNegativeFloat = Field(1.0, description="clip the global gradient norm to this; 0 = off")
    distributed: bool = Field(True, description="shard optimizer state over data-parallel ranks (Megatron's distributed optimizer)")


class Lora(Section):
    rank: Positive = Field(16, description="rank of each adapter: numbers per token between its two matrices")
    alpha: PositiveFloat = Field(32.0, description="an adapter's product is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[AdaptedModule, ...], MinLen(1)] = Field("all-linear", description="matrices of each layer that get an adapter; all-linear = all of them")

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """What target_modules names."""
        return ADAPTED_MODULES if self.target_modules == "all-linear" else self.target_modules

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank


class Trained(Section):
    """What actor and critic, the trained models, share."""

    parallel: Parallel = Field(Parallel(), description="layout of this component over its placement's ranks")
    optim: Optim = Field(Optim(), description="optimizer")
    lora: Lora | None = Field(None, description="train low-rank adapters beside the matrices, and a value head, instead of the weights; null = train all weights")
    recompute: Literal["none", "selective", "full"] = Field("none", description="activation recomputation in the backward pass")
    offload: Literal["auto"] | tuple[TensorKind, ...] = Field((), description="what sleeps in the host's memory while no phase needs it on the device: weights, gradients, optimizer; auto = what does not fit otherwise, by the plan's arithmetic")
    max_tokens_per_micro_batch: Tokens = Field(8192, description="tokens (prompt + response) packed into one micro-batch at most, over all ranks that parallel.context shares them out to")
    ppo_mini_batch_size: Positive = Field(256, description="prompts (each with rollout.n responses) per optimizer step")
    ppo_epochs: Positive = Field(1, description="passes over the rollouts of a step")
    loss_agg_mode: Aggregation | None = Field(None, description=f"how token losses are averaged, always over all data-parallel ranks; -norm divides by rollout.max_response_length; null = token-mean or algorithm.preset's, but seq-mean-token-mean for the policy term of {_OWN_AVERAGING}")

    def num_mini_batches(self, num_prompts: int) -> int:
        """Of a step's prompts, per epoch."""
        return num_prompts // self.ppo_mini_batch_size


class Actor(Trained):
    read_if = (ONE_CLIP_RATIO, ReadIf("kl_loss_coef kl_loss_type kl_loss_unbiased", "actor.use_kl_loss"))

    policy_loss: Annotated[str, OneOf(POLICY_LOSSES)] = Field("clip", description="policy loss; clip is PPO's, with clip-higher and dual clip")
    clip_ratio: PositiveFloat = Field(0.2, description="PPO's epsilon: the probability ratio is clipped to 1 +- this")
    clip_ratio_low: PositiveFloat | None = Field(None, description="lower epsilon; null = clip_ratio")
    clip_ratio_high: PositiveFloat | None = Field(None, description="upper epsilon (clip-higher); null = clip_ratio")
    clip_ratio_c: PositiveFloat | None = Field(3.0, gt=1, description="dual clip: bound on the loss of negative advantages; null = off")
    tau_pos: PositiveFloat = Field(1.0, description="sapo: sharpness of the soft gate where advantages are positive")
    tau_neg: PositiveFloat = Field(1.05, description="sapo: the same where they are not")
    clip_cov_ratio: Fraction = Field(0.0002, description="clip_cov: share of a mini-batch's tokens taken out of the gradient")
    clip_cov_lb: Float = Field(1.0, description="clip_cov: covariance from which on a token may be taken out")
    clip_cov_ub: Float = Field(5.0, description="clip_cov: covariance up to which a token may be taken out")
    kl_cov_ratio: Fraction = Field(0.0002, description="kl_cov: share of a mini-batch's tokens that get the KL penalty")
    ppo_kl_coef: NonNegativeFloat = Field(1.0, description="kl_cov: weight of that penalty")
    dro_beta: PositiveFloat = Field(0.1, description="dro: weight of the squared log-ratio")
    opsm_delta: PositiveFloat | None = Field(None, description="off-policy sequence masking: no gradient from tokens of negative advantage in a response whose mean of old_log_probs - log_probs passes this, such as 1e-4; null = off")
    entropy_coeff: NonNegativeFloat = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef x KL(policy, reference) to the loss; builds a reference")
    kl_loss_coef: NonNegativeFloat = Field(0.001, description="weight of the KL loss")
    kl_loss_type: KLKind = Field("k3", description="KL estimator of the loss; k1+ and k3+ have k2's gradient; full = over the whole vocabulary")
    kl_loss_unbiased: bool = Field(False, description="weight the KL loss of k1 or k3 by the ratio to the policy before the update, which makes its gradient unbiased")
    target_kl: PositiveFloat | None = Field(None, description="skip the rest of a step's mini-batches and epochs once actor/ppo_kl of one passes this; null = off")

    @property
    def method(self) -> PolicyLoss:
        """What policy_loss reads and needs."""
        return POLICY_LOSSES[self.policy_loss]


class Critic(Trained):
    model_path: FilePath | None = Field(None, description="Hugging Face folder the critic starts from, of a language or a reward model; null = model.path")
    value_clip: PositiveFloat | None = Field(0.5, description="clip new values to old values +- this in the value loss; null = off")
    huber_delta: PositiveFloat | None = Field(None, description="Huber value loss: linear beyond this error; null = squared error")
    warmup_steps: NonNegative = Field(0, description="first PPO steps in which only the critic trains")


class Ref(Section):
    parallel: Parallel | None = Field(None, description="layout of the frozen reference; null = the actor's")
    offload: Literal["auto"] | tuple[Literal["weights"], ...] = Field((), description="weights: they sleep in the host's memory while no phase needs them on the device; auto = if they do not fit otherwise")
    max_tokens_per_micro_batch: Tokens | None = Field(None, description="tokens per forward micro-batch; null = the actor's")


class Data(Section):
    train_files: tuple[FilePath, ...] | dict[FilePath, NonNegativeFloat] = Field(min_length=1, description="jsonl, jsonl.gz or parquet files of training prompts; as {a.jsonl: 0.7, b.jsonl: 0.3} each gives its share of every step's, and has epochs of its own; 0 leaves one out that base names")
    val_files: tuple[FilePath, ...] = Field((), description="jsonl, jsonl.gz or parquet files of held-out prompts; each is reported under its name")
    train_batch_size: Positive = Field(256, description="prompts per step, at most as many as train_files hold")
    gen_batch_size: Positive | None = Field(None, description="prompts drawn at a time, at least train_batch_size: a step's rollout ends as soon as train_batch_size of them have all responses (with algorithm.filter_groups: as many as are still needed have scores that differ), and what the engines are at is dropped; null = train_batch_size, each of which is waited for")
    prompt_key: str = Field("prompt", description="field with the prompt: a string, or chat messages put through the tokenizer's template; a dotted name leads into objects")
    label_key: str = Field("label", description="field passed to the reward function as the right answer; may be dotted, as reward_model.ground_truth")
    apply_chat_template: bool = Field(False, description="a prompt that is a string is a user's message, and put through the template like chat messages; false = it goes to the model as it is")
    system_prompt: str | None = Field(None, description="system message before chat messages that have none; null = none")
    chat_template_kwargs: dict[str, str | int | float | bool] = Field({}, description="variables of the chat template, such as {enable_thinking: false}")
    max_prompt_length: Tokens = Field(1024, description="tokens of a prompt; too_long says what a longer one is")
    too_long: TooLong = Field("error", description="a prompt longer than max_prompt_length: an error that names its line, left out, or cut to its last tokens, without those that a template puts before; what is left out or cut is counted at the start")
    on_bad_row: Literal["error", "skip"] = Field("error", description="a malformed record, or one without a field that is needed: an error that names its line, or left out and counted")
    shuffle: bool = Field(True, description="a new order each epoch, from trainer.seed")
    order_by: str | None = Field(None, description="field with a number, such as a difficulty, by which each epoch ascends, or with a - before it descends; shuffle is then of equal ones; null = none")

    @property
    def draw_size(self) -> int:
        """Prompts that are drawn at a time."""
        return self.gen_batch_size or self.train_batch_size

    @property
    def shares(self) -> dict[str, float]:
        """Each training file with its weight; none where they have none."""
        given = self.train_files if isinstance(self.train_files, dict) else {}
        return {file: weight for file, weight in given.items() if weight}

    @property
    def files(self) -> tuple[str, ...]:
        """The training files, but for those with weight 0."""
        return tuple(self.shares) if isinstance(self.train_files, dict) else self.train_files

    @property
    def val_names(self) -> list[str]:
        """Under which each of val_files is reported: its name without folder and ending."""
        return [stem(file) for file in self.val_files]


class Placement(Section):
    read_if = (HAS_REFERENCE,)

    actor: str = Field("all", description="ranks of the actor: 'all', '0-7', '0,2', '0-3,6' (inclusive)")
    critic: str = Field("all", description="ranks of the critic")
    ref: str | None = Field(None, description="ranks of the reference; null = the actor's")
    rollout: str = Field("all", description="ranks whose GPUs the SGLang engines use, the actor's or others")


class Trainer(Section):
    read_if = (
        ReadIf("keep_every", "trainer.save_interval"),
        ReadIf("keep_every", "trainer.keep_checkpoints"),
        ReadIf("eval_checkpoint", "trainer.eval_only"),
        HAS_HELD_OUT,
    )

    output_dir: FilePath = Field(description="folder for config.yaml, metrics.jsonl, tensorboard/, checkpoints/, rollouts/")
    total_steps: Positive = Field(100, description="PPO steps")
    seed: Seed = Field(0, description="seeds data order, value head and sampling")
    save_interval: NonNegative = Field(20, description="checkpoint every so many steps, and at the end; 0 = at the end only")
    async_save: bool = Field(True, description="go on training while a checkpoint is written: from the first save on keeps host memory for a copy of what is saved")
    keep_checkpoints: NonNegative = Field(2, description="newest checkpoints to keep; 0 = all")
    keep_every: NonNegative = Field(0, description="keep those of every so many steps, too; 0 = none")
    eval_interval: NonNegative | None = Field(None, description="evaluate on data.val_files and eval.datasets every so many steps, before the first and at the end; 0 = off; null = 10 where there are any")
    resume: Literal["auto", "never"] = Field("auto", description="auto: go on from output_dir's newest checkpoint; never: refuse a folder that has one")
    export_hf: bool = Field(True, description="write the actor as a Hugging Face folder (hf_actor/) at the end")
    num_samples: NonNegative = Field(4, description="prompts of each held-out data set whose responses are printed and kept per evaluation")
    max_bad_steps: NonNegative = Field(3, description="so many optimizer steps in a row are skipped, with their rows kept in bad_steps/, where loss or gradients are not finite; one more ends the run")
    time_limit: Seconds | None = Field(None, description="seconds that the job may take, from its allocation's start on: the run saves and ends before; null = SLURM's limit, else none")
    grace_seconds: NonNegativeFloat = Field(120.0, description="how long before the limit it begins to save; with async_save two saves must fit, as one may be on its way")
    record_rollouts: FilePath | None = Field(None, description="folder that gets each step's rollouts (tokens, log-probs, scores) in a file; tools/show_rollouts.py shows them")
    replay_rollouts: FilePath | None = Field(None, description="folder of such files to train on, in place of engines")
    rollout_only: bool = Field(False, description="roll out by model.path's weights and record it, without training")
    eval_only: bool = Field(False, description="evaluate once and train nothing: output_dir's newest checkpoint, or model.path where there is none")
    eval_checkpoint: FilePath | None = Field(None, description="eval_only: the checkpoint to evaluate in place of output_dir's newest, a folder step_XXXXXXXX of any run of the same model")
    extensions: tuple[FilePath, ...] = Field((), description="Python files that every rank runs before it reads the config: for methods, families, components, transports and metrics of your own, which they register")
    process_group_timeout_seconds: Seconds = Field(1800.0, description="a collective that waits longer than this ends the run")
    hang_timeout_seconds: Seconds | None = Field(None, description="if no rank has a heartbeat for longer than this, the run ends and logs the ranks' stacks; null = half of process_group_timeout_seconds")


class Config(Section):
    """A whole run. The YAML's top-level keys are the sections."""

    read_if = (
        ReadByMethod("actor", "actor.policy_loss", methods=POLICY_LOSSES),
        ReadByMethod("reward", "reward.length_penalty", methods=LENGTH_PENALTIES),
        ReadByMethod("algorithm", "algorithm.adv_estimator", methods=ESTIMATORS),
        *(HAS_CRITIC, HAS_VALUES, HAS_REFERENCE),
    )

    _origins: Origins = PrivateAttr(Origins())

    @classmethod
    def written(cls, values: dict[str, Any], origins: Origins) -> Self:
        """The config of some values, whose errors name the places that these come from."""
        config = cls.model_validate(values)
        config._origins = origins
        return config

    def located(self, errors: Iterable[str]) -> list[str]:
        """Errors about this config, each behind the file and line of the first key it names that was set."""
        return [printable(self._origins.located(error)) for error in errors]

    def is_below(self, key: str, others: Iterable[str]) -> bool:
        """Whether a source that overrides the one of this key set one of the others."""
        return self._origins.rank(key) > min(map(self._origins.rank, others))

    @contextmanager
    def locating(self) -> Iterator[None]:
        """What is raised inside as a ConfigError says where its keys were written."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(*self.located(error.errors)) from error

    def changed(self, key: str, value: object) -> Self:
        """The same config but for one key, written with dots; the value is of the key's type. The same where it has no
        such key: components that people register may have their settings elsewhere."""
        return _changed(self, key.split("."), value)

    @property
    def has_values(self) -> bool:
        """Whether the estimator needs values."""
        return self.algorithm.method.needs_values

    @property
    def compares_responses(self) -> bool:
        """Whether the responses to a prompt are compared, by the estimator or to normalise their scores."""
        return self.algorithm.method.compares_responses or self.reward.normalize == "group"

    @property
    def has_critic(self) -> bool:
        """Whether a critic, a model of its own, gives the values."""
        return self.has_values and not self.algorithm.shared_backbone

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations; 0 for none."""
        chosen = self.trainer.eval_interval
        return (EVAL_INTERVAL if self.held_out_names else 0) if chosen is None else chosen

    @property
    def evaluates(self) -> bool:
        """Whether the run ever evaluates."""
        return self.trainer.eval_only or (self.eval_interval > 0 and not self.trainer.rollout_only)

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """Under which each held-out data set is reported; see `eval_sets`."""
        return (*self.data.val_names, *self.eval.datasets)

    @property
    def plays_episodes(self) -> bool:
        """Whether responses, of training or of a held-out data set, are episodes."""
        played = any(one.environment not in (None, NONE) for one in self.eval.datasets.values())
        return played or self.offers_tools or self.rollout.has_environment

    @property
    def offers_tools(self) -> bool:
        """Whether the policy has tools, in training or on a held-out data set."""
        return bool(self.rollout.tools) or any(one.tools for one in self.eval.datasets.values())

    @property
    def hang_timeout_seconds(self) -> float:
        """How long all ranks together may be without a heartbeat."""
        return self.trainer.hang_timeout_seconds or self.trainer.process_group_timeout_seconds / 2

    @property
    def absences(self) -> tuple[str, ...]:
        """What the run does without that others have, and why: a line each."""
        if self.trainer.eval_only:
            return ()
        method = "shared_backbone" if self.has_values else f"adv_estimator {self.algorithm.adv_estimator}"
        reason = "trainer.eval_interval is 0" if self.held_out_names else "data.val_files names none"
        reason = "trainer.rollout_only" if self.trainer.rollout_only else reason
        return (
            *(() if self.has_critic else (f"critic: none (algorithm.{method})",)),
            *(() if self.evaluates else (f"evaluation: none ({reason})",)),
        )

    @property
    def proves_weights(self) -> bool:
        """Whether the first sync is compared with what engines had loaded: not of adapters, which are compared as they
        are sent; the weights beside them would not be sent again after they were overwritten."""
        return self.rollout.sync.verify and self.actor.lora is None

    @property
    def kl_kinds(self) -> tuple[str, ...]:
        """The estimators of the KL to the reference that the run uses; without any it builds no reference."""
        penalty = (self.algorithm.kl_penalty,) if self.algorithm.use_kl_in_reward else ()
        return penalty + ((self.actor.kl_loss_type,) if self.actor.use_kl_loss else ())

    model: Model = Field(description="the model all components start from")
    placement: Placement = Field(Placement(), description="which component lives on which ranks (torchrun's global ranks, one per GPU)")
    actor: Actor = Field(Actor(), description="the policy")
    critic: Critic = Field(Critic(), description="the value model")
    ref: Ref = Field(Ref(), description="the frozen reference policy of the KL penalty")
    rollout: Rollout = Field(Rollout(), description="sampling and the SGLang engines")
    data: Data = Field(description="prompts")
    reward: Reward = Field(Reward(), description="scoring of responses")
    algorithm: Algorithm = Field(Algorithm(), description="advantages and KL")
    eval: Eval = Field(Eval(), description="evaluations")
    trainer: Trainer = Field(description="the run")


def _changed(section: Any, names: list[str], value: object) -> Any:
    first, *rest = names
    if not hasattr(section, first):
        return section
    return section.model_copy(update={first: _changed(getattr(section, first), rest, value) if rest else value})
