"""Dry run without GPU or torchrun: what a config means, where everything would live, and what is wrong with it.

    megappo plan CONFIG [key=value ...] [--world-size N [--nodes N]] [--all] [--gpu h100 [--suggest]]

If the config alone is right, it tries the tokenizer, prompts and reward functions. With --gpu it estimates the memory
and seconds of each phase on GPUs of that type, and shows which fast paths are on there. Exits with 0 if the run could
start, with 2 after printing every error, one line each.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.architecture.model_folder import SHAPES, hub_id, shape_folder, shipped_shape
from megappo.commands.arguments import MOST_RANKS, plan_arguments
from megappo.config.checks import config_warnings
from megappo.config.config_error import ConfigError, Downloadable, Missing, counted, printable
from megappo.config.describe import config_help
from megappo.config.loading import load_config
from megappo.config.schema import Config
from megappo.lab.estimate.fitting import fits, resolve_offload
from megappo.lab.estimate.gpu_memory import ASSUMED, MARGIN_BYTES, Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import TimeEstimate
from megappo.lab.estimate.suggest import suggestions
from megappo.lab.estimate.tables import memory_errors, memory_table, switch_table, time_table
from megappo.lab.plan.first_config import first_config
from megappo.lab.plan.picture import placement_picture, rank_table
from megappo.lab.plan.plan_text import batch_summary, config_summary, evaluation_summary, weights_summary
from megappo.lab.plan.rehearsal import Findings, rehearse
from megappo.lab.plan.run_checks import check_run, known_names, output_errors
from megappo.observe.console import escape_unprintable
from megappo.placement.model_lines import replaced_heads
from megappo.placement.placing import leaves_world_open, smallest_world
from megappo.placement.run_plan import RunPlan
from megappo.preflight.folder_lock import in_use
from megappo.preflight.hub_models import download_models
from megappo.preflight.output_folder import already_finished, resume_warnings
from megappo.runtime.gpus import GIB, GPUS, GPUS_PER_NODE


def main(arguments: Sequence[str]) -> int:
    """Print the plan; return the process's exit code."""
    args = plan_arguments(arguments)
    escape_unprintable()
    if args.keys is not None or args.init:
        print(first_config(args.init, GPUS[args.gpu], args.gpus) if args.init else config_help(args.keys))
        return 0
    shown, warnings = io.StringIO(), list[str]()
    try:
        words = [*args.overrides, *_shape_override(args.shape)]
        config = load_config(args.config, words)
        if args.download and download_models(config):
            config = load_config(args.config, words)
        if "torch" not in sys.modules:  # by a file of trainer.extensions
            # Keep transformers from importing torch, which takes seconds: a tokenizer does not need it.
            sys.modules["torch"] = None  # type: ignore[assignment]
            os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that it found none
        with config.locating():
            world_size = args.world_size or _world_size(config)
            if args.nodes and world_size % args.nodes:
                raise ConfigError(f"--nodes {args.nodes} does not divide the {world_size} ranks: each has as many")
            with contextlib.redirect_stdout(shown):
                errors = _check(config, world_size, args, warnings)
    except ConfigError as error:
        errors = list(error.errors)
    for line in [*(f"warning: {one}" for one in warnings), *(f"error: {one}" for one in errors)]:
        print(line, file=sys.stderr, flush=True)  # before the plan, which is longer than a screen
    print(shown.getvalue(), end="", flush=True)
    if errors:
        if shown.getvalue():
            print(f"\nnot ready: {counted(len(errors), 'error')}, above the plan")
        return 2
    is_missing = any(isinstance(one, Missing) for one in warnings)
    error, once = ("other error", " once the missing files are here") if is_missing else ("error", "")
    found = f"no {error}, {counted(len(warnings), 'warning')} above the plan" if warnings else "nothing is wrong"
    ready = f"{found}: ready for {counted(world_size, 'process')} of megappo.train{once}"
    print(f"\n{already_finished(config) or ready}")
    return 0


def _shape_override(name: str | None) -> list[str]:
    """Return the override that has a shape in place of a model."""
    if name is None:
        return []
    shape = shipped_shape(name)
    if shape is None:
        known = ", ".join(sorted(folder.name for folder in SHAPES.iterdir()))
        raise ConfigError(f"--shape: no shape {name}: expected one of {known}")
    return [f"model.path={hub_id(shape)}"]


