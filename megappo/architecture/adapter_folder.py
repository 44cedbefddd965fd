"""Folders with a frozen model's adapters, and a reward model's score, in PEFT's format."""

import os
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megappo.architecture.architecture import Architecture
from megappo.architecture.model_folder import ADAPTERS, PEFT_PREFIX, tensor_files
from megappo.architecture.parameters import LORA_A, LORA_B, VALUE_HEAD, hf_shapes
from megappo.config.config_error import ConfigError, Errors, listed, show
from megappo.config.hub import cached_model
from megappo.config.model_sections import Lora
from megappo.config.text_files import TextFileError, read_json
from megappo.config.values import ADAPTED_MODULES

REWARD_MODEL_ADAPTER = "reward_model.adapter"
SUPPORTED: dict[str, Sequence[Any]] = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal", "mica"],
}
"""Keys of adapter_config.json -> the values that are supported, if they are set. Other initial values (PiSSA, OLoRA,
CorDA, LoftQ) belong to changed weights of the base."""
OTHER_KEYS = (
    *("r", "lora_alpha", "use_rslora", "base_model_name_or_path", "target_modules", "modules_to_save", "revision"),
    *("lora_dropout", "inference_mode", "auto_mapping", "megatron_config", "megatron_core", "peft_version"),
    *("layers_pattern", "eva_config", "qalora_group_size"),
    "fan_in_fan_out",  # which PEFT sets to False for a torch.nn.Linear (tuners/lora/model.py)
)
"""Keys that are read, that the tensors imply, or that do not change what trained adapters of linear layers compute. A
folder in which any other key is set is refused."""
KINDS = {"SEQ_CLS": ("a reward model", "hf_reward_model"), "CAUSAL_LM": ("a language model", "hf_actor")}
"""PEFT's task_type -> the kind of model, and the folder of a run with adapters of one."""


def _task(key: str) -> str:
    """Return PEFT's task_type of the adapters that a key names."""
    return "SEQ_CLS" if key == REWARD_MODEL_ADAPTER else "CAUSAL_LM"


def _remedy(key: str) -> str:
    kind, example = KINDS[_task(key)]
    return (
        f"name the adapters of {kind}, such as a run's {example}/adapter, or merge these into their base "
        f"(merge_and_unload) and name the result in {key.removesuffix('adapter')}model_path"
    )


def read_lora(folder: str, base: tuple[str, str], key: str = REWARD_MODEL_ADAPTER) -> Lora:
    """Return the settings of a frozen model's adapters. The tensors decide which matrices have some.

    Args:
        base: key and folder of the model beside whose weights they are to stand.
        key: key that names the adapters.
    Raises:
        ConfigError: they cannot be read, are of another kind of model or base, or have unsupported settings.
    """
    try:
        raw = read_json(Path(folder, "adapter_config.json"))
        tensors = tensor_files(Path(folder), ADAPTERS)
    except TextFileError as error:
        remedy = "name a folder of adapters in PEFT's format"
        raise ConfigError(f"{key} {folder}: {error}: {remedy}") from error
    supported = SUPPORTED | {"task_type": [_task(key)]}
    settings = [(name, value) for name, value in raw.items() if value and name not in OTHER_KEYS]
    found = [f"{name} {show(value)}" for name, value in settings if value not in supported.get(name, ())]
    modules = {name.split(".")[-3] for name in tensors if name.endswith(LORA_A)}
    try:
        lora = Lora(rank=raw.get("r"), alpha=raw.get("lora_alpha"), target_modules=sorted(modules & {*ADAPTED_MODULES}))
    except ValidationError as error:
        found += [f"{one['loc'][0]} {show(one['input'])} ({one['msg']})" for one in error.errors()]
    if found:
        raise ConfigError(
            f"{key} {folder}: expected the settings of LoRA adapters of {KINDS[_task(key)][0]}, found {listed(found)}: "
            f"{_remedy(key)}"
        )
    named = str(raw.get("base_model_name_or_path"))
    base_key, base_folder = base
    if _is_other(named, base_folder):
        raise ConfigError(
            f"{key} {folder}: the adapters are of the base {named}, but {base_key} is {base_folder}: set it to their "
            "base, or correct base_model_name_or_path in adapter_config.json if both are the same model"
        )
    return lora.model_copy(update={"alpha": lora.alpha * sqrt(lora.rank)}) if raw.get("use_rslora") else lora


def adapter_tensor_errors(folder: str, architecture: Architecture, key: str = REWARD_MODEL_ADAPTER) -> Errors:
    """Yield an error if a folder holds other tensors than the model's adapters and score: base weights in its place
    would not be read.

    Args:
        architecture: architecture of the base, with the adapters.
        key: key that names the folder.
    """
    files = tensor_files(Path(folder), ADAPTERS)
    names = {name.removeprefix(PEFT_PREFIX) for name in files}
    read = {name for name in hf_shapes(architecture) if name.endswith((LORA_A, LORA_B, VALUE_HEAD))}
    if names != read:
        missing = listed(sorted(read - names))
        unknown = listed(sorted(names - read))
        found = f"missing {missing}; unknown {unknown}"
        head = f" and a {VALUE_HEAD}" if _task(key) == "SEQ_CLS" else ""
        yield f"{key} {folder}: expected adapters of each layer{head}, {found}: {_remedy(key)}"


def _is_other(named: str, base: str) -> bool:
    """Return whether a base, a folder or a hub id, is another model than a folder's. A folder that was moved has the
    same last name."""
    named = cached_model(named)
    if os.path.isdir(named):
        return os.path.realpath(named) != os.path.realpath(base)
    return os.path.basename(named) != os.path.basename(base)
