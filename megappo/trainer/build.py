"""Building a run from its config: groups, models, engines, data, observation. The only place that knows them all."""

import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo import platform
from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.folders import LATEST, STATE, read_state, step_of
from megappo.checkpoint.store import CheckpointStore
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset, batch_errors, open_datasets
from megappo.data.tokenizer import load_tokenizer, stop_token_ids
from megappo.observe.files import CHECKPOINTS
from megappo.observe.memory import PhaseMemory
from megappo.observe.metrics import METRICS_FILE
from megappo.observe.observer import open_observer
from megappo.observe.timers import Timers
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.placement.ranks import format_ranks, placement_layouts
from megappo.ppo.kl import kl_controller
from megappo.ppo.reward_shaping import RunningMoments
from megappo.rewards.pool import RewardPool, load_reward
from megappo.rollout.inference_engine import Engine
from megappo.sync.build import build_sync, engine_sleeps
from megappo.sync.route import find_route
from megappo.trainer.component import Component
from megappo.trainer.models import Models
from megappo.trainer.preflight import shared_vocabulary
from megappo.trainer.probe import Probe
from megappo.trainer.rollouts import Rollouts
from megappo.trainer.run import Run, Stateful, models_of
from megappo.trainer.train_engines import build_engines


def build_run(config: Config, cleanup: ExitStack) -> Run:
    """Everything a run needs on this rank; all ranks together, after the default process group exists.

    Args:
        cleanup: what must be ended when the run ends, however it ends, is registered here.
    """
    layouts = placement_layouts(config, dist.get_world_size())
    architecture = read_architecture(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    exchange = Exchange(dist.group.WORLD)
    store = CheckpointStore(Path(config.trainer.output_dir) / CHECKPOINTS, config.trainer.keep_checkpoints, exchange)
    checkpoint = store.latest()
    engine = start_engine(config, layouts["rollout"], cleanup)  # early: it starts while the rest is built
    rewards = start_rewards(config, cleanup) if engine is not None else None
    vocab_size = shared_vocabulary(config)
    train_prompts, val_prompts = load_prompts(config, tokenizer, vocab_size, exchange)
    if platform.has_cuda():  # an engine sizes its KV cache by the memory that is free: let no model take any before
        exchange.share(engine.wait_ready().url if engine is not None else None)
    timeout = timedelta(seconds=config.trainer.process_group_timeout_seconds)
    layouts_of_models = {name: layout for name, layout in layouts.items() if name != "rollout"}
    groups = build_groups(layouts_of_models, config.trainer.seed, timeout)
    engines = build_engines(config, groups)
    models = Models(
        config, {name: Component(name, layout, engines[name], exchange) for name, layout in layouts_of_models.items()}
    )
    kl, reward_moments = kl_controller(config.algorithm.kl_ctrl), RunningMoments()
    start_step = load_checkpoint(config, checkpoint, store, models, {"kl": kl, "reward_moments": reward_moments})
    start = starting_point(checkpoint, start_step, Path(config.trainer.output_dir))
    observer = open_observer(
        config.trainer.output_dir,
        config.trainer.total_steps,
        enabled=exchange.rank == 0,
        resume_step=start_step + 1 if checkpoint else 0,
    )
    cleanup.callback(observer.close)
    for line in (*([start] if start else []), *config.absences):
        observer.message(line)
    client = engine.wait_ready() if engine is not None else None
    route = find_route(config, layouts)
    weight_sync = build_sync(config, route, architecture, engines["actor"], client, exchange)
    own_engine = layouts["rollout"].shard_of(exchange.rank) if client is not None else None
    rollouts = Rollouts(
        config,
        tokenizer,
        client,
        rewards,
        exchange,
        observer,
        engine_number=own_engine,
        num_engines=layouts["rollout"].data,
        vocab_size=vocab_size,
        stop_token_ids=ends,
    )
    return Run(
        config=config,
        architecture=architecture,
        exchange=exchange,
        models=models,
        client=client,
        sleeps=own_engine is not None and engine_sleeps(route, own_engine),
        weight_sync=weight_sync,
        probe=Probe(config, train_prompts, rollouts, models.actor),
        rollouts=rollouts,
        train_prompts=train_prompts,
        val_prompts=val_prompts,
        kl=kl,
        reward_moments=reward_moments,
        store=store,
        observer=observer,
        timers=Timers(PhaseMemory()),
        start_step=start_step,
    )


def load_checkpoint(
    config: Config,
    checkpoint: Path | None,
    store: CheckpointStore,
    models: Models,
    parts: dict[str, Stateful],
) -> int:
    """Restore what `Run.save` saved; returns the steps done, 0 without a checkpoint."""
    if checkpoint is None:
        return 0
    state = checked_state(checkpoint, parts)
    if state["models"] != models_of(config):
        raise CheckpointError(
            f"{checkpoint} holds {state['models']}, but this run trains {models_of(config)}: set "
            "algorithm.adv_estimator and algorithm.shared_backbone as they were, or choose another trainer.output_dir"
        )
    store.load(checkpoint, models.trained)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["step"]


def checked_state(checkpoint: Path, parts: dict[str, Stateful]) -> dict[str, Any]:
    """state.json with everything that `Run.save` writes.

    Raises:
        CheckpointError: it lacks something, or is of another step than its folder's name says.
    """
    state = read_state(checkpoint)
    wrong = [] if state["step"] == step_of(checkpoint) else [f"step {state['step']}"]
    wrong += [] if isinstance(state.get("models"), str) else ["models"]
    wrong += [name for name, part in parts.items() if not _has_numbers(state.get(name), part.state_dict())]
    if wrong:
        raise CheckpointError(
            f"{checkpoint / STATE} is not what a run saved there (see {', '.join(wrong)}): write the name of another "
            f"checkpoint into {checkpoint.parent / LATEST}, or choose another trainer.output_dir"
        )
    return state


def _has_numbers(found: object, expected: dict[str, float]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name), int | float) for name in expected)