def _check(config: Config, world_size: int, args: argparse.Namespace, warnings: list[str]) -> list[str]:
    """Print every part of the plan that can be made, and add warnings; return the errors."""
    print(f"plan of {printable(args.config)} on {counted(world_size, 'rank')}\n")
    print(config_summary(config, all_keys=args.all_keys))
    capability = GPUS[args.gpu].capability if args.gpu else None
    plan, found = check_run(config, world_size, world_size // (args.nodes or 1), capability)
    ignored = Missing if args.ignore_missing else () if args.download else Downloadable
    errors = [error for error in found if not isinstance(error, ignored)]
    missing = [error for error in found if error not in errors]
    warnings += [*config_warnings(config), *(() if found else resume_warnings(config)), *missing]
    if plan is None:
        return errors
    recipe = plan.config.recipe
    notes = "\n  ".join([*([plan.route.describe()] if recipe.has_rollouts else ()), *plan.config.absences])
    print(f"\nplacement\n{placement_picture(plan)}\n  {notes}\n\n{rank_table(plan)}")
    if recipe.has_steps:
        print(f"\nbatch, per step\n{batch_summary(plan)}")
    if plan.config.evaluates and recipe.has_rollouts:
        print(f"\nevaluation\n{evaluation_summary(plan.config)}")
    if not found:
        print(f"\nweights, in {config.model.dtype}\n{weights_summary(plan)}")
        print("".join(f"  {line}\n" for line in replaced_heads(plan.components)), end="")
    if args.gpu:
        try:
            errors += config.located(_print_estimates(plan, args))
        except ConfigError as error:  # of a model's config.json, which may be among the errors already
            print(f"\nno estimate: {error.errors[0]}")
            errors = errors or config.located(error.errors)
    if errors:
        if set(errors) - set(config.located(output_errors(config))):
            return errors
    elif busy := in_use(Path(config.trainer.output_dir)):
        errors = config.located([busy])
    sys.stdout.flush()
    findings = Findings() if missing else rehearse(config, everything=args.all)
    warnings += findings.warnings
    unchecked = "weights, memory, engines"
    if any(teacher.url for teacher in config.teachers.values()):
        unchecked += ", the servers of teachers"
    if missing:
        unchecked = f"tokenizer, prompts, reward functions, environments (files are missing), {unchecked}"
    elif config.rollout.server_args and not known_names():
        unchecked = f"the names in rollout.server_args (this machine's SGLang could not be read), {unchecked}"
    print("\nchecked", *findings.checked, f"not checked: {unchecked}", sep="\n  ")
    return errors + config.located(findings.errors)


def _print_estimates(plan: RunPlan, args: argparse.Namespace) -> list[str]:
    """Print memory, seconds and layouts of a run on GPUs; return why it does not fit them."""
    gpu = GPUS[args.gpu]
    cluster = Cluster(gpu.memory, plan.ranks_per_node if args.nodes else GPUS_PER_NODE)
    for folder in dict.fromkeys(spec.folder.value for spec in plan.components.values()):
        shape = shape_folder(folder)
        if shape != Path(folder):
            print(f"\n{folder} is missing: the estimates take the shape {shape.name}, which ships with megappo")
    plan = resolve_offload(plan, cluster)
    memory = MemoryEstimate(plan, cluster)
    for line in plan.decisions():
        print(f"\n{line}")
    nodes = f"for nodes of {counted(cluster.gpus_per_node, 'GPU')}"
    print(f"\nGiB on each {gpu.name} of {gpu.memory / GIB:.1f}, estimated {nodes}\n{memory_table(memory)}")
    if fits(memory):
        most, phase = memory.fullest.peak
        free = f"at least {(gpu.memory - most) / GIB:.1f} GiB stay free on every GPU"
        print(f"  it fits: {free}; the fullest phase is {phase}")
        print(f"  keep {MARGIN_BYTES / GIB:.0f} GiB of that: {' and '.join(ASSUMED)} are assumed, not measured")
    kernels = "torch's layers" if plan.config.model.layer_spec == "torch" else "TransformerEngine, which set-up builds"
    table = switch_table(plan, cluster.shapes, capability=gpu.capability)
    print(f"\nfast paths on these GPUs, with {kernels}\n{table}")
    seconds = time_table(TimeEstimate(memory, gpu))
    print(f"\nestimated seconds of a step in which every row has the maximum length\n{seconds}")
    if args.suggest:
        print(f"\nlayouts that fit, the fastest by estimate first\n{suggestions(plan, cluster, gpu)}")
    return list(memory_errors(memory, gpu))


def _world_size(config: Config) -> int:
    """Return the ranks of the plan: torchrun's if `all` leaves them open, else the fewest that the placement needs."""
    named = smallest_world(config)
    of_launcher = os.environ.get("WORLD_SIZE", "")
    if leaves_world_open(config) and of_launcher.isdecimal() and 1 <= int(of_launcher) <= MOST_RANKS:
        return int(of_launcher)
    if named is None:
        raise ConfigError("placement: every component is on 'all' ranks: set their number with --world-size N")
    return named
