"""The table of a run's models: their ranks, their folder, their head, their training, and the tensors of them that each
phase needs. Without torch.

Placement, checks, plan, building, checkpoints and the loop iterate over it; `placement.rollout` places the engines.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megappo.architecture.adapter_folder import read_lora
from megappo.architecture.architecture import Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.model_folder import newest_iteration
from megappo.architecture.parsing import read_architecture
from megappo.config.methods import ValueSupport
from megappo.config.model_sections import Learner, Lora, Trained
from megappo.config.schema import Config
from megappo.config.value_support import value_support
from megappo.config.values import CRITICS, ParameterGroup, TensorKind
from megappo.table import Table, resolved

AUTO = "auto"
"""An offload or rollout.sleep that `lab.estimate.fitting.resolve_offload` has yet to decide."""
REWARD_MODEL_KEY = "reward_model.model_path"
WEIGHTS_KEY = "model.dist_checkpointing_path"
VALUE_FIELDS = ("values", "returns")
"""Fields of the rows that a value loss reads."""
DeviceUse = Mapping[TensorKind, bool]
"""Kinds of tensors of a model that must be on the device -> whether they change there."""
READ_WEIGHTS: DeviceUse = {"weights": False}
LOAD: DeviceUse = {"weights": True, "optimizer": True}
"""The use of a model into which a checkpoint is loaded."""
SAVE: DeviceUse = {"weights": False, "optimizer": False}
TRAIN: DeviceUse = {"weights": True, "gradients": True, "optimizer": True}
NOTHING: DeviceUse = {}
READS = ("response_mask",)
OPTIONAL_PHASES = ("old_log_probs", "values", "ref_log_probs", "update_critic")
"""Phases that runs without that forward pass, without a critic, or without a reference policy, do not have."""


class Setting(NamedTuple):
    """A value, and the key that sets it."""

    key: str
    value: Any


NO_WEIGHTS = Setting(WEIGHTS_KEY, None)


def setting(config: Config, *keys: str) -> Setting:
    """Return the first of some keys that is not null."""
    found = (Setting(key, config.value_at(key)) for key in keys)
    return next(one for one in found if one.value is not None)


@dataclass(frozen=True)
class ForwardPass:
    """A component's forward pass over a step's rows.

    Attributes:
        phase: name of its phase.
        fields: output of the head -> field of the rows that it becomes.
    """

    phase: str
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Training:
    """Training of a component.

    Attributes:
        key: key of the config's section.
        settings: the section: config.actor, config.critic or config.reward_model.
        fields: fields of the rows that the loss reads.
        by_ppo: its settings, `Trained`, have mini-batches and epochs; else a step is one optimizer step.
        full_kl: the loss reads the KL to `Component.reference`.
        warmup_steps: first PPO steps, in which the component is not trained.
    """

    key: str
    settings: Learner
    fields: tuple[str, ...]
    full_kl: bool = False
    warmup_steps: int = 0
    by_ppo: bool = True

    @property
    def epochs(self) -> int:
        """Passes over the rows of a step."""
        return self._of_ppo.ppo_epochs if self._of_ppo else 1

    def num_mini_batches(self, num_prompts: int) -> int:
        """Return the mini-batches per epoch of a step with `num_prompts` prompts."""
        return self._of_ppo.num_mini_batches(num_prompts) if self._of_ppo else 1

    @property
    def mini_batch_prompts(self) -> int | None:
        """Prompts of a mini-batch; None for all of a step."""
        return self._of_ppo.ppo_mini_batch_size if self._of_ppo else None

    @property
    def _of_ppo(self) -> Trained | None:
        return self.settings if self.by_ppo and isinstance(self.settings, Trained) else None

    def optimizer_steps(self, config: Config) -> int:
        """Return the optimizer steps of the whole run, without early stops."""
        steps = config.trainer.total_steps - self.warmup_steps
        return steps * self.epochs * self.num_mini_batches(config.data.train_batch_size)


@dataclass(frozen=True)
class ComponentSpec:
    """A model of a run.

    Attributes:
        ranks: its ranks, as text.
        parallel: its layout over them.
        folder: Hugging Face folder of its config and initial weights.
        weights: Megatron folder of its initial weights, in place of the Hugging Face folder's.
        max_tokens: most tokens of a micro-batch.
        head: its outputs per token: the next token's probabilities, a value, or both.
        support: meaning of a value head's outputs; None = one, the value.
        forward: its forward pass in each step; None if it has none of its own.
        training: None for a frozen model.
        lora: its adapters, trained instead of its weights, or loaded from the folder `adapter`.
        frozen: groups of its parameters that are not trained.
        reference: the component whose logits its head compares with its own.
        base: the component whose frozen weights it uses; only adapters and a value head are its own.
        is_evaluated: held-out rows go through it.
        offload: kinds of tensors that are offloaded to the host while no phase needs them; "auto" until
            `lab.estimate.fitting` decides.
        own_rows: it reads rows of its own, possibly of another tokenizer, not the step's.
        scores_pairs: its value head scores rows at their last tokens, and the two rows of a pair stay together.
        reads: fields of the rows that every pass reads; with `expert_choices` its routers take these.
        teacher: the number in the field `teacher` of the rows that it reads; None = all rows.
        member, members: it trains on every `members`-th response of a step, from number `member` on.
    """

    ranks: Setting
    parallel: Setting
    folder: Setting
    max_tokens: Setting
    head: HeadKind
    forward: ForwardPass | None
    training: Training | None = None
    support: ValueSupport | None = None
    lora: Lora | None = None
    adapter: str | None = None
    frozen: tuple[ParameterGroup, ...] = ()
    reference: str | None = None
    base: str | None = None
    is_evaluated: bool = False
    offload: Setting = Setting("", ())
    weights: Setting = NO_WEIGHTS
    own_rows: bool = False
    scores_pairs: bool = False
    reads: tuple[str, ...] = READS
    teacher: int | None = None
    member: int = 0
    members: int = 1

    @cached_property
    def megatron_folder(self) -> Path | None:
        """Checkpoint that `weights` names; None for the weights of `folder`."""
        return newest_iteration(Path(self.weights.value)) if self.weights.value else None

    def mini_batch_prompts(self, config: Config) -> Setting:
        """Return the number of prompts whose trajectories make a mini-batch."""
        size = None if self.training is None else self.training.mini_batch_prompts
        if self.training is None or size is None:
            return setting(config, "data.train_batch_size")
        return Setting(f"{self.training.key}.ppo_mini_batch_size", size)


Specs = dict[str, ComponentSpec]
"""Models of a run by name."""


def _settings(config: Config, name: str, ranks: str = "") -> dict[str, Any]:
    """Return the settings that every component has; a setting that is null, and the starting point, are the actor's.

    Args:
        name: key of its section.
        ranks: key of its ranks, if this is not placement.NAME.
    """
    max_tokens = "max_tokens_per_micro_batch"
    return {
        "ranks": setting(config, ranks or f"placement.{name}", "placement.actor"),
        "parallel": setting(config, f"{name}.parallel", "actor.parallel"),
        "max_tokens": setting(config, f"{name}.{max_tokens}", f"actor.{max_tokens}"),
        "offload": setting(config, f"{name}.offload"),
        "folder": setting(config, "model.path"),
        "weights": Setting(WEIGHTS_KEY, config.model.dist_checkpointing_path),
    }


def _actor(config: Config) -> ComponentSpec:
    actor = config.actor
    algorithm = config.algorithm
    fields = {"log_probs": "old_log_probs"}
    if config.has_full_kl:
        fields["full_kl"] = "full_kl"
    fields |= _values(config) if algorithm.shared_backbone else {}
    return ComponentSpec(
        **_settings(config, "actor"),
        head="policy_value" if algorithm.shared_backbone else "policy",
        support=value_support(config) if algorithm.shared_backbone else None,
        forward=ForwardPass("old_log_probs", fields) if config.old_log_probs == "trainer" else None,
        training=Training(
            "actor",
            actor,
            _actor_fields(config),
            full_kl=_has_full_kl_loss(config),
            warmup_steps=config.critic.warmup_steps,
        ),
        lora=actor.lora,
        reference=None if config.full_kl_model is None else component_name(config.full_kl_model),
        reads=(*READS, "expert_choices") if config.rollout.routing_replay else READS,
    )


def _has_full_kl_loss(config: Config) -> bool:
    of_reference = config.actor.use_kl_loss and config.actor.kl_loss_type == "full"
    return of_reference or (config.distilled_at == "loss" and config.distillation.kl_kind == "full")


def _actor_fields(config: Config) -> tuple[str, ...]:
    """Return the fields that the actor's loss reads."""
    old = {"trainer": ["old_log_probs"], "engine": ["rollout_log_probs"], "update": []}
    fields = [*old[config.old_log_probs], "advantages"]
    if config.actor.use_kl_loss and config.actor.kl_loss_type != "full":
        fields.append("ref_log_probs")
    if config.distilled_at == "loss":
        fields += ["teacher"] if config.distillation.kl_kind == "full" else ["teacher", "teacher_log_probs"]
    if config.algorithm.rollout_correction.is_on:
        fields.append("rollout_is_weights")
    if config.actor.positive_nll_coef:
        fields.append("scores")
    if config.algorithm.mask_disputed:
        fields.append("disputed")
    if config.actor.method.needs_turns:
        fields.append("turns")
    return (*fields, *(VALUE_FIELDS if config.algorithm.shared_backbone else ()))


