"""The models of a run, what a step of PPO does with them, and the phases of a step.

All ranks exchange rows together, before and after passes; `forward` and `update` wait for no rank of another component.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Batch, Exchange
from megappo.batch.images import ImageSource
from megappo.batch.packing import PackedBatch
from megappo.checkpoint.checksums import refuse_damaged
from megappo.checkpoint.component_folder import has_value_bias, load_initial
from megappo.checkpoint.metadata import read_component
from megappo.config.schema import Config
from megappo.data.tokenizer import load_tokenizer, padding_token
from megappo.models.gpt import build_model
from megappo.models.heads import output_weight, policy_head, policy_value_head, value_head
from megappo.models.megatron_engine import Head, MegatronEngine, Outputs
from megappo.models.offload import Offload
from megappo.models.routing import ModelRouting
from megappo.models.train_engine import TrainedEngine
from megappo.models.vocab_parallel import LogitFactors
from megappo.observe.metrics import Metric, RankMetrics
from megappo.observe.timers import Timers
from megappo.placement.components import (
    LOAD,
    NOTHING,
    OPTIONAL_PHASES,
    READ_WEIGHTS,
    ComponentSpec,
    build_order,
    exported,
    uses_of,
)
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.run_plan import RunPlan
from megappo.runtime import platform
from megappo.runtime.failure import FAILED
from megappo.trainer.component_batch import Component, ComponentBatch
from megappo.trainer.objectives import LOSS_WEIGHTS, value_readers
from megappo.trainer.update import update_actor, update_critic
from megappo.weights.buckets import all_finite
from megappo.weights.hf_folder import write_hf_folder
from megappo.weights.load import critic_architecture, load_hf

Shards = Mapping[str, ComponentBatch]
"""A step's rows at the components that have a forward pass or are trained, by name."""
OF_PPO = ("actor", "critic", "ref", "reward_model")
"""Components that the loop names. Others are registered by extensions."""


