"""Folders with a reward model's adapters and its score, in PEFT's format."""

import os
from pathlib import Path

from pydantic import ValidationError

from megappo.architecture.model_folder import ADAPTERS, PEFT_PREFIX, tensor_files
from megappo.architecture.parameters import VALUE_HEAD
from megappo.config.config_error import ConfigError
from megappo.config.hub import cached_model
from megappo.config.model_sections import Lora
from megappo.config.text_files import TextFileError, read_json

EXPECTED = {
    "task_type": "SEQ_CLS",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Keys of adapter_config.json -> the values that are supported."""


def read_lora(folder: str, base: str) -> Lora:
    """Return the settings of a reward model's adapters.

    Args:
        base: folder of the model beside whose weights they are to stand.
    Raises:
        ConfigError: they cannot be read, are no reward model's, are of another base, or have unsupported settings.
    """
    try:
        raw, tensors = read_json(Path(folder, "adapter_config.json")), tensor_files(Path(folder), ADAPTERS)
        lora = Lora(rank=raw.get("r"), alpha=raw.get("lora_alpha"), target_modules=raw.get("target_modules"))
    except (TextFileError, ValidationError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"reward_model.adapter {folder}: {reason}: name a folder of adapters in PEFT's format"
        ) from error
    named, found = str(raw.get("base_model_name_or_path")), {key: raw.get(key) or EXPECTED[key] for key in EXPECTED}
    if found != EXPECTED or PEFT_PREFIX + VALUE_HEAD not in tensors:
        raise ConfigError(
            f"reward_model.adapter {folder}: expected {EXPECTED} and a {VALUE_HEAD}, found {found}: name "
            "the adapters of a reward model, such as a run's hf_reward_model/adapter, or merge these into their base "
            "(merge_and_unload) and name the result in reward_model.model_path"
        )
    if _is_other(named, base):
        raise ConfigError(
            f"reward_model.adapter {folder}: the adapters are of the base {named}, but "
            f"reward_model.model_path is {base}: set it to their base, or correct base_model_name_or_path in "
            "adapter_config.json if both are the same model"
        )
    return lora


def _is_other(named: str, base: str) -> bool:
    """Return whether a base, a folder or a hub id, is another model than a folder's. A folder that was moved has the
    same last name."""
    named = cached_model(named)
    if os.path.isdir(named):
        return os.path.realpath(named) != os.path.realpath(base)
    return os.path.basename(named) != os.path.basename(base)