def starting_point(checkpoint: Path | None, start_step: int, output_dir: Path) -> str:
    """What to say about a folder in which a run has been before; "" in a new one."""
    if checkpoint is not None:
        return f"going on after step {start_step} from {checkpoint}"
    if (output_dir / METRICS_FILE).exists():
        return (
            f"starting anew: the run before left no checkpoint in {output_dir}; its metrics are kept, with their date"
        )
    return ""


def start_rewards(config: Config, cleanup: ExitStack) -> RewardPool:
    """Start the reward function's workers."""
    reward = config.reward
    pool = load_reward(reward.function, num_workers=reward.num_workers, timeout_seconds=reward.timeout_seconds)
    cleanup.callback(pool.close)
    return pool


def start_engine(config: Config, layout: Layout, cleanup: ExitStack) -> Engine | None:
    """Start this rank's SGLang engine, if it is the first rank of an engine's group; does not wait for it."""
    rank = dist.get_rank()
    shard = layout.shard_of(rank)
    if shard is None or layout.output_rank(shard) != rank:
        return None
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    node = rank // local_world
    ranks = layout.shard_ranks(shard)
    if ranks[-1] // local_world != node:
        raise ConfigError(
            [
                f"rollout.tensor_parallel: engine {shard} on ranks {format_ranks(ranks)} reaches over several nodes of "
                f"{local_world} ranks: make it a divisor of {local_world}, and start placement.rollout on a multiple"
            ]
        )
    first_on_node = next(i for i in range(layout.data) if layout.output_rank(i) // local_world == node)
    engine = Engine(
        config.model.path,
        config.rollout,
        config.model.dtype,
        index=shard - first_on_node,
        gpu_ids=gpu_ids([r % local_world for r in ranks]),
        log_path=Path(config.trainer.output_dir) / "engines" / f"engine_{shard}.log",
        seed=config.trainer.seed + shard,
    )
    cleanup.callback(engine.stop)
    engine.start()
    return engine


def gpu_ids(local_ranks: list[int]) -> list[str]:
    """The node's GPUs of some local ranks, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    if not platform.has_cuda():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(max(local_ranks) + 1)]
    return [names[i] for i in local_ranks]


def load_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, exchange: Exchange
) -> tuple[PromptDataset, dict[str, PromptDataset]]:
    """Training prompts, and held-out ones by dataset name; all ranks together, each of which checks its share.

    Raises:
        ConfigError: what is wrong with them, on every rank.
    """
    train, val = open_datasets(config, tokenizer)
    errors = []
    for dataset in (train, *val.values()):
        mine = dataset.check(vocab_size, lambda size: range(exchange.rank, size, exchange.world_size))
        errors += dataset.fault_lines(exchange.share(mine))
    errors += batch_errors(train)
    if errors:
        raise ConfigError(errors)
    return train, val
