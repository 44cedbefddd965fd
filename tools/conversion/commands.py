"""convert.py's commands that convert and reshard."""

import argparse
import shutil
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from megappo.architecture import parameters
from megappo.architecture.architecture import BY_SAFETENSORS, Architecture, dtype_name
from megappo.architecture.families import HeadKind
from megappo.architecture.model_folder import CONFIG_FILE, INDEX, RELEASE, SINGLE, TRACKER
from megappo.architecture.parsing import read_architecture
from megappo.architecture.vision import TOWER
from megappo.checkpoint.checksums import write_sums
from megappo.checkpoint.component_folder import has_value_bias, head_of, load_model
from megappo.checkpoint.folders import components_of, is_component, stored_support
from megappo.checkpoint.metadata import EMBEDDING, ComponentInfo, read_component
from megappo.models.gpt import ModelChunks
from megappo.weights.hf_folder import copy_companions, write_hf_files
from megappo.weights.load import critic_architecture, has_value_head, load_hf
from megappo.weights.safetensors_io import HFFolder
from megappo_tools.conversion.resharding import reshard, save_model
from megappo_tools.conversion.world import UsageError, World, described


def hf_to_megatron(args: argparse.Namespace, world: World) -> None:
    """Convert a Hugging Face folder to a dist_checkpointing folder."""
    if is_component(args.input):
        raise UsageError(f"{args.input} is a Megatron folder already: megatron-to-hf, or reshard, takes it")
    architecture = read_architecture(args.input, head="value")
    if architecture.is_reward_model and not args.value_model:
        raise UsageError(f"{args.input} is a critic or a reward model: --value-model converts it")
    if args.value_model:
        architecture = critic_architecture(args.input, architecture.stored_support)
    else:
        architecture = architecture.with_head("policy")
    if args.megatron_lm and architecture.linear:
        raise UsageError(
            f"--megatron-lm: Megatron-LM has other names for the linear attention of {args.input}: leave the option out"
        )
    dtype = args.dtype or stored_dtype(args.input, architecture)
    chunks = load_from_hf(args.input, architecture, dtype, world)
    with world.staged(args.output) as output:
        folder = output / RELEASE if args.megatron_lm else output
        world.together(lambda: folder.mkdir(exist_ok=True))
        save_model(chunks, world.groups, folder)
        if world.rank == 0:
            copy_config(args.input, folder)
            if args.megatron_lm:
                (output / TRACKER).write_text(RELEASE)
    shapes = parameters.hf_shapes(architecture)
    world.log(f"wrote {args.output}: {described(without_tower(shapes), dtype)}")
    if architecture.vision:
        world.log(f"its vision tower is not converted: convert back with --hf-config {args.input}")


def megatron_to_hf(args: argparse.Namespace, world: World) -> None:
    """Convert a dist_checkpointing folder to a Hugging Face folder."""
    source = open_megatron(args.input, args.hf_config)
    head = source.architecture.head
    if args.value_model and head == "policy":
        raise UsageError(f"--value-model: {args.input} has no value head")
    if head == "policy_value" and not args.value_model:
        world.log(f"{args.input} has a value head besides, which is left out: --value-model writes the critic instead")
    chunks = load_from_megatron(source, args.dtype or source.dtype, world)
    embedding, vocab_size = source.info.tensors[EMBEDDING], source.architecture.vocab_size
    if (padding := embedding.shape[0] - vocab_size) >= embedding.num_parts:  # more than this program pads
        world.log(
            f"{padding} rows of the vocabulary beyond config.json's vocab_size {vocab_size} are left out as padding"
        )
    wanted: HeadKind = head if args.value_model or head == "value" else "policy"
    shapes = parameters.hf_shapes(source.architecture.with_head("value" if wanted != "policy" else "policy"))
    if wanted != "policy":
        shapes[parameters.VALUE_BIAS] = (source.architecture.num_values,)
    total = sum(map(prod, shapes.values()))
    with world.staged(args.output) as folder, world.bar("writing", total, "parameters") as bar:
        exported = source.architecture.with_head(wanted)
        write_hf_files(chunks, exported, world.groups, source.config_folder, folder, progress=bar.update)
    world.log(f"wrote {args.output}: {described(shapes, args.dtype or source.dtype)}")


