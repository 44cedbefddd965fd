"""Train by PPO, one process per GPU (or, without GPUs, per rank):

torchrun --nproc-per-node N -m megappo.train CONFIG [key=value ...]
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.runtime.interruption import EXIT_AGAIN, INTERRUPTION, LAUNCHER, Interrupted
from megappo.runtime.keeper import die_with
from megappo.runtime.status import STATUS, share_terminal

if __name__ == "__main__":
    # A rank that imports or waits in a collective runs no Python code: let Ctrl-C end it at once. Its children end
    # with it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "WORLD_SIZE" in os.environ:
        die_with(os.getppid())  # torchrun
        INTERRUPTION.listen()
    if os.environ.get("RANK") == "0":
        STATUS.start("imports")
    else:
        share_terminal()

import torch
import torch.distributed as dist

from megappo.commands.arguments import rank_arguments
from megappo.config.config_error import ConfigError
from megappo.config.loading import load_config
from megappo.config.schema import Config
from megappo.engines.handle import EngineHandle, start_engine
from megappo.engines.launch import nccl_variables, socket_dir
from megappo.errors import EXIT_CONFIG
from megappo.lab.estimate.fitting import resolve_offload
from megappo.lab.estimate.gpu_memory import Cluster
from megappo.lab.estimate.placed_model import Shapes
from megappo.lab.estimate.tables import switch_summary
from megappo.lab.plan.run_checks import check_run
from megappo.observe.console import escape_unprintable
from megappo.observe.loggers import Outlook
from megappo.placement.run_plan import RunPlan
from megappo.preflight.folder_lock import lock
from megappo.preflight.hub_models import download_models
from megappo.preflight.output_folder import already_finished, evaluation_of
from megappo.runtime import megatron_setup, platform
from megappo.runtime.failure import report, report_failed_threads
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.listening import stay_on_this_node
from megappo.runtime.machine import ONLY_RANK, SET_BY_TORCHRUN, bind, bind_near
from megappo.runtime.watchdog import Watchdog
from megappo.table import resolved

if TYPE_CHECKING:
    from megappo.trainer.run import Run

BUILD = "megappo.trainer.main:build_run"
"""Imported only by a run that has something to do: megatron-core and transformers take seconds on every rank."""
OUTLOOK = "megappo.lab.outlook:outlook_of"
"""Imported while the engine starts: the report reads Parquet files, whose library takes long to import."""
A_DAY = timedelta(days=1)


def main() -> int:
    """Run this rank.

    Exit codes: 2 for a config that cannot work, 1 for a run that failed, 3 if another rank failed and the launcher
    reports it, 75 for a run that has saved and should be started again.
    """
    args = rank_arguments()
    escape_unprintable()
    if fault := _environment_fault():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {fault}", file=sys.stderr)
        return EXIT_CONFIG
    rank = int(os.environ["RANK"])
    STATUS.end_step(heartbeat.phase, heartbeat.since)
    _set_up_process(rank)
    store = _join_store(rank)
    cleanup = ExitStack()
    code = 0
    ending: Exception | None = None
    try:
        _run(args, store, rank, cleanup)
    except Interrupted as reason:
        code, ending = EXIT_AGAIN, reason
        if rank == 0 and LAUNCHER not in os.environ:  # which prints it
            print(f"interrupted by {reason}: everything is saved; start it again to resume", flush=True)
    except Exception as error:
        code, ending = report(error, store, rank), error
    try:
        cleanup.__exit__(type(ending) if ending else None, ending, None)  # the observer logs what ended the run
    except Exception as error:
        if code:  # the run's own error comes first
            print(f"error (rank {rank}): during cleanup: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            code = report(error, store, rank)
    STATUS.stop()
    # Exit without waiting for other ranks, which may be gone. After a successful run, too: threads of the process
    # groups can abort an interpreter that exits normally.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a run's config, as `config.loading.load_config` does, in a process that trains: the files of
    trainer.extensions may import megatron.core."""
    return load_config(path, overrides, before_extensions=megatron_setup.install)


class RunContext:
    """A run on this rank, `megappo.Trainer`: for a program that holds the loop itself.

    As a context manager it starts the engine, builds the models and yields a `megappo.trainer.run.Run`; all ranks
    together. A program that torchrun did not start is a run of one rank.

    Raises:
        ConfigError: the config cannot work. Another config can be tried.
        RuntimeError: this process has had a run.
    """

    _has_run = False

    def __init__(self, config: Config):
        self.config = config
        self._cleanup = ExitStack()

    def __enter__(self) -> "Run":
        if RunContext._has_run or dist.is_initialized():  # Megatron keeps groups and random states in globals
            raise RuntimeError("this process has had a run, or a process group: start another process for each run")
        with ExitStack() as stack:  # closed if anything below fails
            if not any(name in os.environ for name in SET_BY_TORCHRUN):
                os.environ.update(ONLY_RANK)
                stack.callback(lambda: [os.environ.pop(name) for name in ONLY_RANK])
                store: dist.Store = dist.HashStore()
            elif fault := _environment_fault():
                raise ConfigError(fault)
            else:
                die_with(os.getppid())  # torchrun
                store = _join_store(int(os.environ["RANK"]))
            rank = int(os.environ["RANK"])
            _set_up_process(rank)
            run = _build(_checked(self.config), store, rank, stack)
            if run is None:
                raise ConfigError("trainer.output_dir holds a finished run: name another folder")
            self._cleanup = stack.pop_all()
            RunContext._has_run = True
        return run

    def __exit__(self, *ending: Any) -> None:
        self._cleanup.__exit__(*ending)
        STATUS.stop()
        if ending[0] is None:
            dist.destroy_process_group()  # its threads would abort an interpreter that exits


