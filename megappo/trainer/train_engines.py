"""The models of a run on this rank: built from the table of components, with their Hugging Face weights and heads."""

from collections.abc import Mapping
from functools import partial

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config
from megappo.models.gpt import build_model
from megappo.models.heads import policy_head, policy_value_head, value_head
from megappo.models.megatron_engine import Head, MegatronEngine
from megappo.models.offload import Offload
from megappo.models.output_layer import output_weight
from megappo.models.train_engine import TrainedEngine
from megappo.placement.components import ComponentSpec, build_order
from megappo.placement.groups import ComponentGroups
from megappo.placement.uses import NOTHING
from megappo.runtime import platform
from megappo.weights.load import critic_architecture, load_hf


def build_engines(
    config: Config, specs: Mapping[str, ComponentSpec], groups: dict[str, ComponentGroups]
) -> tuple[dict[str, MegatronEngine | None], dict[str, Offload]]:
    """This rank's part of each component, None outside a component; and the offloads of those that live here.

    One after another: what of one sleeps does so before the next takes memory.
    """
    engines: dict[str, MegatronEngine | None] = {}
    offloads: dict[str, Offload] = {}
    for name in build_order(specs):
        spec = specs[name]
        reference = engines[spec.reference] if spec.reference is not None else None
        engine = _engine(config, spec, groups[name], reference) if groups[name].member else None
        engines[name] = engine
        if engine is not None:
            offloads[name] = Offload(engine, spec.offload.value)
            offloads[name].rest(NOTHING)
            platform.empty_cache()  # the next one's tensors are of other sizes
    return engines, offloads


def architecture_of(spec: ComponentSpec) -> Architecture:
    """Return the architecture of a component, with its adapters. A value head may start from a reward model."""
    folder = spec.folder.value
    found = critic_architecture(folder) if spec.head == "value" else read_architecture(folder, spec.head)
    return found.with_lora(spec.lora)


def _engine(
    config: Config, spec: ComponentSpec, groups: ComponentGroups, reference: MegatronEngine | None
) -> MegatronEngine:
    architecture, training = architecture_of(spec), spec.training
    chunks = build_model(
        architecture,
        config.model,
        spec.parallel.value,
        groups,
        recompute=training.section.recompute if training else "none",
        trained=training is not None,
    )
    load_hf(chunks, spec.folder.value, architecture, groups, seed=config.trainer.seed)

    def head(full_kl: bool, bootstrap: bool) -> Head:
        value = value_head(bootstrap=bootstrap)
        if spec.head == "value":
            return value
        weight = partial(output_weight, chunks[-1])
        factors = reference.logit_factors if full_kl and reference is not None else None
        policy = policy_head(weight, groups.collection.tp, architecture.vocab_size, config.rollout.temperature, factors)
        return policy if spec.head == "policy" else policy_value_head(policy, value, chunks[-1])

    outputs = spec.forward.fields if spec.forward else {}
    forward_head = head("full_kl" in outputs, "bootstrap_values" in outputs)
    if training is None:
        return MegatronEngine(chunks, groups, forward_head, spec.max_tokens.value)
    return TrainedEngine(
        chunks,
        groups,
        forward_head,
        spec.max_tokens.value,
        training.section.optim,
        training.optimizer_steps(config),
        loss_head=head(training.full_kl, bootstrap=False),
    )