def _critic(config: Config) -> ComponentSpec | None:
    if not config.has_critic:
        return None
    settings = _settings(config, "critic")
    if config.critic.has_own_weights:
        settings["folder"] = setting(config, "critic.model_path", "model.path")
        settings["weights"] = Setting("critic.dist_checkpointing_path", config.critic.dist_checkpointing_path)
    return ComponentSpec(
        **settings,
        head="value",
        support=value_support(config),
        forward=ForwardPass("values", _values(config)),
        training=Training("critic", config.critic, VALUE_FIELDS),
        lora=config.critic.lora,
        frozen=config.critic.freeze,
    )


def _critics(spec: ComponentSpec | None, size: int) -> Specs:
    """Return the critics: one, or as many as critic.ensemble, equal except for the responses that they train on."""
    if spec is None or size == 1:
        return {} if spec is None else {"critic": spec}
    assert spec.forward is not None and spec.training is not None, "an ensemble is of critics that learn"
    found = {}
    for member, name in enumerate(CRITICS[:size]):
        fields = {output: f"{field}_{member + 1}" for output, field in spec.forward.fields.items()}
        forward = ForwardPass(name.replace("critic", "values"), fields)
        training = replace(spec.training, fields=(fields["values"], "returns"))
        found[name] = replace(spec, forward=forward, training=training, member=member, members=size)
    return found


