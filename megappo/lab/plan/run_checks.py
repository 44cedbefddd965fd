"""Check everything about a run that can be checked before it starts: contradictions between keys, then files and
folders, of which only headers are read. Without torch, so that the dry run is instant."""

import difflib
import importlib.util
import os
import re
import shlex
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from megappo.architecture.adapter_folder import adapter_tensor_errors
from megappo.architecture.architecture import Architecture
from megappo.architecture.families import ORIGINAL
from megappo.architecture.fit import (
    adapter_errors,
    dense_stage_errors,
    engine_fit_errors,
    fit_errors,
    router_errors,
)
from megappo.architecture.model_folder import (
    check_companions,
    check_tensors,
    download_command,
    end_tokens,
    hub_id,
    num_head_outputs,
    other_kind,
    shape_folder,
)
from megappo.architecture.parameters import adapts_experts
from megappo.architecture.parsing import read_architecture
from megappo.architecture.switches import te_fault, te_refusal
from megappo.checkpoint.folders import METADATA
from megappo.config.config_error import ConfigError, Downloadable, Errors, Missing, looked_in, shorten
from megappo.config.eval_sets import context_errors, eval_sets, longest_request, tasks
from megappo.config.schema import Config
from megappo.config.score_checks import step_scores_errors
from megappo.config.sections import OTHER_KIND, ending
from megappo.config.text_files import MissingFileError, TextFileError
from megappo.data.tokenizer import tokenizer_fault
from megappo.observe.files import HF_ACTOR, HF_CRITIC, HF_REWARD_MODEL
from megappo.observe.loggers import logger_errors
from megappo.placement.components import REWARD_MODEL_KEY, ComponentSpec, Setting, components_of
from megappo.placement.run_plan import RunPlan, plan_run
from megappo.preflight.hub_models import missing_id
from megappo.preflight.output_folder import resume_errors
from megappo.runtime.machine import search_path
from megappo.userland.spec import BUILTIN, parse_spec

