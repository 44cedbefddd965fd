"""What convert.py's commands do, apart from comparing."""

import argparse
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from conversion.world import DTYPE_NAMES, SAFETENSORS_DTYPES, UsageError, World, described
from megappo.architecture import parameters
from megappo.architecture.families import BIAS_KEY, REWARD_MODELS, HeadKind, language_model
from megappo.checkpoint.checksums import write_sums
from megappo.checkpoint.component import has_value_bias, head_of, load_model, reshard, save_model
from megappo.checkpoint.metadata import EMBEDDING, ComponentInfo, components_of, is_component, read_component
from megappo.models.build import ModelChunks
from megappo.weights.critic import critic_config, has_value_head, read_hf_config
from megappo.weights.hf_folder import COMPANIONS, copy_companions, write_hf_files
from megappo.weights.load import load_hf
from megappo.weights.safetensors_io import HFFolder


def hf_to_megatron(args: argparse.Namespace, world: World) -> None:
    """A Hugging Face folder as a dist_checkpointing folder."""
    head: HeadKind = "value" if args.value_model else "policy"
    if is_component(args.input):
        raise UsageError(f"{args.input} is a Megatron folder already: megatron-to-hf, or reshard, takes it")
    hf_config = critic_config(args.input) if args.value_model else read_hf_config(args.input)
    if any(name.endswith(REWARD_MODELS) for name in hf_config.get("architectures") or []):
        raise UsageError(f"{args.input} is a critic or a reward model: --value-model converts it")
    dtype = args.dtype or stored_dtype(args.input)
    chunks = load_from_hf(args.input, hf_config, dtype, head, world)
    with world.staged(args.output) as folder:
        save_model(chunks, world.groups, folder)
        if world.rank == 0:
            copy_config(args.input, folder)
    world.say(f"wrote {args.output}: {described(parameters.hf_shapes(hf_config, head), dtype)}")


def megatron_to_hf(args: argparse.Namespace, world: World) -> None:
    """A dist_checkpointing folder as a Hugging Face folder."""
    source = open_megatron(args.input, args.hf_config)
    head: HeadKind = source.head
    if args.value_model and head == "policy":
        raise UsageError(f"--value-model: {args.input} has no value head")
    if head == "policy_value" and not args.value_model:
        world.say(f"{args.input} has a value head besides, which is left out: --value-model writes the critic instead")
    chunks = load_from_megatron(source, args.dtype or source.dtype, world)
    wanted: HeadKind = head if args.value_model or head == "value" else "policy"
    shapes = parameters.hf_shapes(source.hf_config, "value" if wanted != "policy" else "policy")
    if wanted != "policy":
        shapes[parameters.VALUE_BIAS] = (1,)
    total = sum(map(prod, shapes.values()))
    with world.staged(args.output) as folder, world.bar("writing", total, " parameters") as bar:
        write_hf_files(
            chunks, source.hf_config, world.groups, source.config_folder, folder, head=wanted, progress=bar.update
        )
    world.say(f"wrote {args.output}: {described(shapes, args.dtype or source.dtype)}")


def reshard_folder(args: argparse.Namespace, world: World) -> None:
    """A component's folder, or all of a training checkpoint, with the files cut for another layout."""
    components = components_of(args.input)
    if not components and not is_component(args.input):
        raise UsageError(f"{args.input} is neither a converted model nor a training checkpoint (step_XXXXXXXX)")
    sources = [open_megatron(folder, args.hf_config) for folder in components or [args.input]]
    with world.staged(args.output) as folder, world.bar("resharding", len(sources), " components") as bar:
        for source in sources:
            target = folder / source.folder.name if components else folder
            world.together(lambda target=target: target.mkdir(exist_ok=True))
            chunks = world.build(source.hf_config, source.dtype, source.head)
            reshard(chunks, world.groups, source.folder, source.info, target, source.hf_config["vocab_size"])
            bar.update()  # dist_checkpointing tells nothing while it works
        if world.rank == 0:
            for name in ("state.json", "config.json", *COMPANIONS):
                if (args.input / name).is_file():
                    shutil.copyfile(args.input / name, folder / name)
        if components:
            write_sums(folder, world.exchange)
    for source in sources:
        kept = "with the optimizer's state" if source.info.tensors.keys() - source.info.model.keys() else "weights only"
        tensor, pipeline = source.info.layout
        experts = f" x expert {args.expert}" if args.expert > 1 else ""
        elements = sum(prod(entry.shape) for entry in source.info.tensors.values())
        world.say(
            f"{source.folder.name}: tensor {tensor} x pipeline {pipeline} -> tensor {args.tensor} x pipeline "
            f"{args.pipeline}{experts}, {len(source.info.tensors)} tensors of {elements:,} elements, {kept}"
        )
    world.say(f"wrote {args.output}")