def _values(config: Config) -> dict[str, str]:
    """Return the outputs of a value head and their fields."""
    bootstrap = {"bootstrap_values": "bootstrap_values"} if config.algorithm.bootstrap_truncated else {}
    return {"values": "values", **bootstrap}


def _ref(config: Config) -> ComponentSpec | None:
    if not config.kl_kinds:
        return None
    is_full = set(config.kl_kinds) == {"full"}
    return _frozen_policy(config, "ref", _settings(config, "ref"), None if is_full else "ref_log_probs")


def _frozen_policy(config: Config, key: str, settings: dict[str, Any], field: str | None) -> ComponentSpec:
    """Return a frozen policy that reads the actor's rows.

    Args:
        key: key of its section.
        settings: see `_settings`.
        field: field of its log-probs; None if the actor's head alone reads it, for a KL of kind full.
    """
    own = config.value_at(key)
    if not own.is_initial_actor:
        settings["folder"] = setting(config, f"{key}.model_path", "model.path")
        settings["weights"] = Setting(f"{key}.dist_checkpointing_path", own.dist_checkpointing_path)
    phase = component_name(key) if key != "ref" else "ref_log_probs"
    return ComponentSpec(
        **settings,
        head="policy",
        forward=None if field is None else ForwardPass(phase, {"log_probs": field}),
        lora=read_lora(own.adapter, settings["folder"], f"{key}.adapter") if own.adapter else None,
        adapter=own.adapter,
    )