# ServerArgs that `engines.launch` and Engine set; a user's value would break the client, the safety or the placement.
RESERVED = {"model_path", "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "tokenizer_worker_num"}
RESERVED |= {"tp_size", "random_seed", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step"}
RESERVED |= {"incremental_streaming_output", "enable_return_routed_experts"}
RESERVED |= {"enable_lora", "max_lora_rank", "lora_target_modules", "lora_paths", "max_loras_per_batch"}
RESERVED |= {"pp_size", "lora_strict_loading", "enable_weights_cpu_backup"}
PARSERS = {
    "tool_call_parser": Path("srt", "function_call", "function_call_parser.py"),
    "reasoning_parser": Path("srt", "parser", "reasoning_parser.py"),
}
"""Key of the rollout section -> the file of SGLang with the names of its parsers."""
TOKENIZER_KEYS = ("model.path", REWARD_MODEL_KEY)
"""Keys of folders whose tokenizer a run reads, as it does a reference's and teachers': a critic reads the tokens of
model.path."""
DIVIDING = ("ep_size", "dp_size", "attn_cp_size", "moe_dp_size")
"""ServerArgs with numbers of ranks into which SGLang divides an engine's (0.5.23, arg_groups/parallel_hook.py)."""
REFUSAL = "a message containing <|channel|> tags"
"""Text in a chat template that refuses a message's content with the marks of GPT-OSS's channels."""
CACHES = "HOME or XDG_CACHE_HOME"
MAKE = ".venv/bin/python tools/make_example.py {} --output outputs/{}"
EXAMPLES = {"outputs/quickstart": "bash launch/quickstart.sh", "outputs/rlhf": "bash launch/rlhf.sh"}
MADE = ("grid", "calculator", "compaction", "voyage", "smollm2", "squares")
EXAMPLES |= {f"outputs/{name}": MAKE.format(name, name) for name in MADE}
"""Folder of models and data that shipped configs name -> the command that makes it."""
FIELDS = "srt/arg_groups/fields"
"""SGLang's folder with the classes that declare the fields of ServerArgs."""


def check_run(
    config: Config, world_size: int, ranks_per_node: int | None = None, capability: int | None = None
) -> tuple[RunPlan | None, list[str]]:
    """Return the plan of a run, and every error in its config, one line each, after the place of its key:
    contradictions between keys, then layouts, then files that are `Missing`. A config that contradicts itself has no
    plan.

    Args:
        ranks_per_node: None if all ranks are on one node.
        capability: compute capability of the run's GPUs, times ten; None without GPUs, or if they are unknown.
    """
    plan, errors = None, list(_gpu_errors(config) if capability else ())
    try:
        plan = plan_run(config, world_size, ranks_per_node)
        errors += plan.sleep_errors(on_gpus=capability is not None)
    except ConfigError as error:
        errors += error.errors
    errors += [*file_errors(config, capability), *_user_code_errors(config), *_template_errors(config)]
    errors += server_args_errors(config.rollout.server_args, config.rollout.tensor_parallel)
    errors += logger_errors(config.trainer.loggers)
    for key in PARSERS:
        parser, known = getattr(config.rollout, key), _known_parsers(key)
        if parser is not None and known and parser not in known:
            errors.append(f"rollout.{key}: SGLang has no {shorten(parser)}: choose {', '.join(known)}")
    errors += cache_errors()
    errors += output_errors(config, resumes=plan is not None)
    return plan, config.located(sorted(dict.fromkeys(errors), key=lambda error: isinstance(error, Missing)))


def _gpu_errors(config: Config) -> Errors:
    # sglang-kernel 0.4.10: "rmsnorm failed to dispatch Float"
    if config.model.dtype == "fp32" and config.starts_engines:
        yield (
            "model.dtype: fp32 does not run on GPUs, where SGLang's norm takes 16-bit numbers alone: set "
            "model.dtype=bf16, or run on the CPU: CUDA_VISIBLE_DEVICES= before the command, and plan without --gpu"
        )
    # SGLang 0.5.23, managers/scheduler.py, pause_generation: "in_place" returns while the last forward pass still runs.
    if not config.rollout.recompute_cache:
        yield (
            "rollout.recompute_cache: false would let engines on GPUs write new weights while a forward pass reads "
            "them, which SGLang does not wait for: set it to true"
        )


def _user_code_errors(config: Config) -> Errors:
    every_task = tasks(config).values()
    for key, weights in {one.reward_key: one.reward.weights for one in every_task}.items():
        for spec in weights:
            yield from _missing(spec, key, BUILTIN)
    for key, rollout in {one.environment_key: one.rollout for one in every_task}.items():
        for spec in filter(None, (rollout.environment, *rollout.tools, rollout.agent)):
            yield from _missing(spec, key, {})
        if rollout.agent_command is not None:
            yield from _command_errors(rollout.agent_command, key)
    for name in config.reward.pass_env if config.trainer.replay_rollouts is None else ():
        if name not in os.environ:
            yield f"reward.pass_env names {shorten(repr(name))}, which is not set here: set it, or drop it"


def _template_errors(config: Config) -> Errors:
    """Yield an error for episodes with a chat template that refuses turns as they were sampled, as GPT-OSS's does."""
    keys = [one.environment_key for one in tasks(config).values() if one.rollout.has_episodes]
    for name in ("chat_template.jinja", "tokenizer_config.json") if keys else ():
        file = Path(config.model.path, name)
        with suppress(OSError):  # other checks report what is missing
            if REFUSAL in file.read_text("utf-8", "replace"):
                yield (
                    f"{keys[0]}: the chat template in {file} refuses a turn as it was sampled, with <|channel|> marks, "
                    "so an episode could have no second turn: train single responses, or another model"
                )


def _missing(spec: str, key: str, builtin: Mapping[str, str]) -> Errors:
    try:
        parse_spec(spec, key, builtin)
    except ValueError as error:
        yield str(error)
    except OSError as error:  # the name is too long, or a folder may not be entered
        yield f"{key}: cannot read {shorten(spec)} ({error.strerror}): correct the path, or make it readable"


def _command_errors(command: str, key: str) -> Errors:
    """Yield what keeps a command from being started: its program, or a script that it names, is missing."""
    try:
        program, *arguments = shlex.split(command)
    except ValueError as error:
        yield f"{key} {shorten(repr(command))} is no command: {error}: name a program and its arguments"
        return
    if shutil.which(program, path=search_path()) is None:
        yield f"{key}: no program {shorten(program)} here: install it, or correct the name"
    for script in arguments[:1]:
        if script.endswith(".py") and not os.path.isfile(script):
            yield f"{key}: no file {script}{looked_in(script)}: correct the path"


def server_args_errors(arguments: Mapping[str, object], num_ranks: int = 1) -> Errors:
    """Yield what is wrong with rollout.server_args, one line each, for engines of `num_ranks` ranks."""
    known = known_names()
    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for name, value in arguments.items():
        if name in DIVIDING and value not in divisors:
            yield (
                f"rollout.server_args: {name} {value} does not divide rollout.tensor_parallel {num_ranks}: choose one "
                f"of {divisors}"
            )
        elif name in RESERVED:
            yield f"rollout.server_args: {name} may not be set: megappo sets it itself; remove it"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else "remove it"
            yield f"rollout.server_args: SGLang does not know {name}: {advice}"


def _sglang_folder() -> Path | None:
    """Return the folder of the installed SGLang's source; None where SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _known_parsers(key: str) -> tuple[str, ...]:
    """Return the names of the installed SGLang's parsers for calls or thoughts, read as `known_names` are."""
    sglang = _sglang_folder()
    if sglang is None:
        return ()
    source = (sglang / PARSERS[key]).read_text()
    return tuple(re.findall(r'^        "([\w.-]+)": \w+Detector,', source, re.M))


@cache
def known_names() -> frozenset[str]:
    """Return the fields of the installed SGLang's ServerArgs; none where SGLang is not installed.

    They are read from its source, as importing it takes seconds.
    """
    sglang = _sglang_folder()
    if sglang is None:
        return frozenset()
    source = "\n".join(file.read_text() for file in (sglang / FIELDS).glob("[a-z]*.py"))
    return frozenset(re.findall(r"^    (\w+): \w", source, re.M))


def file_errors(config: Config, capability: int | None) -> list[str]:
    """Return missing or unusable files, one line each, with the key, the path and the remedy.

    Args:
        capability: as for `check_run`.
    """
    errors: list[str] = []
    by_folder: dict[Setting, list[ComponentSpec]] = defaultdict(list)
    try:
        for spec in components_of(config).values():
            by_folder[spec.folder].append(spec)
    except ConfigError as error:
        errors += error.errors
    for setting, specs in by_folder.items():
        errors += _path_errors(*setting, _model_folder(config, capability, *setting, specs))
        for spec in specs:
            errors += _path_errors(*spec.weights, _megatron_folder(spec)) if spec.weights.value else ()
    files = [("data.train_files", path) for path in config.data.files] if config.recipe.has_steps else []
    for one in eval_sets(config).values():
        files += [(one.key, path) for path in one.files]
    for key, path in files:
        errors += _path_errors(key, path, _data_file(key, Path(path)))
    return list(dict.fromkeys(errors))  # several components may have one model and one layout


def output_errors(config: Config, *, resumes: bool = True) -> list[str]:
    """Return why a run cannot write into its folders or, with `resumes`, resume from their content, one line each."""
    errors: list[str] = []
    trainer = config.trainer
    folders = {"trainer.output_dir": trainer.output_dir, "trainer.record_rollouts": trainer.record_rollouts}
    for key, folder in folders.items():
        if folder is not None:
            errors += _path_errors(key, folder, _output_folder(key, Path(folder)))
    if errors or not resumes:
        return errors
    return resume_errors(config)


def cache_errors() -> Errors:
    """Yield an error if torch and other libraries cannot write their caches."""
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield from _path_errors(CACHES, folder, _output_folder(CACHES, Path(folder)))


def _path_errors(key: str, path: str, faults: Errors) -> Errors:
    """Yield the errors of a path's files, or of the path itself: too long, a loop of links, no permission."""
    if "\0" in path:
        yield f"{key}: no path holds a NUL, found {shorten(repr(path))}: correct it"
        return
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)
        yield from faults
    except OSError as error:
        yield f"{key}: cannot inspect {shorten(path)}: {error.strerror}: correct the path or its permissions"


def _model_folder(
    config: Config, capability: int | None, key: str, path: str, specs: Sequence[ComponentSpec]
) -> Errors:
    """Yield the errors of a folder, and of the components that start from its weights."""
    folder = Path(path)
    shape = shape_folder(folder)  # of a missing model, if it ships: layouts are checked by that
    is_downloadable = missing_id(path) is not None and (shape == folder or hub_id(shape) == path)
    if not folder.is_dir():
        by_run = "; megappo train downloads models of the hub, and takes this for an id, as there is no folder "
        by_run = by_run + folder.parts[0] if is_downloadable else ""
        remedy = _making(folder) or f"download the model ({download_command(path)}) or correct the path{by_run}"
        yield (Downloadable if is_downloadable else Missing)(f"{key}: no folder {folder}{looked_in(folder)}: {remedy}")
        specs = specs if shape.is_dir() else ()
    elif kind := other_kind(folder):
        yield f"{key}: {folder} {kind}"
        return
    else:
        yield from _model_files(key, folder, has_policy=any(spec.head == "policy" for spec in specs))
    for spec in specs:
        try:
            architecture = read_architecture(shape, head="value" if spec.head == "value" else "policy")
        except ConfigError as faulty:
            yield from (f"{key}: {error}" for error in faulty.errors)
        else:
            yield from _fit_errors(config, capability, spec, architecture)
            yield from _tower_errors(config, key, architecture)
            adapted = replace(architecture, lora=spec.lora)
            if key == REWARD_MODEL_KEY:
                yield from _reward_model_errors(config, adapted)
            elif spec.adapter is not None:
                yield from adapter_tensor_errors(
                    spec.adapter, adapted, f"{spec.offload.key.removesuffix('offload')}adapter"
                )


def _model_files(key: str, folder: Path, *, has_policy: bool) -> Errors:
    if (has_policy or key in TOKENIZER_KEYS) and (fault := tokenizer_fault(folder)):
        yield Missing(f"{key}: {fault}")
    for read in (check_tensors, check_companions, end_tokens):
        try:
            read(folder)
        except TextFileError as error:
            kind = Missing if isinstance(error, MissingFileError) else str
            yield kind(f"{key}: {error}")


def _megatron_folder(spec: ComponentSpec) -> Errors:
    """Yield the errors of a Megatron folder, from its names and the names in its metadata."""
    key, folder = spec.weights.key, spec.megatron_folder
    if spec.training is not None and spec.lora is not None:
        remedy = f"set {spec.training.key}.lora to null, or convert the folder (megappo convert megatron-to-hf)"
        yield f"{key}: adapters stand beside the weights of a Hugging Face folder: {remedy}"
    if not (folder / METADATA).is_file():
        yield (
            f"{key}: {folder} has no {METADATA}{looked_in(folder)}: name a torch_dist checkpoint of one model, or the "
            "folder above it; Megatron-LM converts its other formats (--ckpt-convert-format torch_dist)"
        )
    else:  # the metadata is a pickle, which holds the names of files as they are
        named = set(re.findall(rb"__\d+_\d+\.distcp", (folder / METADATA).read_bytes()))
        missing = [name for name in sorted(map(bytes.decode, named)) if not (folder / name).is_file()]
        if missing:
            yield f"{key}: {folder} lacks {shorten(', '.join(missing))}, which its {METADATA} names: copy it again"


def _fit_errors(config: Config, capability: int | None, spec: ComponentSpec, architecture: Architecture) -> Errors:
    """Yield where the model does not fit layouts, engines and the length of rows."""
    key, (parallel_key, parallel), training = spec.folder.key, spec.parallel, spec.training
    yield from fit_errors(architecture, parallel, f"{parallel_key}.{{}}".format)
    if key == f"{config.full_kl_model}.model_path":
        vocab_size = read_architecture(shape_folder(Path(config.model.path))).vocab_size
        if vocab_size != architecture.vocab_size:
            yield (
                f"{key}: {architecture.file} has vocab_size {architecture.vocab_size}, and the actor {vocab_size}: a "
                "KL of kind full needs equal ones: choose another kind, such as k1 or k3"
            )
    if spec.lora is not None:
        yield from adapter_errors(architecture, spec.lora, parallel, parallel_key.removesuffix(".parallel"))
        sends = config.samples and spec.lora is config.sent_lora
        if sends and adapts_experts(architecture.with_lora(spec.lora)):
            yield (
                f"actor.lora.target_modules: {architecture.file} is of a mixture of experts, whose adapters engines "
                "take merged only: set rollout.sync.merge_adapters to true, or leave gate_proj, up_proj and down_proj "
                "out"
            )
        if sends and architecture.full_heads:
            yield (
                f"actor.lora: engines take adapters of {architecture.file}, whose layers have different heads, merged "
                "only: set rollout.sync.merge_adapters to true"
            )
    if training is not None:
        changed = architecture.with_lora(spec.lora).with_frozen(spec.frozen)
        yield from router_errors(changed, training.settings.router, training.key)
        if not training.settings.optim.distributed:
            yield from dense_stage_errors(architecture, parallel, training.key)
    if key == "model.path" and config.recipe.has_rollouts:
        yield from engine_fit_errors(architecture, config.rollout.tensor_parallel)
        if config.rollout.routing_replay and architecture.experts is None:
            yield f"rollout.routing_replay: {architecture.file} is of no mixture of experts: set it to false"
    fault = te_fault(architecture, parallel, config.model.dtype, capability)
    if config.model.layer_spec == "transformer_engine" and fault:
        yield te_refusal(f"{fault}, which {architecture.file} needs")
    file, window = architecture.file, None if architecture.windows else architecture.sliding_window
    name, positions = architecture.row_limit
    if not config.recipe.has_rollouts:
        if config.data.max_length > min(positions, window or positions):
            yield f"{key}: {file} allows {min(positions, window or positions)} tokens: lower data.max_length to that"
        return
    yield from context_errors(config, f"{key}: {file}'s {name}", positions, is_fixed=name == ORIGINAL)
    longest = longest_request(config)
    if window and longest.tokens > window:
        yield (
            f"{key}: {file}'s sliding_window {window} is below {longest.lengths}: lower these, as neither trainer "
            "nor engine limits attention to a window"
        )


def _tower_errors(config: Config, key: str, architecture: Architecture) -> Errors:
    """Yield the error of a model that cannot read the images of the actor's rows."""
    with suppress(ConfigError):  # reported with model.path
        actor = read_architecture(shape_folder(config.model.path))
        if actor.vision and config.recipe.has_rollouts and architecture.reads_images_as != actor.reads_images_as:
            yield (
                f"{key}: {architecture.file} lacks a vision tower of the actor's kind, with the image token and sizes "
                f"of patches of {actor.file}, and would misread images: choose a model of {actor.name}"
            )
        if actor.vision and key == "model.path":
            if config.trainer.replay_rollouts:
                yield f"trainer.replay_rollouts: a record holds no images, which {actor.file} reads: sample instead"
            for name, teacher in config.teachers.items():
                if teacher.url:
                    yield f"teachers.{name}.url: servers get no images, which {actor.file} reads: set model_path"


def _reward_model_errors(config: Config, architecture: Architecture) -> Errors:
    """Yield why a model cannot score responses, by its config.json."""
    found = f"{REWARD_MODEL_KEY}: {architecture.file} is of architecture {architecture.named}"
    if config.reward_model.adapter is not None:
        yield from adapter_tensor_errors(config.reward_model.adapter, architecture)
        return
    if not architecture.is_reward_model:
        yield f"{found}, without a score: name a *ForSequenceClassification or *ForTokenClassification of one label"
    elif (labels := _num_labels(architecture)) != 1:
        remedy = "name a reward model of one label, or set num_labels to 1 there if its head has one"
        yield f"{found} with {labels} labels: {remedy}"
    if architecture.scores_steps:
        yield from step_scores_errors(config, architecture.named)


def _num_labels(architecture: Architecture) -> int:
    """Return the outputs of a reward model's head, by config.json or else by its files, if these can be read."""
    with suppress(TextFileError):
        return max(architecture.num_labels, num_head_outputs(architecture.file.parent))
    return architecture.num_labels


def _data_file(key: str, path: Path) -> Errors:
    if path.is_dir():
        yield f"{key}: {path} is a folder: name its files"
    elif not path.is_file():  # nor a pipe, which would be waited for
        remedy = "write several as a list, [A,B]" if "," in str(path) else "create it or correct the path"
        yield Missing(f"{key}: no file {path}{looked_in(path)}: {_making(path) or remedy}")
    elif not ending(path.name):
        yield f"{key}: {path} {OTHER_KIND}"
    elif not path.stat().st_size:
        yield f"{key}: {path} is empty: put prompts in it"
    elif not os.access(path, os.R_OK):
        yield f"{key}: cannot read {path}: correct the path, or its rights"


def _making(path: Path) -> str:
    """Return the remedy where a file or folder of a shipped example is missing; "" for any other path."""
    command = EXAMPLES.get("/".join(path.parts[:2]))
    return f"make the example ({command}) or correct the path" if command else ""


def _output_folder(key: str, path: Path) -> Errors:
    """Check that the folder can be written to, or created."""
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not there.is_dir():
        yield f"{key}: {there} is a file: name a folder"
        return
    for name in (HF_ACTOR, HF_CRITIC, HF_REWARD_MODEL):
        if (path / name).is_file():
            yield f"{key}: {path / name} is a file, but the trained model will be a folder there: remove it"
    try:
        with tempfile.TemporaryFile(dir=there):  # without a name, and gone at once
            for name in path.parts:
                with suppress(FileNotFoundError):
                    (there / name).lstat()  # names may be too long
    except OSError as error:
        reason = f"{error.strerror}{looked_in(there)}"
        yield f"{key}: cannot write in {there} ({reason}): name a folder that you may write to"