def _environment_fault() -> str:
    """Return why this process can be no rank; "" if it can."""
    missing = [name for name in SET_BY_TORCHRUN if name not in os.environ]
    if not missing:
        return platform.unseen_gpus()
    return (
        f"megappo.train runs under torchrun, which sets {', '.join(missing)}: start it with megappo train CONFIG, or "
        "under SLURM with launch/slurm.sbatch"
    )


def _set_up_process(rank: int) -> None:
    """Do what megappo.torchrun does for its ranks, as plain torchrun may have started this one, and bind its cores."""
    report_failed_threads(f"rank {rank}")
    local_rank, ranks_per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks_per_node == int(os.environ["WORLD_SIZE"]):
        stay_on_this_node()
    platform.raise_open_file_limit()
    if not platform.has_cuda():
        bind(local_rank, ranks_per_node, platform.num_cores(), torch.get_num_threads())
    os.environ["TMPDIR"] = str(socket_dir())  # where torch's shared memory manager listens


def _join_store(rank: int) -> dist.Store:
    """Return torchrun's store, without what the ranks before a restart have left in it."""
    try:
        store, _, _ = next(dist.rendezvous("env://"))
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(f"error (rank {rank}): torchrun's store at {where} does not answer: {error}", file=sys.stderr)
        os._exit(1)
    return dist.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _run(args: argparse.Namespace, store: dist.Store, rank: int, cleanup: ExitStack) -> None:
    with STATUS.step("config check"):
        config = _load_config(args, store)
        if not config.recipe.has_steps:
            INTERRUPTION.never_saves()
        plan = _checked(config)
    run = _build(plan, store, rank, cleanup)
    if run is not None:
        with config.locating():
            resolved(config.recipe.loop)(run)


def _load_config(args: argparse.Namespace, store: dist.Store) -> Config:
    """Read the config, after the first rank of this node has downloaded the models that it names by id."""
    downloaded = f"models of node {os.environ.get('GROUP_RANK', '0')}"
    if os.environ["LOCAL_RANK"] != "0":
        store.wait([downloaded], A_DAY)
        return load_run_config(args.config, args.overrides)
    try:
        config = load_run_config(args.config, args.overrides)
        return load_run_config(args.config, args.overrides) if download_models(config) else config
    finally:
        store.set(downloaded, "")


def _checked(config: Config) -> RunPlan:
    world_size, ranks_per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    plan, errors = check_run(config, world_size, ranks_per_node, platform.compute_capability())
    if plan is None or errors:
        raise ConfigError(*errors)
    return plan


def _build(plan: RunPlan, store: dist.Store, rank: int, cleanup: ExitStack) -> "Run | None":
    """Start this rank's engine, join the other ranks, and build the run; return None if there is nothing to do."""
    config, gpu_bytes = plan.config, platform.gpu_bytes()
    if (bound := bind_near(platform.pci_address())) and rank < int(os.environ["LOCAL_WORLD_SIZE"]):
        print(f"rank {rank} is {bound}", flush=True)
    with config.locating():
        if rank == 0:  # before the ranks meet, so that no other error can come first
            store.set("finished", _occupy_folder(plan, cleanup))
        if store.get("finished"):  # waits for rank 0: other nodes may see another content of the folder
            return None
        if not config.recipe.has_steps:
            plan = replace(plan, requested=evaluation_of(plan.requested), config=evaluation_of(config))
        plan = resolve_offload(plan, Cluster(gpu_bytes) if gpu_bytes else None)
        watching = cleanup.enter_context(ExitStack())  # its callback runs after the callbacks of what starts below
        for name, value in shared_nccl_variables(plan).items():
            os.environ.setdefault(name, value)  # the engine inherits the environment
        engine_handle = start_engine(plan, rank, store, cleanup) if config.samples else EngineHandle()
        with STATUS.step("imports of Megatron"), platform.gc_disabled():
            build = resolved(BUILD)
            outlook = resolved(OUTLOOK)(plan, gpu_bytes) if rank == 0 else Outlook()
        timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
        with STATUS.step("process group"):
            dist.init_process_group(
                platform.backend(), store=store, rank=rank, world_size=plan.world_size, timeout=timeout
            )
        watching.callback(Watchdog(store, rank, plan.world_size, config.hang_timeout_seconds).stop)
        return build(plan, engine_handle, outlook, cleanup)


def _occupy_folder(plan: RunPlan, cleanup: ExitStack) -> str:
    """Lock the output folder on rank 0; return and print a message if the folder holds a finished run, else ""."""
    finished = already_finished(plan.config)
    if finished:
        print(finished, flush=True)
    else:
        cleanup.enter_context(lock(Path(plan.config.trainer.output_dir)))
        _print_capabilities(plan)
    return finished


def shared_nccl_variables(plan: RunPlan) -> dict[str, str]:
    """Return NCCL's variables where an engine joins a group of the trainer's; else none: the trainer is faster with
    NCCL's defaults."""
    shares_nccl = plan.config.recipe.has_rollouts and plan.route.shares_nccl
    return nccl_variables(plan.config.rollout.server_args) if shares_nccl else {}


def _print_capabilities(plan: RunPlan) -> None:
    found = [f"{name} {value}" for name, value in platform.capabilities().items() if value != platform.NOT_INSTALLED]
    STATUS.print(", ".join(found))
    has_te = platform.has_transformer_engine()
    STATUS.print(switch_summary(plan, Shapes(), capability=platform.compute_capability(), has_te=has_te))


if __name__ == "__main__":
    sys.exit(main())
