"""Text about the models of a run: what checkpoints hold, and which value heads are new. Without torch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megappo.architecture.model_folder import num_head_outputs
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import counted
from megappo.config.methods import in_words
from megappo.config.schema import Config
from megappo.placement.components import Specs, components_of


def models_in_words(config: Config) -> dict[str, str]:
    """Describe the models in a run's checkpoints, for an evaluation the actor: no others can be loaded from them."""
    models = {}
    for name, spec in components_of(config).items():
        if spec.training is not None or not (config.recipe.has_steps or spec.own_rows):
            model = read_architecture(spec.folder.value, head="value")
            head = " with a value head" if spec.head == "policy_value" else ""
            head += f" of {spec.support}" if spec.support else ""
            adapters = f" with adapters of rank {spec.lora.rank}" if spec.lora else ""
            frozen = f" with frozen {' and '.join(sorted(spec.frozen))}" if spec.frozen else ""
            size = f"{model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size}"
            models[name] = f"{name}{head}{adapters}{frozen} ({model.name}, {size})"
    return models


def replaced_heads(specs: Specs) -> Iterator[str]:
    """Yield a line for each trained model that gets a new value head, because its folder's has other outputs."""
    for name, spec in specs.items():
        folder = Path(spec.folder.value)
        if spec.head == "policy" or spec.training is None or spec.megatron_folder or not folder.is_dir():
            continue
        model = replace(read_architecture(folder, head="value"), support=spec.support)
        num_outputs = num_head_outputs(folder)
        if num_outputs and not model.takes_head(num_outputs):
            found = model.stored_support or counted(num_outputs, "output")
            yield f"{name}: a new value head, {in_words(spec.support)}, as the head in {folder} has {found}"