class Models:
    """The components of `placement.components` that the run has.

    Args:
        components: components by name, in the table's order.
    """

    def __init__(self, plan: RunPlan, components: Mapping[str, Component]):
        self.config = plan.config
        self.specs = plan.components
        self.training = plan.training
        self.components = components
        forwards = {name: spec.forward for name, spec in plan.components.items()}
        self.forwards = {name: forward for name, forward in forwards.items() if forward is not None}

    @property
    def actor(self) -> Component:
        """Return the policy, whose weights the engines take."""
        return self.components["actor"]

    @cached_property
    def architecture(self) -> Architecture:
        """Return the architecture of the language model, without a value head."""
        return read_architecture(self.config.model.path).with_lora(self.config.actor.lora)

    @property
    def trained(self) -> dict[str, TrainedEngine | None]:
        """Return this rank's part of each model that checkpoints hold."""
        return {name: self.components[name].engine for name in self.training}

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Keep on the device what a checkpoint is loaded into; all other components sleep."""
        uses = {name: LOAD}
        if base := self.specs[name].base:
            uses[base] = READ_WEIGHTS
        for one, use in uses.items():
            self.components[one].offload.wake(use)
        yield
        for one in uses:
            self.components[one].offload.rest(NOTHING)
        platform.empty_cache()

    def is_trained(self, name: str, step: int) -> bool:
        """Return whether the run has this component and trains it in this step."""
        training = self.training.get(name)
        return training is not None and step > training.warmup_steps

    def trained_in(self, step: int) -> list[str]:
        """Return the components that are trained in a step."""
        return [name for name in self.training if self.is_trained(name, step)]

    def num_mini_batches(self) -> dict[str, int]:
        """Return the mini-batches of an epoch of each trained component."""
        num_prompts = self.config.data.train_batch_size
        return {name: training.num_mini_batches(num_prompts) for name, training in self.training.items()}

    def scatter(self, batch: Batch) -> Shards:
        """Bring a step's rows, with what every pass reads, to all components.

        Frozen models split the rows as the actor does: one in the actor's layout shares the actor's rows.
        """
        shards = {}
        num_mini_batches = {"actor": 1} | self.num_mini_batches()
        for name, component in self.components.items():
            has_pass = name in self.forwards or name in self.training
            if has_pass and not component.spec.own_rows:
                num = num_mini_batches.get(name, num_mini_batches["actor"])
                shards[name] = component.scatter(batch, num, shards.values())
        return shards

    def forward(self, name: str, shards: Shards) -> dict[str, Outputs]:
        """Return {name: the component's outputs}; {} in a run without it, or without a forward pass of its own."""
        return {name: shards[name].forward()} if name in self.forwards else {}

    def forward_others(self, shards: Shards, phase: Callable) -> dict[str, Outputs]:
        """Return the outputs of further critics, teachers and models of extensions, each in its own phase."""
        outputs = {}
        for name, forward in self.forwards.items():
            if name not in OF_PPO:
                with phase(forward.phase):
                    outputs |= self.forward(name, shards)
        return outputs

    def gather(self, shards: Shards, outputs: Mapping[str, Outputs], batch: Batch) -> Batch:
        """Return the batch with the fields that the outputs become."""
        for name, of_component in outputs.items():
            batch = shards[name].gather(of_component, self.forwards[name].fields, batch)
        return batch

    def scatter_fields(self, shards: Shards, batch: Batch, step: int) -> None:
        """Bring what the losses read to the components that are trained in the step."""
        weights = [LOSS_WEIGHTS] if LOSS_WEIGHTS in batch.rows.fields else []
        for name in self.trained_in(step):
            shards[name].scatter_fields(batch, [*self.training[name].fields, *weights])
            shards[name].step = step

    def update(self, name: str, shards: Shards, step: int) -> None:
        """Train a component, if it is trained in this step."""
        if self.is_trained(name, step):
            update = update_critic if self.specs[name].head == "value" else update_actor
            update(shards[name], self.config)

    def update_others(self, shards: Shards, step: int, phase: Callable) -> None:
        """Train further critics and models of extensions, each in its own phase."""
        for name in self.trained_in(step):
            if name not in OF_PPO:
                with phase(f"update_{name}"):
                    self.update(name, shards, step)

    def check_finite(self, exchange: Exchange) -> None:
        """Check that the weights to be saved are finite; all ranks together.

        Raises:
            FloatingPointError, OtherRankError: a trained weight is not finite; the message names it.
        """
        error = None
        for name, engine in self.trained.items():
            weights = [weight for chunk in engine.chunks for weight in chunk.named_parameters()] if engine else []
            for key, weight in weights:
                if error is None and not all_finite(weight):
                    error = FloatingPointError(
                        f"the {name}'s {key} holds values that are not finite: nothing is saved; start again from the "
                        "newest checkpoint, with a lower optim.lr"
                    )
        exchange.raise_together(error)

    def export(self) -> None:
        """Write the models that the run trains as Hugging Face folders."""
        for name in exported(self.specs):
            engine = self.components[name].engine
            spec = self.specs[name]
            source = spec.folder.value
            if engine is not None:
                architecture = self.architecture if name == "actor" else architecture_of(spec)
                if spec.scores_pairs:
                    architecture = architecture.with_padding(padding_token(architecture, load_tokenizer(source)))
                target = Path(self.config.trainer.output_dir) / f"hf_{name}"
                write_hf_folder(engine.chunks, architecture, engine.groups, source, target)


def build_models(plan: RunPlan, exchange: Exchange, images: ImageSource | None = None) -> Models:
    """Build the run's models with their initial weights; all ranks together.

    They are built one after another: the offloaded tensors of a model leave the device before the next model is built.

    Args:
        images: source of the images of rows' prompts; None = they have none.
    """
    config = plan.config
    specs = plan.components
    layouts = {name: plan.layouts[name] for name in specs}
    components = {name: Component(name, spec, layouts[name], exchange) for name, spec in specs.items()}
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    groups = build_groups(layouts, config.trainer.seed, timeout)
    for folder in {spec.megatron_folder: None for spec in specs.values() if spec.weights.value}:
        refuse_damaged(folder, exchange)
    for name in build_order(specs):
        if groups[name].member:
            spec = specs[name]
            base = components[spec.base].engine if spec.base else None
            factors = partial(_logit_factors, components[spec.reference]) if spec.reference else None
            engine = build_engine(config, spec, groups[name], factors, base)
            if isinstance(engine, TrainedEngine) and engine.transformer_config.num_moe_experts:
                replays = "expert_choices" in spec.reads
                settings = spec.training.settings
                engine.routing = ModelRouting(engine.chunks, groups[name], name, settings.router, replays=replays)
            engine.image_source = images
            components[name].engine = engine
            components[name].offload = Offload(engine, spec.offload.value, base)
            components[name].offload.rest(NOTHING)
            platform.empty_cache()  # the next one's tensors are of other sizes
    return Models(plan, components)


_read_once = cache(read_component)
"""Contents of the folders that a run starts from, which its export needs, too."""


def architecture_of(spec: ComponentSpec) -> Architecture:
    """Return the architecture of a component, with its adapters and frozen parameters.

    A value head may start from a reward model. A reward model that was trained on pairs has no bias: only differences
    of scores count.
    """
    folder = spec.folder.value
    if spec.head == "value":
        architecture = critic_architecture(folder, spec.support, needs_head=spec.own_rows)
    else:
        architecture = replace(read_architecture(folder, spec.head), support=spec.support)
    if spec.megatron_folder:
        architecture = replace(architecture, value_bias=has_value_bias(_read_once(spec.megatron_folder)))
    if spec.scores_pairs:
        architecture = replace(architecture, value_bias=False, scores_rows=True)
    return architecture.with_lora(spec.lora).with_frozen(spec.frozen)


def _logit_factors(reference: Component, packed: PackedBatch) -> LogitFactors:
    """Return the factors of a reference's logits. Its engine may be built after its policy's."""
    assert reference.engine is not None, "a reference lives on the ranks of its policy"
    return reference.engine.logit_factors(packed)


def build_engine(
    config: Config,
    spec: ComponentSpec,
    groups: ComponentGroups,
    factors: Callable[[PackedBatch], LogitFactors] | None = None,
    base: MegatronEngine | None = None,
) -> MegatronEngine:
    """Build this rank's part of a component, with its initial weights and heads.

    Args:
        factors: factors of the logits that a policy's head compares with its own, see `policy_head`.
        base: the model whose frozen weights this one uses.
    """
    architecture = architecture_of(spec)
    training = spec.training
    lent = base.chunks if base else None
    recompute = training.settings.recompute if training else "none"
    trained = training is not None
    chunks = build_model(
        architecture, config.model, spec.parallel.value, groups, recompute=recompute, trained=trained, base=lent
    )
    seed = config.trainer.seed + spec.member
    if start := spec.megatron_folder:
        load_initial(chunks, groups, start, _read_once(start), architecture, seed)
    else:
        folder = spec.folder.value
        adapter = spec.adapter
        load_hf(
            chunks,
            folder,
            architecture,
            groups,
            seed=seed,
            base=lent,
            adapter=adapter,
        )

    def head(full_kl: bool, bootstrap: bool, trains: bool) -> Head:
        value = value_head(bootstrap=bootstrap, **value_readers(config, architecture.support, trains=trains))
        if spec.head == "value":
            return value
        weight = partial(output_weight, chunks[-1])
        compared = factors if full_kl else None
        temperature = config.rollout.temperature
        sizes = groups.collection.tp, architecture.vocab_size
        policy = policy_head(weight, *sizes, temperature, compared, architecture.logit_cap)
        if spec.head == "policy":
            return policy
        return policy_value_head(policy, value, chunks[-1], detached=config.algorithm.detach_values)

    outputs = spec.forward.fields if spec.forward else {}
    forward_head = head("full_kl" in outputs, "bootstrap_values" in outputs or spec.scores_pairs, False)
    if training is None:
        return MegatronEngine(chunks, groups, forward_head, spec.max_tokens.value)
    return TrainedEngine(
        chunks,
        groups,
        forward_head,
        spec.max_tokens.value,
        training.settings.optim,
        training.optimizer_steps(config),
        loss_head=head(training.full_kl, spec.scores_pairs, True),
        keeps_prompts=spec.scores_pairs,
    )


class Phases:
    """`with phases("values"): ...` times a part of a step and wakes what it needs of each model.

    Tensors that the phase does not need sleep from its beginning on, if the model's offload key names them.

    Attributes:
        before: phase -> a function to call before it begins.
    """

    def __init__(self, models: Models):
        self.timers = Timers()
        self.components = models.components
        self._uses = uses_of(models.specs)
        self._phase = ""
        self.before = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Enter a phase. Phases of models that the run does not have do nothing and are not timed."""
        if phase in OPTIONAL_PHASES and phase not in self._uses:
            yield
            return
        if phase in self.before:
            self.before[phase]()
        outer = self._phase
        with self.timers(phase):
            self._enter(phase)
            try:
                yield
            finally:
                self._phase = outer
        if outer:  # restarted engines get the weights in the middle of a rollout
            self._enter(outer)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        uses = self._uses.get(phase, {})
        for name, component in self.components.items():  # first, as this frees the memory that others wake into
            component.offload.rest(uses.get(name, NOTHING))
        for name, component in self.components.items():
            component.offload.wake(uses.get(name, NOTHING))

    def seconds(self, phase: str) -> float:
        """Return the time spent in a phase in this step so far."""
        return self.timers.seconds(phase)

    def memory(self) -> RankMetrics:
        """Return `Timers.memory`, `threads/failed` and, if anything is offloaded, `memory/offloaded_gib/sum`."""
        kept = sum(component.offload.host_bytes for component in self.components.values())
        offloaded = {"memory/offloaded_gib/sum": Metric((kept / 2**30,), "sum")} if kept else {}
        return self.timers.memory() | offloaded | {"threads/failed": Metric((len(FAILED),), "sum")}
