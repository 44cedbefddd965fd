"""Critics in Hugging Face folders: the heads of language and reward models they start from, and what they become."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megappo.architecture.families import BIAS_KEY, REWARD_MODELS, language_model
from megappo.architecture.files import read_model_config
from megappo.architecture.parameters import LM_HEAD, VALUE_BIAS, VALUE_HEAD
from megappo.config.text_files import TextFileError
from megappo.weights.safetensors_io import HFFolder, WeightsError

HEAD_MODULES = ("score", "classifier", "v_head", "v_head.summary")
"""What reward models call the layer that reads the last hidden states; the last is TRL's value head."""
_EXPORTED = "ForTokenClassification"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_LABELS = ("id2label", "label2id", BIAS_KEY)


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        FileNotFoundError: there is none.
        WeightsError: it cannot be read, or lacks a size, or a value is of the wrong kind.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; name a complete Hugging Face folder")
    try:
        hf_config = read_model_config(path.parent)
    except TextFileError as error:
        raise WeightsError(str(error)) from error
    missing = [key for key in _SIZES if hf_config.get(key) is None]
    if missing:
        raise WeightsError(f"{path} lacks {', '.join(missing)}; it is no config of a language model, or incomplete")
    return hf_config


def critic_config(folder: str | Path) -> dict[str, Any]:
    """config.json of the model a critic starts from, as the models and the name tables take it.

    A reward model's architecture is replaced by its language model's, and a key says whether its head has a bias that
    is not zero: the critic then has one. A bias of zero adds nothing, and is not carried along.

    Args:
        folder: a language model, or a reward model: *ForSequenceClassification, *ForTokenClassification, or a language
            model with a value head besides (see `HEAD_MODULES`).
    Raises:
        WeightsError: a reward model without a known head, or one of several labels.
    """
    hf_config = read_hf_config(folder)
    architecture = (hf_config.get("architectures") or ["no architecture"])[0]
    with HFFolder(folder) as source:
        name_value_head(source)
        if architecture.endswith(REWARD_MODELS) and VALUE_HEAD not in source.names():
            raise WeightsError(
                f"{folder} is a {architecture} without a head: expected {VALUE_HEAD}, or the weight of one of "
                f"{', '.join(HEAD_MODULES[1:])}; its files are incomplete, or it is no reward model"
            )
        has_bias = has_value_bias(source)
    return {**hf_config, "architectures": [language_model(architecture)], BIAS_KEY: has_bias}


def name_value_head(source: HFFolder) -> None:
    """Call the folder's value head `score`, whatever it is called there.

    Raises:
        WeightsError: there are several, or it gives several numbers per token.
    """
    found = [module for module in HEAD_MODULES if f"{module}.weight" in source.names()]
    if len(found) > 1:
        raise WeightsError(f"{source.folder} has several value heads: {', '.join(found)}; remove all but one")
    for module in found:
        names = {f"{module}.weight": VALUE_HEAD, f"{module}.bias": VALUE_BIAS}
        source.rename({old: new for old, new in names.items() if old in source.names()})
        labels = source.shape(VALUE_HEAD)[0]
        if labels != 1:
            raise WeightsError(
                f"{module}.weight in {source.folder} gives {labels} numbers per token, a critic needs 1; "
                "choose a reward model of one label"
            )


def has_value_head(source: HFFolder) -> bool:
    """Whether the folder has a value head, under any of its names."""
    return any(f"{module}.weight" in source.names() for module in HEAD_MODULES)


def has_value_bias(source: HFFolder) -> bool:
    """Whether the folder's value head adds something other than zero."""
    return VALUE_BIAS in source.names() and bool(source.read(VALUE_BIAS).any())


def exported_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a critic's Hugging Face folder: transformers gives one number per token."""
    architecture = hf_config["architectures"][0].removesuffix("ForCausalLM") + _EXPORTED
    kept = {key: value for key, value in hf_config.items() if key not in _LABELS}
    return {**kept, "architectures": [architecture], "num_labels": 1}


def critic_buckets(
    buckets: Iterable[list[tuple[str, torch.Tensor]]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of a model with a value head as *ForTokenClassification has them.

    That has a bias always, so a head without one is given a zero, and it has no language model's head.
    """
    weight, has_bias = None, False
    for bucket in buckets:
        tensors = dict(bucket)
        weight = tensors.get(VALUE_HEAD, weight)
        has_bias = has_bias or VALUE_BIAS in tensors
        tensors.pop(LM_HEAD, None)
        yield list(tensors.items())
        del bucket, tensors  # before the next one is gathered
    if weight is not None and not has_bias:
        yield [(VALUE_BIAS, weight.new_zeros(1))]
