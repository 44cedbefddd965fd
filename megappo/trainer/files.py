"""What the config names on disk: is it there, and can this program use it with these layouts? Reads headers only."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from megappo.architecture.families import (
    FAMILIES,
    divided_sizes,
    family_of,
    language_model,
    num_dense_layers,
    num_experts,
    num_key_value_heads,
    sliding_window,
)
from megappo.architecture.files import check_weights, end_tokens, read_model_config
from megappo.config.checks import context_errors, longest_row, nearest_divisors
from megappo.config.errors import shorten
from megappo.config.schema import Config, Parallel
from megappo.config.text_files import TextFileError

DATA_FORMATS = (".jsonl", ".parquet")
LATENT_KEYS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "first_k_dense_replace",
    "intermediate_size",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)
"""What config.json of a family with latent attention says besides; null counts as said where it means something."""
SIZES = (
    *("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
"""What every config.json says."""


def file_errors(config: Config) -> list[str]:
    """Missing or unusable files, one line each, naming the key, the path and the remedy."""
    actor = {"actor.parallel": config.actor.parallel}
    if config.kl_kinds and config.ref.parallel:
        actor["ref.parallel"] = config.ref.parallel
    critic = {"critic.parallel": config.critic.parallel} if config.has_critic else {}
    errors: list[str] = []
    if config.critic.model_path is None or not config.has_critic:
        errors += _model(config, "model.path", config.model.path, actor | critic)
    else:
        errors += _model(config, "model.path", config.model.path, actor)
        errors += _model(config, "critic.model_path", config.critic.model_path, critic)
    for key, paths in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        errors += [error for path in paths for error in _looked_at(key, path, _data_file(key, Path(path)))]
    folder = config.trainer.output_dir
    return [*errors, *_looked_at("trainer.output_dir", folder, _output_folder(folder))]


def _looked_at(key: str, path: str, faults: Iterator[str]) -> Iterator[str]:
    """What is wrong with a path's files, or with the path itself: too long, a loop of links, not to be read."""
    if "\0" in path:
        yield f"{key}: no path holds a NUL, found {shorten(repr(path))}: correct it"
        return
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        yield from faults
    except OSError as error:
        yield f"{key}: cannot look at {shorten(path)}: {error.strerror}: correct the path or its permissions"


def _model(config: Config, key: str, path: str, layouts: dict[str, Parallel]) -> Iterator[str]:
    if not path:
        return iter([f"{key} is empty: name the model's folder"])
    return _looked_at(key, path, _model_folder(config, key, Path(path), layouts))


def _model_folder(config: Config, key: str, folder: Path, layouts: dict[str, Parallel]) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{key}: no folder {folder}: download the model (hf download NAME --local-dir FOLDER) or correct the path"
        return
    if not (folder / "tokenizer_config.json").is_file():
        yield f"{key}: {folder} holds no tokenizer_config.json: complete the download"
    yield from _fault(key, check_weights, folder)
    yield from _fault(key, end_tokens, folder)
    try:
        hf_config = read_model_config(folder)
    except TextFileError as error:
        yield f"{key}: {error}"
    else:
        yield from _architecture(config, key, folder / "config.json", hf_config, layouts)


def _fault(key: str, read: Callable[[Path], object], folder: Path) -> Iterator[str]:
    try:
        read(folder)
    except TextFileError as error:
        yield f"{key}: {error}"


def _architecture(config: Config, key: str, file: Path, hf_config: dict, layouts: dict[str, Parallel]) -> Iterator[str]:
    found = (hf_config.get("architectures") or ["none"])[0]
    known = language_model(found) if key == "critic.model_path" else found
    if known not in FAMILIES:
        remedy = f"this version trains {', '.join(FAMILIES)}: choose one of these"
        yield f"{key}: {file} is of architecture {shorten(found)}; {remedy}"
        return
    hf_config = hf_config | {"architectures": [known]}
    missing = list(_missing(hf_config))
    if missing:
        yield f"{key}: {file} lacks {', '.join(missing)}: download it again"
        return
    yield from (f"{key}: {file}: {fault}: download it again" for fault in _contradictions(hf_config))
    for layout_key, parallel in layouts.items():
        yield from _divides(layout_key, parallel, file, hf_config)
        yield from _dense_stage(config, layout_key, parallel, file, hf_config)
    if key == "model.path":
        yield from _engine_divides(config, file, hf_config)
    positions = hf_config["max_position_embeddings"]
    yield from context_errors(config, f"{key}: {file}'s max_position_embeddings", positions, "lower these")
    window = sliding_window(hf_config)
    if window and longest_row(config) > window:
        yield (
            f"{key}: {file}'s sliding_window {window} is below data.max_prompt_length "
            f"{config.data.max_prompt_length} + rollout.max_response_length {config.rollout.max_response_length}: "
            "lower these, as neither trainer nor engine limits attention to a window"
        )


def _contradictions(hf_config: dict) -> Iterator[str]:
    """Sizes of config.json that no model can have."""
    heads, shared, experts = hf_config["num_attention_heads"], num_key_value_heads(hf_config), num_experts(hf_config)
    if experts and hf_config["num_experts_per_tok"] > experts:
        yield f"num_experts_per_tok {hf_config['num_experts_per_tok']} is more than the {experts} experts"
    if family_of(hf_config).latent_attention:
        size, name = hf_config["qk_rope_head_dim"], "qk_rope_head_dim"
    else:
        size, name = hf_config.get("head_dim") or hf_config["hidden_size"] // heads, "the size of a head"
        if heads % shared:
            yield f"num_key_value_heads {shared} does not divide num_attention_heads {heads}"
        if not hf_config.get("head_dim") and hf_config["hidden_size"] % heads:
            hidden = hf_config["hidden_size"]
            yield f"num_attention_heads {heads} does not divide hidden_size {hidden}, and head_dim is not set"
            return
    if size % 2:
        yield f"{name} is {size}, but rotary positions need an even one"


