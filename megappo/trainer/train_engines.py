"""The models of a run on this rank: built from the config, with their Hugging Face weights and their heads."""

from typing import Any

from megappo.architecture.families import HeadKind
from megappo.config.checks import optimizer_steps
from megappo.config.schema import Config, Parallel
from megappo.models.build import ModelChunks, build_model
from megappo.models.heads import policy_head, policy_value_head, value_head
from megappo.models.train_engine import Head, MegatronEngine, TrainedEngine
from megappo.placement.groups import ComponentGroups
from megappo.weights.critic import critic_config
from megappo.weights.load import load_hf

HFConfig = dict[str, Any]


def build_engines(
    config: Config, hf_config: HFConfig, groups: dict[str, ComponentGroups]
) -> dict[str, MegatronEngine | None]:
    """This rank's part of each component of `groups`; None outside a component."""
    engines: dict[str, MegatronEngine | None] = {}
    if "ref" in groups:  # first: an actor's head may look at it
        engines["ref"] = _ref(config, hf_config, groups["ref"]) if groups["ref"].member else None
    engines["actor"] = _actor(config, hf_config, groups["actor"], engines) if groups["actor"].member else None
    if "critic" in groups:
        engines["critic"] = _critic(config, groups["critic"]) if groups["critic"].member else None
    return engines


def _ref(config: Config, hf_config: HFConfig, groups: ComponentGroups) -> MegatronEngine:
    parallel = config.ref.parallel or config.actor.parallel
    chunks = _loaded(config, config.model.path, hf_config, parallel, groups, "policy", None)
    max_tokens = config.ref.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
    head = policy_head(groups.collection.tp, hf_config["vocab_size"], config.rollout.temperature)
    return MegatronEngine(chunks, groups, head, max_tokens)


def _actor(
    config: Config, hf_config: HFConfig, groups: ComponentGroups, engines: dict[str, MegatronEngine | None]
) -> TrainedEngine:
    actor, algorithm = config.actor, config.algorithm
    kind: HeadKind = "policy_value" if algorithm.shared_backbone else "policy"
    chunks = _loaded(config, config.model.path, hf_config, actor.parallel, groups, kind, actor.recompute)

    def head(needs_full_kl: bool, bootstrap: bool) -> Head:
        reference = engines["ref"].logits if needs_full_kl and engines["ref"] else None
        temperature = config.rollout.temperature
        policy = policy_head(groups.collection.tp, hf_config["vocab_size"], temperature, reference)
        if kind == "policy":
            return policy
        return policy_value_head(policy, value_head(bootstrap=bootstrap), chunks[-1])

    return TrainedEngine(
        chunks,
        groups,
        head(algorithm.use_kl_in_reward and algorithm.kl_penalty == "full", algorithm.bootstrap_truncated),
        actor.max_tokens_per_micro_batch,
        actor.optim,
        optimizer_steps(config, "actor"),
        loss_head=head(actor.use_kl_loss and actor.kl_loss_type == "full", bootstrap=False),
    )


def _critic(config: Config, groups: ComponentGroups) -> TrainedEngine:
    critic = config.critic
    folder = critic.model_path or config.model.path
    hf_config = critic_config(folder)
    chunks = _loaded(config, folder, hf_config, critic.parallel, groups, "value", critic.recompute)
    return TrainedEngine(
        chunks,
        groups,
        value_head(bootstrap=config.algorithm.bootstrap_truncated),
        critic.max_tokens_per_micro_batch,
        critic.optim,
        optimizer_steps(config, "critic"),
    )


def _loaded(
    config: Config,
    folder: str,
    hf_config: HFConfig,
    parallel: Parallel,
    groups: ComponentGroups,
    head: HeadKind,
    recompute: str | None,
) -> ModelChunks:
    """A model with the folder's weights; without `recompute` it is frozen."""
    chunks = build_model(
        hf_config,
        config.model,
        parallel,
        groups,
        head=head,
        recompute=recompute or "none",
        trained=recompute is not None,
    )
    load_hf(chunks, folder, hf_config, groups, head=head, seed=config.trainer.seed)
    return chunks
