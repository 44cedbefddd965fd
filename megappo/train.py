"""Train by PPO, one process per GPU (or, without GPUs, per rank):

torchrun --nproc-per-node N -m megappo.train CONFIG [key=value ...]
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from megappo.runtime.interruption import EXIT_AGAIN, INTERRUPTION, Interrupted
from megappo.runtime.lifetime import die_with

if __name__ == "__main__":
    # A rank that imports or waits in a collective runs no Python code: let Ctrl-C end it at once. What it has started
    # ends with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "WORLD_SIZE" in os.environ:
        die_with(os.getppid())  # torchrun
        INTERRUPTION.listen()

import torch
import torch.distributed as dist

from megappo.config.errors import ConfigError
from megappo.config.help import config_parser
from megappo.config.loading import load_config
from megappo.engines.handle import EngineHandle, start_engine
from megappo.engines.launch import home_of_sockets, nccl_variables
from megappo.estimate.fitting import resolve_offload
from megappo.estimate.memory import Cluster
from megappo.estimate.shapes import Shapes
from megappo.estimate.switching import switch_table
from megappo.observe.console import escape_unprintable
from megappo.placement.run_plan import RunPlan
from megappo.preflight import lock
from megappo.preflight.arrangement import check_run
from megappo.preflight.resuming import already_finished
from megappo.runtime import megatron_setup, platform
from megappo.runtime.cores import bind
from megappo.runtime.failure import report
from megappo.runtime.imports import without_collector
from megappo.runtime.listening import stay_on_this_node
from megappo.runtime.threads import report_failures
from megappo.runtime.watchdog import Watchdog
from megappo.table import resolved

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAINING = "megappo.trainer.main:train"
"""Imported only for a run that has something to do: megatron-core and transformers take seconds on every rank."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank; the process's exit code: 2 for a config that cannot work, 1 for a run that failed, 3 for one that
    another rank's end has ended, about which the launcher says more, 75 for one that has saved and is to be started
    again."""
    description = "Train a language model by PPO: Megatron actor and critic, SGLang rollouts."
    parser = config_parser("torchrun --nproc-per-node N -m megappo.train", description)
    args = parser.parse_intermixed_args(arguments)
    escape_unprintable()
    if lacking := [name for name in OF_TORCHRUN if name not in os.environ]:
        remedy = "launch/slurm.sbatch" if "SLURM_PROCID" in os.environ else "launch/local.sh CONFIG"
        found = "" if "WORLD_SIZE" in lacking else f" (WORLD_SIZE is another's: {', '.join(lacking)} are not set)"
        print(f"error: megappo.train runs under torchrun: start it with {remedy}{found}", file=sys.stderr)
        return 2
    if unseen := platform.unseen_gpus():
        if os.environ["LOCAL_RANK"] == "0":
            print(f"error: {unseen}", file=sys.stderr)
        return 2
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report_failures(f"rank {rank}")
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        stay_on_this_node()  # plain torchrun has not,
    platform.raise_open_file_limit()  # nor has it raised this
    if not platform.has_cuda():
        place = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        bind(*place, platform.num_cores(), torch.get_num_threads())
    os.environ["TMPDIR"] = str(home_of_sockets())  # where torch's manager of shared memory listens
    try:
        torchrun_store, _, _ = next(dist.rendezvous("env://"))
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"error (rank {rank}): torchrun's store at {where} does not answer: {error}", file=sys.stderr)
        os._exit(1)
    # torchrun's store outlives ranks that it starts again: what the ones before have left there would mislead them.
    store = dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", torchrun_store)
    cleanup = ExitStack()
    code = 0
    try:
        _run(args, store, rank, world_size, cleanup)
    except Interrupted as reason:
        code = EXIT_AGAIN
        if rank == 0:
            print(f"interrupted by {reason}: all is saved; started again, the run goes on", flush=True)
    except Exception as error:
        code = report(error, store, rank, world_size)
    try:
        cleanup.close()
    except Exception as error:
        if code:  # the run's own error comes first
            print(f"error (rank {rank}): while clearing up: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            code = report(error, store, rank, world_size)
    # Without waiting for ranks that will not come any more. After a run that went well, too: threads of the process
    # groups can abort an interpreter that ends its own way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(args: argparse.Namespace, store: dist.Store, rank: int, world_size: int, cleanup: ExitStack) -> None:
    # What a file of trainer.extensions imports may import megatron.core.
    config = load_config(args.config, args.overrides, before_extensions=megatron_setup.install)
    if config.trainer.eval_only:
        INTERRUPTION.never_saves()
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    plan, errors = check_run(config, world_size, ranks_per_node, on_gpus=platform.has_cuda())
    if plan is None or errors:
        raise ConfigError(*errors)
    with config.locating():
        _train(plan, store, rank, cleanup)


def _train(plan: RunPlan, store: dist.Store, rank: int, cleanup: ExitStack) -> None:
    config, world_size, gpu_bytes = plan.config, plan.world_size, platform.gpu_bytes()
    if rank == 0:  # before the ranks meet, so that no other's error can come first
        finished = already_finished(config)
        if finished:
            print(finished, flush=True)
        else:
            cleanup.enter_context(lock.take(Path(config.trainer.output_dir)))
            _print_capabilities(plan)
        store.set("finished", finished)
    if store.get("finished"):  # waits for rank 0: what a folder holds may look different elsewhere
        return
    plan = resolve_offload(plan, Cluster(gpu_bytes) if gpu_bytes else None)
    for name, value in shared_nccl_variables(plan).items():
        os.environ.setdefault(name, value)  # the engine takes its environment from here
    own = EngineHandle()
    if config.trainer.replay_rollouts is None and not config.trainer.eval_only:  # an evaluation's: of a checkpoint
        own = start_engine(plan, rank, store, cleanup)
    with without_collector():
        train = resolved(TRAINING)
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    dist.init_process_group(platform.backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    Watchdog(store, rank, world_size, config.hang_timeout_seconds)
    train(plan, own, cleanup)


def shared_nccl_variables(plan: RunPlan) -> dict[str, str]:
    """Return NCCL's variables where an engine joins a group of the trainer's; else none: the trainer is faster with
    NCCL's defaults."""
    return nccl_variables(plan.config.rollout.server_args) if plan.route.shares_nccl else {}


def _print_capabilities(plan: RunPlan) -> None:
    found = platform.capabilities()
    width = max(map(len, found))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in found.items()))
    has_te = platform.has_transformer_engine()
    table = switch_table(plan, Shapes(), on_gpu=platform.has_cuda(), has_te=has_te)
    print(f"what makes passes faster\n{table}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