def _missing(hf_config: dict) -> Iterator[str]:
    family = family_of(hf_config)
    experts = family.experts
    ffn = [experts.ffn, "num_experts_per_tok"] if experts else ["intermediate_size"]
    shared = [key for key in experts.shared.keys if key != experts.ffn] if experts and experts.shared else []
    latent = LATENT_KEYS if family.latent_attention else ()
    may_be_null = ("q_lora_rank", *(() if experts and experts.router_bias else ("n_group", "topk_group")))
    for name in [*SIZES, *ffn, *shared, *latent]:
        if hf_config.get(name) is None and not (name in may_be_null and name in hf_config):
            yield name
    if experts and not any(hf_config.get(name) for name in experts.count):
        yield experts.count[-1]


def _divides(key: str, parallel: Parallel, file: Path, hf_config: dict) -> Iterator[str]:
    for name, (size, dimension, ways) in divided_sizes(hf_config, parallel).items():
        if size % ways:
            advice = f"{nearest_divisors(size, ways)} would"
            yield f"{key}.{dimension} {ways} does not divide {name} {size} of {file}: {advice}"
    yield from _stages(key, parallel, file, hf_config["num_hidden_layers"])
    for name, ways in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
        if ways > 1 and not num_experts(hf_config):
            yield f"{key}.{name} {ways}: {file} is of a dense model, without experts: set it to 1"
    if num_experts(hf_config) and parallel.tensor > 1 and not parallel.sequence:
        yield f"{key}.sequence must be true with {key}.tensor {parallel.tensor}, as {file} is of a mixture of experts"


def _stages(key: str, parallel: Parallel, file: Path, layers: int) -> Iterator[str]:
    chunks, split = parallel.num_chunks, parallel.pipeline_split
    product = f"{key}.pipeline {parallel.pipeline} x virtual_pipeline {parallel.virtual_pipeline} = {chunks}"
    if split is not None and sum(split) != layers:
        yield (
            f"{key}.pipeline_split {list(split)} has {sum(split)} layers together, num_hidden_layers of {file} is "
            f"{layers}: make them as many"
        )
    elif split is None and layers < chunks:
        yield f"{product} is more than num_hidden_layers {layers} of {file}: lower it"
    elif split is None and layers % chunks:
        more = layers % chunks
        example = shorten(str([layers // chunks + (chunk < more) for chunk in range(chunks)]))
        yield (
            f"{product} does not divide num_hidden_layers {layers} of {file}: "
            f"{nearest_divisors(layers, chunks)} would, or set {key}.pipeline_split, such as {example}"
        )


def _dense_stage(config: Config, key: str, parallel: Parallel, file: Path, hf_config: dict) -> Iterator[str]:
    """Without experts on it, a rank's whole Adam for experts would not know the number of steps that it saves."""
    component = key.removesuffix(".parallel")
    optim = {"actor": config.actor.optim, "critic": config.critic.optim}.get(component)
    first = (
        parallel.pipeline_split[0] if parallel.pipeline_split else hf_config["num_hidden_layers"] // parallel.pipeline
    )
    dense = num_dense_layers(hf_config)
    if optim and not optim.distributed and num_experts(hf_config) and parallel.pipeline > 1 and first <= dense:
        yield (
            f"{component}.optim.distributed must be true, as the first {dense} layers of {file} have no experts and "
            f"the first of {key}.pipeline {parallel.pipeline} stages has {first} layers"
        )


def _engine_divides(config: Config, file: Path, hf_config: dict) -> Iterator[str]:
    """SGLang repeats key-value heads where there are fewer than ranks."""
    ways, heads = config.rollout.tensor_parallel, hf_config["num_attention_heads"]
    if heads % ways:
        yield (
            f"rollout.tensor_parallel {ways} does not divide num_attention_heads {heads} of {file}: "
            f"{nearest_divisors(heads, ways)} would"
        )
    elif family_of(hf_config).latent_attention:
        return
    elif num_key_value_heads(hf_config) % ways and ways % num_key_value_heads(hf_config):
        yield (
            f"rollout.tensor_parallel {ways} neither divides num_key_value_heads {num_key_value_heads(hf_config)} of "
            f"{file} nor is a multiple of it: choose one that does"
        )


def _data_file(key: str, path: Path) -> Iterator[str]:
    if path.suffix not in DATA_FORMATS:
        yield f"{key}: {path} is neither .jsonl nor .parquet: convert it"
        return
    if not path.is_file():  # nor a pipe, which would be waited for
        yield f"{key}: no file {path}: create it or correct the path"
        return
    try:
        with path.open("rb") as file:
            if not file.read(1):
                yield f"{key}: {path} is empty: put prompts in it"
    except OSError as error:
        yield f"{key}: cannot read {path} ({error.strerror}): correct the path, or its rights"


def _output_folder(folder: str) -> Iterator[str]:
    """Whether the folder is there and can be written, or can be made."""
    if not folder.strip():
        yield "trainer.output_dir is empty: name a folder"
        return
    path = Path(folder)
    there = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not there.is_dir():
        yield f"trainer.output_dir: {there} is a file: name a folder"
        return
    try:
        with tempfile.TemporaryFile(dir=there):  # without a name, and gone at once
            for made in (path, *(there / name for name in path.parts)):
                with suppress(FileNotFoundError):
                    os.lstat(made)  # names may be too long
    except OSError as error:
        yield f"trainer.output_dir: cannot write in {there} ({error.strerror}): name a folder that you may write to"