def component_name(key: str) -> str:
    """Return the name of the component with the section of this key: teacher_NAME for teachers.NAME."""
    return key.replace("teachers.", "teacher_")


def _teachers(config: Config) -> Specs:
    """Return the teachers in the run. A first one without `when` reads all rows, the others read their own."""
    field = None if config.distillation.kl_kind == "full" else "teacher_log_probs"
    found = {}
    for number, (name, own) in enumerate(config.teachers.items(), 1):
        if own.url:
            continue
        key = f"teachers.{name}"
        spec = _frozen_policy(config, key, _settings(config, key, f"{key}.placement"), field)
        found[component_name(key)] = replace(spec, teacher=number if own.when or number > 1 else None)
    return found


def _reward_model(config: Config) -> ComponentSpec | None:
    if not config.has_reward_model:
        return None
    folder = setting(config, REWARD_MODEL_KEY)
    adapter = config.reward_model.adapter
    return ComponentSpec(
        **_settings(config, "reward_model") | {"folder": folder, "weights": NO_WEIGHTS, "adapter": adapter},
        lora=read_lora(adapter, folder) if adapter else None,
        head="value",
        forward=ForwardPass("reward_model", {"values": "reward_model_token_scores"}),
        own_rows=True,
    )


COMPONENTS: Table[Callable[[Config], ComponentSpec | None]] = Table(
    "component", {"actor": _actor, "critic": _critic, "ref": _ref, "reward_model": _reward_model}
)
"""Functions of the config by component; they return None if a run does not have it."""


def components_of(config: Config) -> Specs:
    """Return the models of a run, by name."""
    return resolved(config.recipe.components)(config)


def of_learner(config: Config) -> Specs:
    """Return the one model of a run that trains it by one optimizer step for each step."""
    recipe = config.recipe
    learner: Learner = getattr(config, recipe.trains)
    training = Training(recipe.trains, learner, ("margins",) if recipe.has_pairs else (), by_ppo=False)
    own: dict[str, Any] = {}  # by the model's own keys, also where they are null and have the actor's defaults
    for name, one in _settings(config, training.key).items():
        own[name] = Setting(one.key.replace("actor", training.key), one.value)
    spec = ComponentSpec(
        **own,
        head="policy" if recipe.trains == "actor" else "value",
        forward=None,
        training=training,
        lora=learner.lora,
        is_evaluated=config.evaluates and not recipe.has_rollouts,
        scores_pairs=recipe.has_pairs,
    )
    return {training.key: spec}


def of_ppo(config: Config) -> Specs:
    """Return actor, critic, reference and reward model, and the models of extensions, as far as the run has them.

    Models that trainer.train does not name are frozen.
    """
    found = _of_table(config)
    for name in {"actor", "critic"} - {*config.trainer.train} & found.keys():
        found[name] = replace(found[name], training=None)
    return _with_bases(found)


def of_critic(config: Config) -> Specs:
    """Return the models of a run that trains a critic alone: its actor only gives the engines its weights."""
    found = of_ppo(config)
    found["actor"] = replace(found["actor"], forward=None, reference=None)
    if config.replays:
        del found["actor"]
    return _with_bases(found)


def of_trajectories(config: Config) -> Specs:
    """Return the critics, the only models of a run on trajectories; nothing if the config has none."""
    return _with_bases(_critics(COMPONENTS["critic"](config), config.critic.ensemble))


