"""Every key that a run's YAML may hold, with its type, default and meaning. Immutable once loaded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import PrivateAttr, StrictBool, model_validator

from megappo.config.config_error import ConfigError, printable
from megappo.config.methods import POLICY_LOSSES, PolicyLoss
from megappo.config.sections import (
    HAS_HELD_OUT,
    HAS_VALUES,
    NONE,
    Algorithm,
    Data,
    Eval,
    Parallel,
    Ref,
    Reward,
    RewardModel,
    Rollout,
)
from megappo.config.sources import Sources
from megappo.config.values import (
    ADAPTED_MODULES,
    LISTED,
    AboveOne,
    AdaptedModule,
    Aggregation,
    BetweenZeroAndOne,
    Decay,
    FilePath,
    FilePaths,
    Float,
    Fraction,
    HealthRule,
    KLKind,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    OneOf,
    ParameterGroup,
    Positive,
    PositiveFloat,
    Ranks,
    ReadIf,
    Section,
    TensorKind,
    Texts,
    key,
)

_OWN_AVERAGING = ", ".join(name for name, method in POLICY_LOSSES.items() if method.loss_agg_mode)
EVAL_INTERVAL = 10
"""Value of trainer.eval_interval where it is null and there is something to evaluate on."""
CONSOLE_FIELDS = ("reward", "val", "ref_kl", "ppo_kl", "entropy", "clipfrac", "vf_ev", "length", "tok/s", "step_s")
"""Default of trainer.console_fields: `observe.console.COLUMNS` has their metrics."""

HAS_CRITIC = ReadIf(
    "algorithm.adv_estimator",
    lambda config: config.has_critic,
    "this run builds no critic",
    others=("algorithm.shared_backbone",),
    always=("value_clip", "huber_delta", "loss_agg_mode"),
)
HAS_REFERENCE = ReadIf(
    "algorithm.use_kl_in_reward",
    lambda config: config.kl_kinds,
    "{} and actor.use_kl_loss are false, so that no reference is built",
    others=("actor.use_kl_loss",),
)
HAS_REWARD_MODEL = ReadIf("reward_model.model_path", always=("model_path",))
HAS_KL_LOSS = ReadIf("actor.use_kl_loss")
ONE_CLIP_RATIO = ReadIf(
    "actor.clip_ratio_low",
    lambda config: config.actor.clip_ratio_low is None or config.actor.clip_ratio_high is None,
    "{} and actor.clip_ratio_high are set",
    others=("actor.clip_ratio_high",),
)
DELETES_CHECKPOINTS, SAVES_BETWEEN = ReadIf("trainer.keep_checkpoints"), ReadIf("trainer.save_interval")
PROFILES = ReadIf("trainer.profile.steps")
ONLY_EVALUATES = ReadIf("trainer.eval_only")


class Model(Section):
    path: ModelPath = key(..., "Hugging Face folder (config.json, safetensors, tokenizer) that training starts from, or the id of a model in the local cache, such as Qwen/Qwen2.5-7B")
    dtype: Literal["fp32", "bf16"] = key("bf16", "parameter and activation type of every model; fp32 on a CPU")
    layer_spec: Literal["auto", "torch", "transformer_engine"] = key("auto", "transformer layers; auto = TransformerEngine's where it is installed with CUDA, else those of torch")


class Optim(Section):
    lr: BetweenZeroAndOne = key(1e-6, "peak learning rate (Adam)")
    min_lr: NonNegativeFloat = key(0.0, "learning rate at the end of the decay")
    lr_warmup_steps: NonNegative = key(0, "optimizer steps of linear warm-up from 0")
    lr_decay_style: Literal["constant", "linear", "cosine"] = key("constant", "decay from lr to min_lr over the whole run")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay; not applied to biases and norms")
    betas: tuple[Decay, Decay] = key((0.9, 0.95), "Adam's moment decays")
    eps: PositiveFloat = key(1e-8, "Adam's epsilon")
    clip_grad: NonNegativeFloat = key(1.0, "clip the global gradient norm to this; 0 = off")
    distributed: StrictBool = key(True, "shard optimizer state over data-parallel ranks (Megatron's distributed optimizer)")


class Lora(Section):
    rank: Positive = key(16, "rank of each adapter: numbers per token between its two matrices")
    alpha: PositiveFloat = key(32.0, "an adapter's product is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[AdaptedModule, ...], MinLen(1), LISTED] = key("all-linear", "matrices of each layer that get an adapter; all-linear = all of them")

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """Names of the matrices that get an adapter."""
        return ADAPTED_MODULES if self.target_modules == "all-linear" else self.target_modules

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank


class Trained(Section):
    """Keys of actor and critic alike."""

    parallel: Parallel = key(Parallel(), "layout of this component over its placement's ranks")
    optim: Optim = key(Optim(), "optimizer")
    lora: Lora | None = key(None, "train low-rank adapters beside the matrices, and a value head, instead of the weights; null = train all weights")
    recompute: Literal["none", "selective", "full"] = key("none", "activation recomputation in the backward pass")
    offload: Literal["auto"] | Annotated[tuple[TensorKind, ...], LISTED] = key((), "tensors to keep in host memory while no phase needs them on the device: weights, gradients, optimizer; auto = those that do not fit otherwise, by the plan's estimate")
    max_tokens_per_micro_batch: Positive = key(8192, "most tokens (prompt + response) packed into one micro-batch, over all ranks of parallel.context together")
    ppo_mini_batch_size: Positive = key(256, "prompts (each with rollout.n responses) per optimizer step")
    ppo_epochs: Positive = key(1, "passes over the rollouts of a step")
    loss_agg_mode: Aggregation | None = key(None, f"how token losses are averaged, always over all data-parallel ranks; -norm divides by rollout.max_response_length; null = token-mean or algorithm.preset's, but seq-mean-token-mean for the policy term of {_OWN_AVERAGING}")

    def num_mini_batches(self, num_prompts: int) -> int:
        """Return the mini-batches of a step with so many prompts, per epoch."""
        return num_prompts // self.ppo_mini_batch_size


class Actor(Trained):
    method_key, methods = "policy_loss", POLICY_LOSSES

    policy_loss: Annotated[str, OneOf(POLICY_LOSSES)] = key("clip", "policy loss; clip is PPO's, with clip-higher and dual clip")
    clip_ratio: PositiveFloat = key(0.2, "PPO's epsilon: the probability ratio is clipped to 1 +- this", read_if=ONE_CLIP_RATIO)
    clip_ratio_low: PositiveFloat | None = key(None, "lower epsilon; null = clip_ratio")
    clip_ratio_high: PositiveFloat | None = key(None, "upper epsilon (clip-higher); null = clip_ratio")
    clip_ratio_c: AboveOne | None = key(3.0, "dual clip: bound on the loss of negative advantages; null = off")
    tau_pos: PositiveFloat = key(1.0, "sapo: sharpness of the soft gate for positive advantages")
    tau_neg: PositiveFloat = key(1.05, "sapo: the same for other advantages")
    clip_cov_ratio: Fraction = key(0.0002, "clip_cov: share of a mini-batch's tokens that get no gradient")
    clip_cov_lb: Float = key(1.0, "clip_cov: smallest covariance of such a token")
    clip_cov_ub: Float = key(5.0, "clip_cov: largest covariance of such a token")
    kl_cov_ratio: Fraction = key(0.0002, "kl_cov: share of a mini-batch's tokens that get the KL penalty")
    ppo_kl_coef: NonNegativeFloat = key(1.0, "kl_cov: weight of that penalty")
    dro_beta: PositiveFloat = key(0.1, "dro: weight of the squared log-ratio")
    opsm_delta: PositiveFloat | None = key(None, "off-policy sequence masking: no gradient from tokens of negative advantage in a response whose mean of old_log_probs - log_probs exceeds this, such as 1e-4; null = off")
    entropy_coeff: NonNegativeFloat = key(0.0, "weight of the entropy bonus")
    use_kl_loss: StrictBool = key(False, "add kl_loss_coef x KL(policy, reference) to the loss; builds a reference")
    kl_loss_coef: NonNegativeFloat = key(0.001, "weight of the KL loss", read_if=HAS_KL_LOSS)
    kl_loss_type: KLKind = key("k3", "KL estimator of the loss; k1+ and k3+ have k2's gradient; full = over the whole vocabulary", read_if=HAS_KL_LOSS)
    kl_loss_unbiased: StrictBool = key(False, "weight the KL loss of k1 or k3 by the ratio to the policy before the update, which makes its gradient unbiased", read_if=HAS_KL_LOSS)
    target_kl: PositiveFloat | None = key(None, "skip the remaining mini-batches and epochs of a step once actor/ppo_kl of one exceeds this; null = off")

    @property
    def method(self) -> PolicyLoss:
        """Entry of policy_loss: what it reads and needs."""
        return POLICY_LOSSES[self.policy_loss]

    def contradictions(self) -> Iterator[str]:
        if self.kl_loss_unbiased and self.use_kl_loss and self.kl_loss_type not in ("k1", "k3", "kl", "low_var_kl"):
            yield f"actor.kl_loss_unbiased true needs actor.kl_loss_type k1 or k3, found {self.kl_loss_type}: choose k3"
        name = "clip_ratio" if self.clip_ratio_low is None else "clip_ratio_low"
        low = getattr(self, name)
        if self.policy_loss in ("clip", "gspo", "clip_cov") and low >= 1:
            yield f"actor.{name} {low} must be below 1: lower it, as the ratio is clipped to 1 - {name}"
        if self.policy_loss == "clip_cov" and self.clip_cov_lb >= self.clip_cov_ub:
            yield f"actor.clip_cov_lb {self.clip_cov_lb} must be below actor.clip_cov_ub {self.clip_cov_ub}: lower it"


class Critic(Trained):
    model_path: ModelPath | None = key(None, "Hugging Face folder, or id in the local cache, of a language or reward model that the critic starts from; null = model.path")
    value_clip: PositiveFloat | None = key(0.5, "clip new values to old values +- this in the value loss; null = off")
    huber_delta: PositiveFloat | None = key(None, "Huber value loss: linear beyond this error; null = squared error")
    warmup_steps: NonNegative = key(0, "first PPO steps, in which only the critic trains")
    freeze: Annotated[tuple[ParameterGroup, ...], LISTED] = key((), "parameters that stay as they were loaded: embedding, attention, mlp (with experts and their router); they have no gradients and no optimizer state. The norms before them and the value head are always trained")

    def contradictions(self) -> Iterator[str]:
        if self.freeze and self.lora is not None:
            yield f"critic.freeze {', '.join(self.freeze)} has no effect on critic.lora, which trains adapters: drop one"


class Placement(Section):
    actor: Ranks = key("all", "ranks of the actor: 'all', '0-7', '0,2', '0-3,6' (inclusive)")
    critic: Ranks = key("all", "ranks of the critic")
    ref: Ranks | None = key(None, "ranks of the reference; null = the actor's", read_if=HAS_REFERENCE)
    reward_model: Ranks | None = key(None, "ranks of the reward model; null = the actor's", read_if=HAS_REWARD_MODEL)
    rollout: Ranks = key("all", "ranks whose GPUs the SGLang engines use, the actor's or others")


class Profile(Section):
    steps: tuple[Positive, ...] = key((), "steps in which torch's profiler writes a trace to output_dir/profile, and on a GPU a snapshot of its memory; they take longer than others")
    ranks: tuple[NonNegative, ...] = key((0,), "ranks that are profiled", read_if=PROFILES)


class Trainer(Section):
    output_dir: FilePath = key(..., "folder for config.yaml, metrics.jsonl, tensorboard/, checkpoints/, rollouts/")
    total_steps: Positive = key(100, "PPO steps")
    seed: NonNegative = key(0, "seeds data order, value head and sampling")
    save_interval: NonNegative = key(20, "steps between checkpoints, besides the one at the end; 0 = at the end only")
    async_save: StrictBool = key(True, "continue training while a checkpoint is written; from the first save on, a copy of what is saved stays in host memory")
    keep_checkpoints: NonNegative = key(2, "newest checkpoints to keep; 0 = all")
    keep_every: NonNegative = key(0, "also keep the checkpoints of steps that this divides; 0 = none", read_if=(SAVES_BETWEEN, DELETES_CHECKPOINTS))
    eval_interval: NonNegative | None = key(None, "steps between evaluations on data.val_files and eval.datasets, besides those before the first step and after the last; 0 = off; null = 10 if there are any")
    resume: Literal["auto", "never"] = key("auto", "auto: resume from output_dir's newest checkpoint; never: refuse a folder that has one")
    export_hf: StrictBool = key(True, "write the actor as a Hugging Face folder (hf_actor/) at the end")
    num_samples: NonNegative = key(4, "prompts of each held-out data set whose responses are kept per evaluation", read_if=HAS_HELD_OUT)
    print_samples: NonNegative = key(2, "kept responses that are printed at the start of each evaluation, of its first data set; 0 = none", read_if=HAS_HELD_OUT)
    console_fields: Texts = key(CONSOLE_FIELDS, "columns of the line that is printed after each step: these, or any metric by its name (docs/metrics.md)")
    stop_on: Annotated[tuple[HealthRule, ...], LISTED] = key((), "rules of docs/metrics.md#health that end the run, with everything saved and exit code 5, in the step in which one begins to hold; the others are reported")
    max_bad_steps: NonNegative = key(3, "optimizer steps in a row that may be skipped because loss or gradients are not finite, with their rows kept in bad_steps/; one more ends the run")
    time_limit: PositiveFloat | None = key(None, "seconds that the job may take, from the start of its allocation; the run saves and ends before; null = SLURM's limit, else none")
    grace_seconds: NonNegativeFloat = key(120.0, "seconds before the limit at which the run begins to save; with async_save two saves must fit, as one may be running")
    loggers: FilePaths = key(("tensorboard",), "trackers that get metrics, samples, checkpoints and the end of the run: tensorboard, wandb, mlflow, swanlab, trackio, FILE.py:CLASS")
    keep_rollouts: NonNegative | None = key(None, "keep up to 64 rows of the training rollouts of step 1, of steps that this divides and of the last one in rollouts/step_XXXXXXXX.parquet: texts, scores, and each token's log-probs, value and advantage; 0 = off; null = with each evaluation, or every 10 steps without evaluations")
    record_rollouts: FilePath | None = key(None, "folder for a file with each step's rollouts (tokens, log-probs, scores); tools/show_rollouts.py shows them")
    replay_rollouts: FilePath | None = key(None, "folder of such files to train on, instead of starting engines")
    profile: Profile = key(Profile(), "where the time of a step goes, operator by operator")
    rollout_only: StrictBool = key(False, "record rollouts of model.path's weights, without training")
    eval_only: StrictBool = key(False, "evaluate once and train nothing: output_dir's newest checkpoint, or model.path if there is none")
    eval_checkpoint: FilePath | None = key(None, "eval_only: checkpoint to evaluate instead of output_dir's newest, a folder step_XXXXXXXX of any run of the same model", read_if=ONLY_EVALUATES)
    extensions: FilePaths = key((), "Python files that every rank runs before it reads the config; they register your own methods, families, components, transports and metrics")
    process_group_timeout_seconds: PositiveFloat = key(1800.0, "timeout of a collective; a longer wait ends the run")
    hang_timeout_seconds: PositiveFloat | None = key(None, "time without a heartbeat of any rank after which the run logs the ranks' stacks and ends; null = half of process_group_timeout_seconds")

    def contradictions(self) -> Iterator[str]:
        modes = [name for name in ("eval_only", "rollout_only", "replay_rollouts") if getattr(self, name)]
        if len(modes) > 1:
            yield f"trainer.{' and trainer.'.join(modes)} exclude each other: drop one"
        if self.rollout_only and not (self.record_rollouts or self.eval_only):
            yield "trainer.rollout_only without trainer.record_rollouts keeps nothing: name a folder for the rollouts"
        if self.record_rollouts and (self.eval_only or self.replay_rollouts):
            yield "trainer.record_rollouts needs rollouts, without trainer.eval_only and trainer.replay_rollouts: drop it"
        if late := [step for step in self.profile.steps if step > self.total_steps]:
            yield f"trainer.profile.steps {late[0]} is after trainer.total_steps {self.total_steps}: choose another"
        if self.time_limit is not None and self.time_limit <= self.grace_seconds:
            yield (
                f"trainer.time_limit {self.time_limit:g} is not above trainer.grace_seconds {self.grace_seconds:g}, so "
                "that no step would begin: raise it, or lower that"
            )


class Config(Section):
    """A whole run. The YAML's top-level keys are the sections."""

    model: Model = key(..., "the model all components start from")
    placement: Placement = key(Placement(), "which component lives on which ranks (torchrun's global ranks, one per GPU)")
    actor: Actor = key(Actor(), "the policy")
    critic: Critic = key(Critic(), "the value model", read_if=(HAS_CRITIC, HAS_VALUES))
    ref: Ref = key(Ref(), "the frozen reference policy of the KL penalty", read_if=HAS_REFERENCE)
    reward_model: RewardModel = key(RewardModel(), "a reward model that the run loads", read_if=HAS_REWARD_MODEL)
    rollout: Rollout = key(Rollout(), "sampling and the SGLang engines")
    data: Data = key(..., "prompts")
    reward: Reward = key(Reward(), "scoring of responses")
    algorithm: Algorithm = key(Algorithm(), "advantages and KL")
    eval: Eval = key(Eval(), "evaluations")
    trainer: Trainer = key(..., "the run")

    _sources: Sources = PrivateAttr(default_factory=Sources)

    @model_validator(mode="before")
    @classmethod
    def _score_by_the_reward_model(cls, values: Any) -> Any:
        """Set reward.function to null, if it is not set and there is a reward model."""
        if not isinstance(values, dict):
            return values
        model, reward = values.get("reward_model"), values.get("reward", {})
        if isinstance(model, dict) and model.get("model_path") is not None and isinstance(reward, dict):
            return values | {"reward": {"function": None} | reward}
        return values

    def model_post_init(self, context: Any) -> None:
        """Remember where the values were written, if they are validated with their `Sources` as context."""
        if isinstance(context, Sources):
            self._sources = context

    def located(self, errors: Iterable[str]) -> list[str]:
        """Put the file and line of the first key that an error names, and that was set, before each error."""
        return [printable(self._sources.located(error)) for error in errors]

    def overrides(self, key: str, others: tuple[str, ...]) -> bool:
        """Return whether a source that overrides the one of this key sets one of the others."""
        return self._sources.overrides(key, others)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add files and lines to a ConfigError raised inside."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(*self.located(error.errors)) from error

    def changed(self, key: str, value: object) -> Self:
        """Return the same config with another value, of the key's type, for one dotted key.

        A config without such a key stays as it is: components that people register may have their settings elsewhere.
        """
        section, _, name = key.rpartition(".")
        try:
            owner = attrgetter(section)(self) if section else self
        except AttributeError:
            return self
        changed = owner.model_copy(update={name: value})
        return self.changed(section, changed) if section else changed

    @property
    def has_values(self) -> bool:
        """True if the estimator needs values."""
        return self.algorithm.method.needs_values

    @property
    def compares_responses(self) -> bool:
        """True if the estimator, or the normalisation of scores, compares the responses to a prompt."""
        return self.algorithm.method.compares_responses or self.reward.normalize == "group"

    @property
    def has_critic(self) -> bool:
        """True if a model of its own, the critic, gives the values."""
        return self.has_values and not self.algorithm.shared_backbone

    @property
    def has_reward_model(self) -> bool:
        """True if a model scores responses."""
        return self.reward_model.model_path is not None

    @property
    def eval_interval(self) -> int:
        """Steps between evaluations; 0 for none."""
        chosen = self.trainer.eval_interval
        if chosen is None:
            return EVAL_INTERVAL if self.held_out_names else 0
        return chosen

    @property
    def evaluates(self) -> bool:
        """True if the run ever evaluates."""
        return self.trainer.eval_only or (self.eval_interval > 0 and not self.trainer.rollout_only)

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """Name under which each held-out data set is reported; see `eval_sets`."""
        return (*self.data.val_names, *self.eval.datasets)

    @property
    def plays_episodes(self) -> bool:
        """True if responses, in training or on a held-out data set, are episodes."""
        has_own = any(one.environment not in (None, NONE) for one in self.eval.datasets.values())
        return has_own or self.offers_tools or self.rollout.has_environment

    @property
    def offers_tools(self) -> bool:
        """True if the policy has tools, in training or on a held-out data set."""
        return bool(self.rollout.tools) or any(one.tools for one in self.eval.datasets.values())

    @property
    def replays(self) -> bool:
        """True if the run trains on recorded rollouts."""
        return self.trainer.replay_rollouts is not None and not self.trainer.eval_only

    @property
    def hang_timeout_seconds(self) -> float:
        """Seconds without a heartbeat of any rank after which the run ends."""
        return self.trainer.hang_timeout_seconds or self.trainer.process_group_timeout_seconds / 2

    @property
    def absences(self) -> tuple[str, ...]:
        """Critic and evaluation, if the run does without them, and the keys that decide: a line each."""
        if self.trainer.eval_only:
            return ()
        lines = []
        if not self.has_critic:
            lines.append(f"critic: none (algorithm.adv_estimator {self.algorithm.adv_estimator})")
        if not self.evaluates:
            lines.append("evaluation: none (data.val_files, eval.datasets, trainer.eval_interval, trainer.rollout_only)")
        return tuple(lines)

    @property
    def proves_weights(self) -> bool:
        """True if the first sync is compared with the weights that the engines had loaded.

        Adapters are compared as they are sent. The weights beside them would not be sent again after they were
        overwritten.
        """
        return self.rollout.sync.verify and self.actor.lora is None

    @property
    def kl_kinds(self) -> tuple[str, ...]:
        """Estimators of the KL to the reference that the run uses; without any it builds no reference."""
        penalty = (self.algorithm.kl_penalty,) if self.algorithm.use_kl_in_reward else ()
        return penalty + ((self.actor.kl_loss_type,) if self.actor.use_kl_loss else ())
