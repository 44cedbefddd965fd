"""Every key that a run's YAML may hold, with its type, default and meaning. Immutable once loaded."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, StrictBool, model_validator

from megappo.config.config_error import ConfigError, Errors, printable
from megappo.config.methods import POLICY_LOSSES, VALUE_LOSSES, PolicyLoss, ValueLoss
from megappo.config.model_sections import FrozenPolicy, Lora, RewardModel, Teacher, Trained
from megappo.config.recipes import OF_PPO, RECIPES, Recipe
from megappo.config.sections import (
    HAS_VALUES,
    NONE,
    Algorithm,
    Data,
    Distillation,
    Eval,
    Model,
    Reward,
    Rollout,
)
from megappo.config.sources import Sources
from megappo.config.trainer_section import EVAL_INTERVAL, TRAINS_CRITIC_ALONE, Trainer
from megappo.config.values import (
    LISTED,
    MOST_CRITICS,
    NUMBER,
    AboveOne,
    FilePath,
    Float,
    Fraction,
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
    TableName,
    key,
)

HAS_CRITIC = ReadIf(
    "algorithm.adv_estimator",
    lambda config: config.has_critic,
    "this run builds no critic",
    others=("algorithm.shared_backbone",),
    always=(
        *("value_loss", "value_bins", "value_range", "hl_gauss_width"),
        *("value_clip", "huber_delta", "loss_agg_mode"),
    ),
)
HAS_REFERENCE = ReadIf(
    "algorithm.use_kl_in_reward",
    lambda config: config.kl_kinds,
    "{} and actor.use_kl_loss are false, so that no reference is built",
    others=("actor.use_kl_loss", "trainer.train"),
)
REFERENCE_DIFFERS = ReadIf(
    "trainer.train", lambda config: config.trains_actor or config.kl_kinds, "{} leaves the actor as the reference is"
)
TRAINS_CRITIC = ReadIf(
    "trainer.train", lambda config: "critic" in config.trainer.train, "{} leaves the critic as it is"
)
HAS_TEACHERS = ReadIf("teachers", lambda config: config.teachers, "{} names none")
HAS_REWARD_MODEL = ReadIf(
    "reward_model.model_path",
    lambda config: config.has_reward_model or config.recipe.trains == "reward_model",
    others=("trainer.kind",),
    always=("model_path",),
)
HAS_KL_LOSS = ReadIf("actor.use_kl_loss")
ONE_CLIP_RATIO = ReadIf(
    "actor.clip_ratio_low",
    lambda config: config.actor.clip_ratio_low is None or config.actor.clip_ratio_high is None,
    "{} and actor.clip_ratio_high are set",
    others=("actor.clip_ratio_high",),
)
TRAINS_ACTOR = ReadIf(
    "trainer.train",
    lambda config: config.trains_actor,
    "{} leaves the actor as it is",
    always=("parallel", "max_tokens_per_micro_batch", "offload", "lora"),
)


class Actor(Trained):
    method_key = "policy_loss"
    methods = POLICY_LOSSES

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
    positive_nll_coef: NonNegativeFloat = key(0.0, "weight of the negative log-likelihood of correct responses (VAPO), which have a score above 0 before it is shaped; 0 = off")
    use_kl_loss: StrictBool = key(False, "add kl_loss_coef x KL(policy, reference) to the loss; builds a reference")
    kl_loss_coef: NonNegativeFloat = key(0.001, "weight of the KL loss", read_if=HAS_KL_LOSS)
    kl_loss_type: KLKind = key("k3", "KL estimator of the loss; k1+ and k3+ have k2's gradient; full = over the whole vocabulary", read_if=HAS_KL_LOSS)
    kl_loss_unbiased: StrictBool = key(False, "weight the KL loss of k1 or k3 by the ratio to the policy before the update, which makes its gradient unbiased", read_if=HAS_KL_LOSS)
    target_kl: PositiveFloat | None = key(None, "skip the remaining mini-batches and epochs of a step once actor/ppo_kl of one exceeds this; null = off")

    @property
    def method(self) -> PolicyLoss:
        """Entry of policy_loss: what it reads and needs."""
        return POLICY_LOSSES[self.policy_loss]

    def contradictions(self) -> Errors:
        if self.kl_loss_unbiased and self.use_kl_loss and self.kl_loss_type not in ("k1", "k3", "kl", "low_var_kl"):
            yield f"actor.kl_loss_unbiased true needs actor.kl_loss_type k1 or k3, found {self.kl_loss_type}: choose k3"
        name = "clip_ratio" if self.clip_ratio_low is None else "clip_ratio_low"
        low = getattr(self, name)
        if self.policy_loss in ("clip", "gspo", "clip_turn", "clip_cov") and low >= 1:
            yield f"actor.{name} {low} must be below 1: lower it, as the ratio is clipped to 1 - {name}"
        if self.policy_loss == "clip_cov" and self.clip_cov_lb >= self.clip_cov_ub:
            yield f"actor.clip_cov_lb {self.clip_cov_lb} must be below actor.clip_cov_ub {self.clip_cov_ub}: lower it"


class Gate(Section):
    explained_variance: Annotated[float, Field(lt=1), NUMBER] = key(..., "share of the variance of held-out returns that the critic must explain")
    patience: Positive | None = key(None, "evaluations in a row without a new best that end the run, too; null = train to trainer.total_steps")


class Critic(Trained):
    method_key = "value_loss"
    methods = VALUE_LOSSES

    model_path: ModelPath | None = key(None, "Hugging Face folder, or id on the hub, of a language model, a reward model or a critic that the critic starts from; a head with other outputs than critic.value_loss gives is replaced by a new one; null = model.path")
    dist_checkpointing_path: FilePath | None = key(None, "folder of the critic's initial weights, as model.dist_checkpointing_path; a language model in it gets a new value head; null = the weights of critic.model_path, or of the actor")
    value_loss: Annotated[str, OneOf(VALUE_LOSSES)] = key("mse", "error of values to returns. mse and huber train one number per token; hl_gauss and two_hot a distribution over classes, whose mean is the value; quantile quantiles. Unset, huber_delta alone chooses huber")
    value_clip: PositiveFloat | None = key(0.5, "mse, huber: clip new values to old values +- this in the value loss; null = off")
    huber_delta: PositiveFloat | None = key(None, "huber, quantile: the loss is linear beyond this error; null = 1 for huber, 0.01 for quantile, which needs it far below the range of the returns")
    value_bins: Annotated[int, Field(ge=2, le=2**16), NUMBER] = key(101, "hl_gauss, two_hot: classes; quantile: quantiles")
    value_range: tuple[Float, Float] | None = key(None, "hl_gauss, two_hot: values of the first and the last class, between which the others are spaced evenly; returns beyond count as these. null = the bounds of the shaped scores, if the run knows them and has no KL in the rewards")
    hl_gauss_width: PositiveFloat = key(0.75, "hl_gauss: standard deviation of the Gaussian around a return, in distances between classes")
    ensemble: Annotated[int, Field(ge=1, le=MOST_CRITICS), NUMBER] = key(1, "critics that divide the responses to each prompt among themselves to train on; the value is their mean (AsyPPO)", read_if=TRAINS_CRITIC)
    warmup_steps: NonNegative = key(0, "first PPO steps, in which only the critic trains", read_if=TRAINS_ACTOR)
    gate: Gate | None = key(None, "trainer.train [critic]: end the run as soon as an evaluation reaches this; null = train to trainer.total_steps", read_if=TRAINS_CRITIC_ALONE)
    freeze: Annotated[tuple[ParameterGroup, ...], LISTED] = key((), "parameters that stay as they were loaded: embedding, attention, mlp (with experts and their router); they have no gradients and no optimizer state. The norms before them and the value head are always trained")

    @model_validator(mode="before")
    @classmethod
    def _choose_huber(cls, values: Any) -> Any:
        """Set value_loss to huber, if it is not set and huber_delta is."""
        if isinstance(values, dict) and values.get("huber_delta") is not None:
            return {"value_loss": "huber"} | values
        return values

    @property
    def has_own_weights(self) -> bool:
        """True if it starts from other weights than the actor."""
        return bool(self.model_path or self.dist_checkpointing_path)

    @property
    def method(self) -> ValueLoss:
        """Entry of value_loss: what it reads, and what its head gives."""
        return VALUE_LOSSES[self.value_loss]

    def contradictions(self) -> Errors:
        if self.value_range is not None and self.value_range[0] >= self.value_range[1]:
            yield f"critic.value_range {list(self.value_range)}: the first value must be below the last: exchange them"
        if self.freeze and self.lora is not None:
            yield f"critic.freeze {', '.join(self.freeze)} has no effect on critic.lora, which trains adapters: drop one"


class Placement(Section):
    actor: Ranks = key("all", "ranks of the actor: 'all', '0-7', '0,2', '0-3,6' (inclusive)")
    critic: Ranks = key("all", "ranks of the critic")
    ref: Ranks | None = key(None, "ranks of the reference; null = the actor's", read_if=(REFERENCE_DIFFERS, HAS_REFERENCE))
    reward_model: Ranks | None = key(None, "ranks of the reward model; null = the actor's", read_if=HAS_REWARD_MODEL)
    rollout: Ranks = key("all", "ranks whose GPUs the SGLang engines use, the actor's or others")


class Config(Section):
    """A whole run. The YAML's top-level keys are the sections."""

    model: Model = key(..., "the model all components start from")
    placement: Placement = key(Placement(), "which component lives on which ranks (torchrun's global ranks, one per GPU)")
    actor: Actor = key(Actor(), "the policy", read_if=TRAINS_ACTOR)
    critic: Critic = key(Critic(), "the value model", read_if=(HAS_CRITIC, HAS_VALUES))
    ref: FrozenPolicy = key(FrozenPolicy(), "the frozen reference policy of the KL penalty, by default the initial actor", read_if=(REFERENCE_DIFFERS, HAS_REFERENCE))
    teachers: dict[TableName, Teacher] = key({}, "frozen models that train the actor by their log-probs of its responses: name -> model, layout, rows")
    reward_model: RewardModel = key(RewardModel(), "a reward model that the run loads, or trains", read_if=HAS_REWARD_MODEL)
    rollout: Rollout = key(Rollout(), "sampling and the SGLang engines")
    data: Data = key(..., "prompts, or examples")
    reward: Reward = key(Reward(), "scoring of responses")
    distillation: Distillation = key(Distillation(), "what teachers' log-probs do", read_if=HAS_TEACHERS)
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
        model = values.get("reward_model")
        reward = values.get("reward", {})
        if isinstance(model, dict) and model.get("model_path") is not None and isinstance(reward, dict):
            return values | {"reward": {"function": None} | reward}
        return values

    def model_post_init(self, context: Any) -> None:
        """Remember where the values were written, if they are validated with their `Sources` as context."""
        if isinstance(context, Sources):
            self._sources = context

    def located(self, errors: Iterable[str]) -> list[str]:
        """Put the file and line of the first key that an error names, and that was set, before each error."""
        return [type(error)(printable(self._sources.located(error))) for error in errors]

    def overrides(self, key: str, others: tuple[str, ...]) -> bool:
        """Return whether a source that overrides the one of this key sets one of the others."""
        return self._sources.overrides(key, others)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Add files and lines to a ConfigError that is raised while the block runs."""
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
            owner = self.value_at(section)
        except (AttributeError, KeyError):
            return self
        changed: Any = {**owner, name: value} if isinstance(owner, Mapping) else owner.model_copy(update={name: value})
        return self.changed(section, changed) if section else changed

    def value_at(self, key: str) -> Any:
        """Return the value of a dotted key, or of a section; "" is the whole config.

        Raises:
            AttributeError, KeyError: there is no such key.
        """
        value: Any = self
        for name in key.split(".") if key else ():
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        return value

    @property
    def recipe(self) -> Recipe:
        """The kind of run."""
        trainer = self.trainer
        if trainer.kind != "ppo":
            return RECIPES[trainer.kind]
        if trainer.eval_only:
            return OF_PPO["evaluate"]
        if trainer.rollout_only:
            return OF_PPO["record"]
        return RECIPES["ppo"] if self.trains_actor else OF_PPO["critic"]

    @property
    def initial_weights(self) -> str:
        """Folder of the policy's initial weights."""
        return self.model.dist_checkpointing_path or self.model.path

    @property
    def rows_together(self) -> int:
        """Rows that stay in one micro-batch: the two of a pair."""
        return 2 if self.recipe.has_pairs else 1

    @property
    def rows_per_prompt(self) -> int:
        """Rows of a step for each of data.train_batch_size."""
        return self.rollout.n if self.recipe.has_rollouts else self.rows_together

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
            return EVAL_INTERVAL if self.held_out_names or self.trainer.replay_held_out else 0
        return chosen

    @property
    def evaluates(self) -> bool:
        """True if the run ever evaluates."""
        return not self.recipe.has_steps or (self.eval_interval > 0 and bool(self.recipe.trains))

    @property
    def held_out_names(self) -> tuple[str, ...]:
        """Name under which each held-out data set is reported; see `eval_sets`."""
        return (*self.data.val_names, *self.eval.datasets)

    @property
    def plays_episodes(self) -> bool:
        """True if responses, in training or on a held-out data set, are episodes."""
        has_own = any(one.environment not in (None, NONE) for one in self.eval.datasets.values())
        return has_own or self.offers_tools or self.runs_agents or self.rollout.has_episodes

    @property
    def runs_agents(self) -> bool:
        """True if agents play episodes, in training or on a held-out data set."""
        return self.rollout.has_agent or any(one.agent for one in self.eval.datasets.values())

    @property
    def offers_tools(self) -> bool:
        """True if the policy has tools, in training or on a held-out data set."""
        return bool(self.rollout.tools) or any(one.tools for one in self.eval.datasets.values())

    @property
    def replays(self) -> bool:
        """True if the run trains on recorded rollouts."""
        return self.trainer.replay_rollouts is not None and self.recipe.has_steps and self.recipe.has_rollouts

    @property
    def samples(self) -> bool:
        """True if engines sample rollouts: the run reads neither recorded ones nor examples."""
        return self.recipe.has_rollouts and not self.replays

    @property
    def starts_engines(self) -> bool:
        """True if the engines that sample are the run's own, on its GPUs."""
        return self.samples and not self.rollout.engines

    @property
    def trains_actor(self) -> bool:
        """True if trainer.kind is of the actor, and trainer.train names it."""
        return RECIPES[self.trainer.kind].trains == "actor" and "actor" in self.trainer.train

    @property
    def hang_timeout_seconds(self) -> float:
        """Seconds without a heartbeat of any rank after which the run ends."""
        return self.trainer.hang_timeout_seconds or self.trainer.process_group_timeout_seconds / 2

    @property
    def absences(self) -> tuple[str, ...]:
        """Critic, training of the actor and evaluation, if the run does without them, and the keys that decide: a line
        each."""
        if not self.recipe.has_steps:
            return ()
        lines = []
        if self.recipe.trains == "critic":
            is_absent = "not trained" if self.samples else "none"
            keys = "trainer.train" if self.recipe.has_rollouts else "trainer.kind"
            lines.append(f"actor: {is_absent} ({keys}{', trainer.replay_rollouts' if self.replays else ''})")
        if self.recipe.names("critic") and not self.has_critic:
            lines.append(f"critic: none (algorithm.adv_estimator {self.algorithm.adv_estimator})")
        if not self.evaluates:
            lines.append("evaluation: none (data.val_files, eval.datasets, trainer.eval_interval, trainer.rollout_only)")
        return tuple(lines)

    @property
    def sent_lora(self) -> Lora | None:
        """The adapters that engines get and apply; None if they get the actor's weights."""
        return None if self.rollout.sync.merge_adapters else self.actor.lora

    @property
    def kl_kinds(self) -> tuple[str, ...]:
        """Estimators of the KL to the reference that the run uses; without any it builds no reference.

        An actor that is not trained is the reference: the KL is 0. Recorded rollouts may be another policy's, whose
        log-probs are the engines'.
        """
        is_reference = not self.trains_actor and not (self.replays and self.algorithm.old_log_probs == "engine")
        if is_reference and self.ref.is_initial_actor:
            return ()
        penalty = (self.algorithm.kl_penalty,) if self.algorithm.use_kl_in_reward else ()
        return penalty + ((self.actor.kl_loss_type,) if self.actor.use_kl_loss and self.trains_actor else ())

    @property
    def penalizes_kl(self) -> bool:
        """True if the rewards have a KL penalty."""
        return self.algorithm.use_kl_in_reward and bool(self.kl_kinds)

    @property
    def distilled_at(self) -> str:
        """distillation.signal, if the run has teachers; "" if it has none."""
        return self.distillation.signal if self.teachers else ""

    @property
    def full_kl_model(self) -> str | None:
        """The key of the model whose logits the actor's head compares with its own, for a KL of kind full."""
        if "full" in self.kl_kinds:
            return "ref"
        of_teachers = self.teachers and self.distillation.kl_kind == "full"
        return f"teachers.{next(iter(self.teachers))}" if of_teachers else None

    @property
    def has_full_kl(self) -> bool:
        """True if rows need a KL of kind full before the update."""
        of_penalty = self.penalizes_kl and self.algorithm.kl_penalty == "full"
        return of_penalty or (self.distilled_at in ("reward", "advantage") and self.distillation.kl_kind == "full")

    @property
    def old_log_probs(self) -> str:
        """The source of old log-probs: algorithm.old_log_probs. A critic alone reads the engines'. "update" = the pass of
        the actor's only update of a step, in place of a pass of their own."""
        if self.recipe.trains == "critic":
            return "engine"
        algorithm = self.algorithm
        updates_by_ppo = self.recipe.names("algorithm") and self.trains_actor
        has_one_update = updates_by_ppo and self.actor.num_updates(self.data.train_batch_size) == 1
        needs_pass = (
            self.penalizes_kl
            or self.distilled_at in ("reward", "advantage")
            or algorithm.method.needs_old_log_probs
            or algorithm.rollout_correction.is_on
            or algorithm.shared_backbone  # the pass has the values, too
            or self.critic.warmup_steps  # steps without an update
        )
        if algorithm.old_log_probs == "trainer" and has_one_update and not needs_pass:
            return "update"
        return algorithm.old_log_probs