@dataclass(frozen=True)
class MegatronFolder:
    """A component's folder, and the Hugging Face config of its model."""

    folder: Path
    config_folder: Path
    hf_config: dict[str, Any]
    info: ComponentInfo

    @property
    def head(self) -> HeadKind:
        return head_of(self.info)

    @property
    def dtype(self) -> str:
        return DTYPE_NAMES[self.info.tensors[EMBEDDING].dtype]


def refuse_step(folder: Path) -> None:
    """A command that takes one model takes no whole checkpoint.

    Raises:
        UsageError: the folder holds the components of a training run.
    """
    names = ", ".join(str(path) for path in components_of(folder))
    if names:
        raise UsageError(f"{folder} is a whole training checkpoint: name one of its components, {names}")


def open_megatron(folder: Path, config_folder: Path | None) -> MegatronFolder:
    """Headers of a component's folder, with the config it carries or that of `--hf-config`."""
    refuse_step(folder)
    info = read_component(folder)
    if config_folder is None and not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} carries no config.json: name the Hugging Face folder the model started from with --hf-config"
        )
    config_folder = config_folder or folder
    hf_config = read_hf_config(config_folder)
    architectures = [language_model(name) for name in hf_config.get("architectures") or []]
    hf_config = {**hf_config, "architectures": architectures, BIAS_KEY: has_value_bias(info)}
    if EMBEDDING not in info.tensors:
        raise UsageError(f"{folder} holds no {EMBEDDING}: it is no language model of this program")
    return MegatronFolder(folder, config_folder, hf_config, info)


def load_from_hf(folder: Path, hf_config: dict[str, Any], dtype: str, head: HeadKind, world: World) -> ModelChunks:
    """The model with the folder's weights."""
    chunks = world.build(hf_config, dtype, head)
    with HFFolder(folder) as source:
        if head == "value" and not has_value_head(source):
            world.say(f"{folder} has no value head: a new one is drawn")
    num_parameters = sum(1 for chunk in chunks for _ in chunk.parameters())
    with world.bar("reading", num_parameters, " tensors") as bar:
        world.together(
            lambda: load_hf(chunks, folder, hf_config, world.groups, head=head, progress=lambda name: bar.update())
        )
    return chunks


def load_from_megatron(source: MegatronFolder, dtype: str, world: World) -> ModelChunks:
    """The model with the component's weights, cast to `dtype`."""
    chunks = world.build(source.hf_config, dtype, source.head)
    vocab_size = source.hf_config["vocab_size"]
    world.together(lambda: load_model(chunks, world.groups, source.folder, source.info, vocab_size))
    return chunks


def stored_dtype(folder: Path) -> str:
    """Dtype of a Hugging Face folder's embedding."""
    with HFFolder(folder) as source:
        if parameters.EMBEDDING not in source.names():
            raise UsageError(f"{folder} has no {parameters.EMBEDDING}: it is no language model of this program")
        found = source.dtype(parameters.EMBEDDING)
    if found not in SAFETENSORS_DTYPES:
        raise UsageError(f"the weights in {folder} are {found}: choose --dtype fp32 or bf16")
    return SAFETENSORS_DTYPES[found]


def copy_config(source: Path, target: Path) -> None:
    """config.json, tokenizer and generation config, so that the way back needs no other folder."""
    shutil.copyfile(source / "config.json", target / "config.json")
    copy_companions(source, target)
