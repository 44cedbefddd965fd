"""The models of a run, and what a step of PPO does with them.

All ranks exchange rows together, before and after; `forward` and `update` wait for no rank of another component.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows
from megappo.models.megatron_engine import Outputs
from megappo.models.offload import Offload
from megappo.models.train_engine import TrainedEngine
from megappo.observe.files import HF_ACTOR
from megappo.placement.groups import build_groups
from megappo.placement.run_plan import RunPlan
from megappo.placement.uses import LOAD, NOTHING
from megappo.runtime import platform
from megappo.trainer.component_batch import Component, ComponentBatch, gather, scatter_fields
from megappo.trainer.objectives import LOSS_WEIGHTS
from megappo.trainer.train_engines import build_engines
from megappo.trainer.update import update_actor, update_critic
from megappo.weights.buckets import all_finite
from megappo.weights.hf_folder import write_hf_folder

Shards = Mapping[str, ComponentBatch]
"""A step's rows at the components that have a forward pass or are trained, by name."""
Phase = Callable[[str], AbstractContextManager[None]]
"""See `trainer.phases`."""
OF_PPO = ("actor", "critic", "ref")
"""Components that the loop names. Others are registered by extensions."""


class Models:
    """The components of `placement.components` that the run has.

    Args:
        components: by name, in the table's order.
        offloads: of the components on this rank.
        architecture: the language model's.
    """

    def __init__(
        self,
        plan: RunPlan,
        components: Mapping[str, Component],
        offloads: Mapping[str, Offload],
        architecture: Architecture,
    ):
        self.config = plan.config
        self.offloads = offloads
        self.architecture = architecture
        self.components = components
        self.specs = plan.components
        self.training = plan.training

    @property
    def actor(self) -> Component:
        """Return the policy, whose weights the engines take."""
        return self.components["actor"]

    @property
    def trained(self) -> dict[str, TrainedEngine | None]:
        """Return this rank's part of each model that checkpoints hold."""
        return {name: self.components[name].engine for name in self.training}

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Keep on the device what a checkpoint is loaded into; all other components sleep."""
        offload = self.offloads.get(name)
        if offload is not None:
            offload.wake(LOAD)
        yield
        if offload is not None:
            offload.rest(NOTHING)
            platform.empty_cache()

    def is_trained(self, name: str, step: int) -> bool:
        """Return whether the run has this component and trains it in this step."""
        training = self.training.get(name)
        return training is not None and step > training.warmup_steps

    def trained_in(self, step: int) -> list[str]:
        """Return the components that are trained in a step."""
        return [name for name in self.training if self.is_trained(name, step)]

    def scatter(self, batch: Batch) -> Shards:
        """Bring a step's rows, tokens and mask only, to all components."""
        shards: dict[str, ComponentBatch] = {}
        for name, component in self.components.items():
            others = list(shards.values())
            if training := self.training.get(name):
                num_mini_batches = training.section.num_mini_batches(self.config.data.train_batch_size)
                shards[name] = component.scatter(batch, num_mini_batches, others)
            elif self.specs[name].forward is not None:
                alike = next((one for one in others if one.component.layout == component.layout), None)
                shards[name] = replace(alike, component=component) if alike else component.scatter(batch)
        return shards

    def forward(self, name: str, shards: Shards) -> dict[str, Outputs]:
        """Return {name: the component's outputs}; {} in a run without it, or without a forward pass of its own."""
        if name not in shards or self.specs[name].forward is None:
            return {}
        return {name: shards[name].forward()}

    def forward_others(self, shards: Shards, phase: Phase) -> dict[str, Outputs]:
        """Return the outputs of the components that extensions have registered, each in its own phase."""
        outputs: dict[str, Outputs] = {}
        for name in shards:
            forward = self.specs[name].forward
            if name not in OF_PPO and forward is not None:
                with phase(forward.phase):
                    outputs |= self.forward(name, shards)
        return outputs

    def gather(self, shards: Shards, outputs: Mapping[str, Outputs], owned: Rows) -> Rows:
        """Return the owned rows with the fields that the outputs become."""
        found = []
        for name, of_component in outputs.items():
            forward = self.specs[name].forward
            assert forward is not None
            found.append((shards[name], of_component, forward.fields))
        return gather(found, owned)

    def scatter_fields(self, shards: Shards, owned: Rows, step: int) -> None:
        """Bring what the losses read to the components that are trained in the step."""
        weights = [LOSS_WEIGHTS] if LOSS_WEIGHTS in owned.fields else []
        trained = self.trained_in(step)
        scatter_fields([(shards[name], [*self.training[name].fields, *weights]) for name in trained], owned)
        for name in trained:
            shards[name].step = step

    def update(self, name: str, shards: Shards, step: int) -> None:
        """Train a component, if it is trained in this step."""
        if self.is_trained(name, step):
            update = update_critic if self.specs[name].head == "value" else update_actor
            update(shards[name], self.config)

    def update_others(self, shards: Shards, step: int, phase: Phase) -> None:
        """Train the components that extensions have registered, each in its own phase."""
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
            for chunk in engine.chunks if engine is not None else ():
                broken = [key for key, weight in chunk.named_parameters() if not all_finite(weight)]
                if broken:
                    error = FloatingPointError(
                        f"the {name}'s {broken[0]} holds values that are not finite, as do {len(broken) - 1} more: "
                        "nothing is saved; start again from the newest checkpoint, with a lower optim.lr"
                    )
        exchange.raise_together(error)

    def num_steps(self, exchange: Exchange) -> dict[str, list[int]]:
        """Return component -> its optimizer steps so far, by every counter of every rank: one number each."""
        local = {name: engine.num_steps for name, engine in self.trained.items() if engine is not None}
        ranks = exchange.share(local)
        return {name: sorted({n for counts in ranks for n in counts.get(name, ())}) for name in self.training}

    def skipped_in_a_row(self, exchange: Exchange) -> dict[str, int]:
        """Return component -> its latest optimizer steps that were skipped in a row; all ranks together."""
        local = {name: engine.skipped_in_a_row for name, engine in self.trained.items() if engine is not None}
        ranks = exchange.share(local)
        return {name: max(counts.get(name, 0) for counts in ranks) for name in self.training}

    def export_actor(self) -> None:
        """Write the policy as a Hugging Face folder."""
        engine = self.actor.engine
        if engine is not None:
            target = Path(self.config.trainer.output_dir) / HF_ACTOR
            write_hf_folder(engine.chunks, self.architecture, engine.groups, self.config.model.path, target)


def build_models(plan: RunPlan, exchange: Exchange) -> Models:
    """Build the run's models with their initial weights; all ranks together."""
    config, layouts = plan.config, {name: plan.layouts[name] for name in plan.components}
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    engines, offloads = build_engines(config, plan.components, build_groups(layouts, config.trainer.seed, timeout))
    components = {name: Component(name, layout, engines[name], exchange) for name, layout in layouts.items()}
    architecture = read_architecture(config.model.path).with_lora(config.actor.lora)
    return Models(plan, components, offloads, architecture)
