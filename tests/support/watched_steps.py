"""Steps of PPO in which no tensor that sleeps may be used, and their numbers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch.nn.attention import bias as attention_bias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megappo.config.schema import Config
from megappo.recipes.ppo import ppo_step
from megappo.trainer.models import architecture_of
from megappo.trainer.run import Run
from megappo.weights.export import Export


class Watch(TorchDispatchMode):
    """Refuses every operation on what sleeps."""

    def __init__(self, run: Run):
        super().__init__()
        self.run, self.state, self.found = run, None, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        offloads = {name: one.offload for name, one in self.run.phase.components.items()}
        state = [set(offload.asleep) for offload in offloads.values()]
        if state != self.state:
            self.state = state
            self.found = {
                memory.storage._cdata: f"{name}'s {kind}"
                for name, offload in offloads.items()
                for kind in offload.asleep
                for memory in offload._memories[kind]
            }
        for leaf in tree_leaves((args, kwargs)):
            found = self.found.get(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) else None
            assert found is None, f"the {found} sleep in the phase {self.run.phase.timers._open[0]}"
        return function(*args, **(kwargs or {}))


def unwatched(make_bias: Callable) -> Callable:
    """A causal bias, which has no content, cannot be made while operations are watched."""

    def made(*sizes: int) -> torch.Tensor:
        with _disable_current_modes():
            return make_bias(*sizes)

    return made


def config_of(bench: ModuleType, folder: Path, *parts: dict) -> Config:
    return Config.model_validate(bench.merged(bench.settings(folder), *parts))


def weights_of(bench: ModuleType, run: Run) -> dict[str, object]:
    found = {}
    with run.phase("save"):
        for name, engine in run.models.trained.items():
            if engine is not None:
                export = Export(engine.chunks, architecture_of(run.models.specs[name]), engine.groups)
                found |= {
                    f"{name}.{key}": bench.described(w.float()) for part in export.buckets(2**20) for key, w in part
                }
    return found


def numbers_of(bench: ModuleType, run: Run, num_steps: int = 2) -> dict[str, object]:
    """Return the numbers of some watched steps, each with a checkpoint after it."""
    found: dict[str, object] = {}
    for step in range(1, num_steps + 1):
        bias = unwatched(attention_bias.causal_lower_right)
        with patch.object(attention_bias, "causal_lower_right", bias), Watch(run):
            metrics = ppo_step(run, step)
            run.save()
        ours = {name: value for name, value in metrics.items() if not bench.OF_TIME.search(name)}
        found |= {f"{step}/{name}": value for name, value in ours.items()}
    return found
