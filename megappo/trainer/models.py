"""The models of a run, and what a step of PPO does with all of them: one call, whichever there are.

What exchanges rows, all ranks do together, before and after; what computes (`forward`, `update`) waits for no rank of
another component.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.batch.step_batch import Batch
from megappo.models.offload import Offload
from megappo.models.train_engine import OptimizerStep, Outputs, TrainedEngine
from megappo.observe.files import HF_ACTOR
from megappo.placement.groups import build_groups
from megappo.placement.run_plan import RunPlan
from megappo.placement.uses import LOAD, NOTHING
from megappo.runtime import platform
from megappo.table import resolved
from megappo.trainer.component import Component, Scattered, gather, scatter_fields
from megappo.trainer.objectives import LOSS_WEIGHTS
from megappo.trainer.train_engines import build_engines
from megappo.weights.buckets import all_finite
from megappo.weights.hf_folder import write_hf_folder

AtModels = Mapping[str, Scattered]
"""A step's rows at the components that have something to do with them, by name."""
Phase = Callable[[str], AbstractContextManager[None]]
"""See `trainer.phases`."""


class Models:
    """The components of `placement.components` that the run has.

    Args:
        components: by name, in the table's order.
        offloads: of the components that live here.
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
        self._updates = {name: resolved(training.update) for name, training in self.training.items()}

    @property
    def actor(self) -> Component:
        """The policy, whose weights the engines take."""
        return self.components["actor"]

    @property
    def trained(self) -> dict[str, TrainedEngine | None]:
        """What checkpoints hold."""
        return {name: self.components[name].engine for name in self.training}

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Inside, a component has on the device what a checkpoint is loaded into; all others sleep."""
        offload = self.offloads.get(name)
        if offload is not None:
            offload.wake(LOAD)
        yield
        if offload is not None:
            offload.rest(NOTHING)
            platform.empty_cache()

    def trained_in(self, step: int) -> tuple[str, ...]:
        """The components that are trained in a step."""
        return tuple(name for name, training in self.training.items() if step > training.warmup_steps)

    def scatter(self, batch: Batch) -> AtModels:
        """Bring a step's rows, tokens and mask only, to all components."""
        found: dict[str, Scattered] = {}
        for name, component in self.components.items():
            training = self.training.get(name)
            others = list(found.values())
            alike = [one for one in others if one.component.layout == component.layout]
            if training is not None:
                num_mini_batches = training.section.num_mini_batches(self.config.data.train_batch_size)
                found[name] = component.scatter(batch, num_mini_batches, others)
            elif self.specs[name].forward is not None:
                found[name] = alike[0].passed_to(component) if alike else component.scatter(batch, others=others)
        return found

    def forward(self, scattered: AtModels, phase: Phase) -> dict[str, Outputs]:
        """The outputs of every component that has a forward pass of its own, each in its own phase."""
        outputs = {}
        for name, at in scattered.items():
            if forward := self.specs[name].forward:
                with phase(forward.phase):
                    outputs[name] = at.forward()
        return outputs

    def gather(self, scattered: AtModels, outputs: Mapping[str, Outputs], owned: Rows) -> Rows:
        """The owned rows with the fields that the outputs become."""
        fields = {name: forward.fields for name in outputs if (forward := self.specs[name].forward)}
        return gather([(scattered[name], outputs[name], fields[name]) for name in fields], owned)

    def scatter_fields(self, scattered: AtModels, owned: Rows, step: int) -> None:
        """Bring what the losses read to the components that are trained in the step."""
        told = [LOSS_WEIGHTS] if LOSS_WEIGHTS in owned.fields else []
        trained = self.trained_in(step)
        scatter_fields([(scattered[name], [*self.training[name].fields, *told]) for name in trained], owned)
        for name in trained:
            scattered[name].step = step

    def update(self, scattered: AtModels, step: int, phase: Phase) -> dict[str, list[OptimizerStep]]:
        """Train the components, each in its own phase; their optimizer steps on their output ranks, [] elsewhere."""
        steps = {}
        for name in self.trained_in(step):
            with phase(f"update_{name}"):
                steps[name] = self._updates[name](scattered[name], self.config)
        return steps

    def check_finite(self, exchange: Exchange) -> None:
        """See that what is to be saved is not spoiled; all ranks together.

        Raises:
            FloatingPointError, OtherRankError: a trained weight is not finite; it is named.
        """
        error = None
        for name, engine in self.trained.items():
            for chunk in engine.chunks if engine is not None else ():
                spoiled = [key for key, weight in chunk.named_parameters() if not all_finite(weight)]
                if spoiled:
                    error = FloatingPointError(
                        f"the {name}'s {spoiled[0]} holds values that are not finite, as do {len(spoiled) - 1} more: "
                        "nothing is saved; start again from the newest checkpoint, with a lower optim.lr"
                    )
        exchange.raise_together(error)

    def num_steps(self, exchange: Exchange) -> dict[str, list[int]]:
        """Component -> the optimizer steps that it has had, by every counter of every rank: one number each."""
        mine = {name: engine.num_steps for name, engine in self.trained.items() if engine is not None}
        of_ranks = exchange.share(mine)
        return {name: sorted({n for found in of_ranks for n in found.get(name, ())}) for name in self.training}

    def skipped_in_a_row(self, exchange: Exchange) -> dict[str, int]:
        """Component -> how many of its last optimizer steps were skipped; all ranks together."""
        mine = {name: engine.skipped_in_a_row for name, engine in self.trained.items() if engine is not None}
        of_ranks = exchange.share(mine)
        return {name: max(found.get(name, 0) for found in of_ranks) for name in self.training}

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