def reshard_folder(args: argparse.Namespace, world: World) -> None:
    """Rewrite a component's folder, or a whole training checkpoint, with its files split for another layout."""
    components = components_of(args.input)
    if not components and not is_component(args.input):
        raise UsageError(f"{args.input} is neither a converted model nor a training checkpoint (step_XXXXXXXX)")
    sources = [open_megatron(folder, args.hf_config) for folder in components or [args.input]]
    sums: dict[str, str] = {}
    with world.staged(args.output) as folder, world.bar("resharding", len(sources), "components") as bar:
        for source in sources:
            target = folder / source.folder.name if components else folder
            world.together(lambda target=target: target.mkdir(exist_ok=True))
            chunks = world.build(source.architecture, source.dtype)
            sums |= reshard(chunks, world.groups, source.folder, source.info, target, source.architecture.vocab_size)
            bar.update()  # dist_checkpointing reports no progress
        if world.rank == 0:
            for name in ("state.json", CONFIG_FILE):
                if (args.input / name).is_file():
                    shutil.copyfile(args.input / name, folder / name)
            if not components:  # only a converted model has these files
                copy_companions(args.input, folder)
        if components:
            write_sums(folder, world.exchange, sums)
    for source in sources:
        kept = "with the optimizer's state" if source.info.tensors.keys() - source.info.model.keys() else "weights only"
        elements = sum(prod(entry.shape) for entry in source.info.tensors.values())
        world.log(
            f"{source.folder.name}: tensor {args.tensor} x pipeline {args.pipeline} x expert {args.expert}, "
            f"{len(source.info.tensors)} tensors of {elements:,} elements, {kept}"
        )
    world.log(f"wrote {args.output}")


@dataclass(frozen=True)
class MegatronFolder:
    """A component's folder, with the architecture and metadata of its model."""

    folder: Path
    config_folder: Path
    architecture: Architecture
    info: ComponentInfo

    @property
    def dtype(self) -> str:
        return dtype_name(self.info.tensors[EMBEDDING].dtype)


def refuse_step(folder: Path) -> None:
    """Refuse a whole checkpoint where a command takes one model.

    Raises:
        UsageError: the folder holds the components of a training run.
    """
    names = ", ".join(str(path) for path in components_of(folder))
    if names:
        raise UsageError(f"{folder} is a whole training checkpoint: name one of its components, {names}")


def open_megatron(folder: Path, config_folder: Path | None) -> MegatronFolder:
    """Read the metadata of a component's folder, with its own config or the config of `--hf-config`."""
    refuse_step(folder)
    info = read_component(folder)
    if config_folder is None and not (folder / CONFIG_FILE).is_file():
        raise UsageError(
            f"{folder} carries no config.json: name the Hugging Face folder the model started from with --hf-config"
        )
    config_folder = config_folder or folder
    architecture = read_architecture(config_folder, head="value")  # of a reward model, too
    if EMBEDDING not in info.tensors:
        raise UsageError(f"{folder} holds no {EMBEDDING}: it is no language model of this program")
    support = stored_support(folder, architecture.stored_support)
    architecture = replace(architecture, head=head_of(info), value_bias=has_value_bias(info), support=support)
    return MegatronFolder(folder, config_folder, architecture, info)


def load_from_hf(folder: Path, architecture: Architecture, dtype: str, world: World) -> ModelChunks:
    """Build the model and load the folder's weights."""
    chunks = world.build(architecture, dtype)
    with HFFolder(folder) as source:
        if architecture.head == "value" and not has_value_head(source):
            world.log(f"{folder} has no value head: a new one is drawn")
    num_parameters = sum(1 for chunk in chunks for _ in chunk.parameters())
    with world.bar("reading", num_parameters, "tensors") as bar:
        world.together(lambda: load_hf(chunks, folder, architecture, world.groups, progress=lambda name: bar.update()))
    return chunks


def load_from_megatron(source: MegatronFolder, dtype: str, world: World) -> ModelChunks:
    """Build the model and load the component's weights, cast to `dtype`.

    Raises:
        UsageError: the model has a vision tower, and no folder with it is named.
    """
    has_weights = any((source.config_folder / name).is_file() for name in (SINGLE, INDEX))
    if source.architecture.vision and not has_weights:
        raise UsageError(
            f"{source.folder} lacks the vision tower, which training does not change: name the Hugging Face folder the "
            "model started from with --hf-config"
        )
    chunks = world.build(source.architecture, dtype)
    vocab_size = source.architecture.vocab_size
    world.together(lambda: load_model(chunks, world.groups, source.folder, source.info, vocab_size))
    return chunks


def without_tower(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are not a vision tower's."""
    return {name: shape for name, shape in shapes.items() if not name.startswith(TOWER)}


def stored_dtype(folder: Path, architecture: Architecture) -> str:
    """Return the dtype of a Hugging Face folder's embedding."""
    with HFFolder(folder, architecture) as source:
        if parameters.EMBEDDING not in source.names():
            raise UsageError(f"{folder} has no {parameters.EMBEDDING}: it is no language model of this program")
        found = source.dtype(parameters.EMBEDDING)
    if BY_SAFETENSORS.get(found) not in ("fp32", "bf16"):
        raise UsageError(f"the weights in {folder} are {found}: choose --dtype fp32 or bf16")
    return BY_SAFETENSORS[found]


def copy_config(source: Path, target: Path) -> None:
    """Copy config.json, tokenizer and generation config, so that converting back needs no other folder."""
    shutil.copyfile(source / CONFIG_FILE, target / CONFIG_FILE)
    copy_companions(source, target)
