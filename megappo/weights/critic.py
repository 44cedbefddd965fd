"""Critics in Hugging Face folders: the heads of language and reward models they start from, and what they become."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import LM_HEAD, VALUE_BIAS, VALUE_HEAD
from megappo.architecture.parsing import read_architecture
from megappo.weights.buckets import NamedTensors
from megappo.weights.safetensors_io import HFFolder, WeightsError

HEAD_MODULES = ("score", "classifier", "v_head", "v_head.summary")
"""Names in reward models of the layer that reads the last hidden states; the last is TRL's value head."""


def critic_architecture(folder: str | Path) -> Architecture:
    """The model a critic starts from, under a value head: with a bias where that of a reward model's head is not zero.
    A bias of zero adds nothing, and is not carried along.

    Args:
        folder: a language model, or a reward model: *ForSequenceClassification, *ForTokenClassification, or a language
            model with a value head besides (see `HEAD_MODULES`).
    Raises:
        ArchitectureError: its config.json cannot be used.
        WeightsError: a reward model without a known head, or one of several labels.
    """
    architecture = read_architecture(folder, head="value")
    with HFFolder(folder) as source:
        name_value_head(source)
        if architecture.is_reward_model and VALUE_HEAD not in source.names():
            raise WeightsError(
                f"{folder} is a {architecture.named} without a head: expected {VALUE_HEAD}, or the weight of one of "
                f"{', '.join(HEAD_MODULES[1:])}; its files are incomplete, or it is no reward model"
            )
        return replace(architecture, value_bias=has_value_bias(source))


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
    """Return whether the folder has a value head, under any of its names."""
    return any(f"{module}.weight" in source.names() for module in HEAD_MODULES)


def has_value_bias(source: HFFolder) -> bool:
    """Return whether the folder's value head adds something other than zero."""
    return VALUE_BIAS in source.names() and bool(source.read(VALUE_BIAS).any())


def critic_buckets(
    buckets: Iterable[NamedTensors],
) -> Iterator[NamedTensors]:
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