def of_evaluation(config: Config) -> Specs:
    """Return the actor, which sends weights and compares log-probs with the engines', and models that score."""
    found = _of_table(config)
    scoring = {name: spec for name, spec in found.items() if spec.own_rows}
    actor = replace(
        found["actor"],
        forward=ForwardPass("old_log_probs", {"log_probs": "old_log_probs"}),
        training=None,
        reference=None,
        offload=Setting("", ()),
    )
    return _with_bases({"actor": actor} | scoring)


def _of_table(config: Config) -> Specs:
    specs = {name: entry(config) for name, entry in COMPONENTS.items()}
    critics = _critics(specs["critic"], config.critic.ensemble)
    return {name: spec for name, spec in specs.items() if spec is not None} | critics | _teachers(config)


def _with_bases(specs: Specs) -> Specs:
    """Share the weights that no model trains between models of one folder, on the same ranks and in the same layout.

    The first of them that has adapters owns the weights. With actor.lora, the reference is thus the actor without its
    adapters.
    """
    found: Specs = {}
    for name, spec in specs.items():
        base = None
        if spec.lora is not None or spec.training is None:
            owners = (owner for owner, other in found.items() if other.lora is not None and other.base is None)
            base = next((owner for owner in owners if _placed_weights(found[owner]) == _placed_weights(spec)), None)
        found[name] = replace(spec, base=base)
    return found


def _placed_weights(spec: ComponentSpec) -> tuple[object, ...]:
    return spec.folder.value, spec.weights.value, spec.ranks.value, spec.parallel.value


def build_order(specs: Specs) -> list[str]:
    """Return names of models in the order of building: a model that has a reference follows it; models that use others'
    weights come last."""
    return sorted(specs, key=lambda name: (specs[name].base is not None, specs[name].reference is not None))


def shared_vocabulary(config: Config) -> int:
    """Return the size of the smallest vocabulary: every model that reads a step's rows knows the token ids below it."""
    folders = {spec.folder.value for spec in components_of(config).values() if not spec.own_rows}
    return min(read_architecture(folder, head="value").vocab_size for folder in folders)


def policy_folders(config: Config) -> dict[str, str]:
    """Return key -> folder of the language models, other than model.path, that read the actor's tokens."""
    folders = [spec.folder for spec in components_of(config).values() if spec.head == "policy"]
    return {key: folder for key, folder in folders if key != "model.path"}


def replayed_policy(config: Config) -> Architecture | None:
    """Return the policy if its routing is replayed."""
    return read_architecture(config.model.path) if config.rollout.routing_replay else None


def uses_of(specs: Specs) -> dict[str, dict[str, DeviceUse]]:
    """Return phase -> component -> its use; phases that use no component are left out."""
    uses: dict[str, dict[str, DeviceUse]] = defaultdict(dict)
    for name, spec in specs.items():
        reference = {spec.reference: READ_WEIGHTS} if spec.reference else {}
        if spec.forward is not None:
            uses[spec.forward.phase] |= {name: READ_WEIGHTS} | (reference if "full_kl" in spec.forward.fields else {})
        if spec.training is not None:
            uses[f"update_{name}"] |= {name: TRAIN} | (reference if spec.training.full_kl else {})
            uses["save"][name] = SAVE
        if spec.is_evaluated:
            uses["evaluate"][name] = READ_WEIGHTS
    if "actor" in specs:
        uses["sync"]["actor"] = READ_WEIGHTS
    for name in exported(specs):
        uses["export"][name] = READ_WEIGHTS
    for use in uses.values():
        for name in list(use):
            if base := specs[name].base:
                use.setdefault(base, READ_WEIGHTS)
    return uses


def exported(specs: Specs) -> tuple[str, ...]:
    """Return the models that a run writes as Hugging Face folders at its end: the trained ones; the first one if none
    is trained."""
    names = [name for name in ("actor", *CRITICS, "reward_model") if name in specs]
    trained = [name for name in names if specs[name].training is not None]
    return tuple(trained or names[:1])
