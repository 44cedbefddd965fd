"""The models of a run on this rank: built from the config, with their Hugging Face weights and their heads."""

from megappo.architecture.architecture import Architecture
from megappo.config.checks import optimizer_steps
from megappo.config.schema import Config, Parallel
from megappo.models.build import ModelChunks, build_model
from megappo.models.heads import policy_head, policy_value_head, value_head
from megappo.models.train_engine import Head, MegatronEngine, TrainedEngine
from megappo.placement.groups import ComponentGroups
from megappo.weights.critic import critic_architecture
from megappo.weights.load import load_hf


def build_engines(
    config: Config, architecture: Architecture, groups: dict[str, ComponentGroups]
) -> dict[str, MegatronEngine | None]:
    """This rank's part of each component of `groups`; None outside a component."""
    engines: dict[str, MegatronEngine | None] = {}
    if "ref" in groups:  # first: an actor's head may look at it
        engines["ref"] = _ref(config, architecture, groups["ref"]) if groups["ref"].member else None
    engines["actor"] = _actor(config, architecture, groups["actor"], engines) if groups["actor"].member else None
    if "critic" in groups:
        engines["critic"] = _critic(config, groups["critic"]) if groups["critic"].member else None
    return engines


def _ref(config: Config, architecture: Architecture, groups: ComponentGroups) -> MegatronEngine:
    parallel = config.ref.parallel or config.actor.parallel
    chunks = _loaded(config, config.model.path, architecture, parallel, groups, None)
    max_tokens = config.ref.max_tokens_per_micro_batch or config.actor.max_tokens_per_micro_batch
    head = policy_head(groups.collection.tp, architecture.vocab_size, config.rollout.temperature)
    return MegatronEngine(chunks, groups, head, max_tokens)


def _actor(
    config: Config, architecture: Architecture, groups: ComponentGroups, engines: dict[str, MegatronEngine | None]
) -> TrainedEngine:
    actor, algorithm = config.actor, config.algorithm
    architecture = architecture.with_head("policy_value" if algorithm.shared_backbone else "policy")
    chunks = _loaded(config, config.model.path, architecture, actor.parallel, groups, actor.recompute)

    def head(needs_full_kl: bool, bootstrap: bool) -> Head:
        reference = engines["ref"].logits if needs_full_kl and engines["ref"] else None
        temperature = config.rollout.temperature
        policy = policy_head(groups.collection.tp, architecture.vocab_size, temperature, reference)
        if architecture.head == "policy":
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
    chunks = _loaded(config, folder, critic_architecture(folder), critic.parallel, groups, critic.recompute)
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
    architecture: Architecture,
    parallel: Parallel,
    groups: ComponentGroups,
    recompute: str | None,
) -> ModelChunks:
    """A model with the folder's weights; without `recompute` it is frozen."""
    chunks = build_model(
        architecture,
        config.model,
        parallel,
        groups,
        recompute=recompute or "none",
        trained=recompute is not None,
    )
    load_hf(chunks, folder, architecture, groups, seed=config.trainer.seed)
    return chunks
