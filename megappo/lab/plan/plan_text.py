"""The parts of a plan as text: a config's keys, a step's batch, evaluations, weights."""

import textwrap
from collections.abc import Iterator

from megappo.architecture.architecture import DTYPES
from megappo.config.config_error import counted, show
from megappo.config.eval_sets import eval_sets, longest_row
from megappo.config.loading import leaves
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.lab.estimate.gpu_memory import queue_bytes
from megappo.lab.estimate.placed_model import Shapes
from megappo.lab.plan.picture import aligned
from megappo.placement.run_plan import RunPlan
from megappo.runtime.gpus import GIB

WIDTH = 120


def config_summary(config: Config, *, all_keys: bool) -> str:
    """Return the keys that differ from their defaults, or all, with their values, a paragraph per section."""
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)
    lines = ["config" if all_keys else "config, where it differs from the defaults (--all-keys: all of it)"]
    for name, section in config.model_dump(mode="json", exclude_defaults=not all_keys).items():
        values = "  ".join(f"{key}={show(value)}" for key, value in leaves(section))
        lines.append(wrapper.fill(f"  {name:<9}  {values}"))
    return "\n".join(lines)


def evaluation_summary(config: Config) -> str:
    """Return the settings of each held-out data set; for a critic alone, the rollouts with which it is compared."""
    if config.recipe.trains == "critic":
        names = config.trainer.replay_held_out or ", ".join(config.data.val_names)
        return f"  the critic's values of held-out rollouts, sampled as in training: {names}"
    rows = [("", "responses", "temperature", "top_p", "top_k", "tokens at most", "reward", "played by")]
    for name, one in eval_sets(config).items():
        own = one.rollout
        numbers = [own.n, own.temperature, own.top_p, own.top_k, own.max_response_length]
        scorers = [*one.reward.weights, *(["reward_model"] if one.has_reward_model else [])]
        played = [" + ".join(scorers), own.agent or own.agent_command or own.environment or ", ".join(own.tools)]
        rows.append((name, *(f"{number:,g}" for number in numbers), *(part or "none" for part in played)))
    return aligned(rows)


BATCH_ROWS = (
    "data-parallel shards",
    "mini-batches per epoch",
    "epochs",
    "optimizer steps",
    "rows per mini-batch",
    "per shard, about",
    "micro-batches needed per rank and mini-batch, at best",
    "at worst",
)


def batch_summary(plan: RunPlan) -> str:
    """Return the step's totals, then each component's split of them."""
    columns, steps = [("", *BATCH_ROWS)], []
    for name, split in plan.batch_splits.items():
        fewest, most = split.shard_trajectories
        per_shard = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        counts = [plan.layouts[name].data, split.mini_batches, split.epochs, split.optimizer_steps, split.trajectories]
        columns.append((name, *map("{:,}".format, counts), per_shard, *map("{:,}".format, split.micro_batches)))
    for name, training in plan.training.items():
        steps.append(f"{name} {training.optimizer_steps(plan.config):,}")
    total = f"  whole run: {plan.config.trainer.total_steps:,} steps; optimizer steps: {', '.join(steps)}"
    totals = _rollout_totals(plan) if plan.config.recipe.has_rollouts else _example_totals(plan.config)
    return "\n".join([*totals, aligned(list(zip(*columns, strict=True))), total])


def _example_totals(config: Config) -> Iterator[str]:
    """Yield the size of a step's examples."""
    size, row = config.data.train_batch_size, longest_row(config)
    unit = {"critic": "trajectories", "reward_model": "pairs of examples"}.get(config.recipe.trains, "examples")
    worst = size * config.rows_together * row
    yield f"  {size:,} {unit} of at most {row:,} tokens each: {worst:,} tokens at worst"


def _rollout_totals(plan: RunPlan) -> Iterator[str]:
    """Yield the size of a step's rollouts."""
    data, rollout, num_engines = plan.config.data, plan.config.rollout, plan.layouts["rollout"].data
    row, drawn, trajectories = longest_row(plan.config), data.draw_size, data.train_batch_size * rollout.n
    limit = f", the first finished of {drawn:,} prompts" if drawn > data.train_batch_size else ""
    responses = counted(rollout.n, "response")
    lengths = f"{data.max_prompt_length:,} prompt + {rollout.max_response_length:,} response"
    yield f"  {data.train_batch_size:,} prompts x {responses} = {trajectories:,} trajectories{limit}"
    yield f"  at most {row:,} tokens each ({lengths}): {trajectories * row:,} tokens at worst"
    yield (
        f"  {num_engines} engine(s): about {drawn * rollout.n / num_engines:,.4g} trajectories each, "
        f"{rollout.max_running_requests:,} at once"
    )
    if batches := rollout.max_staleness:  # the engines run ahead
        most = queue_bytes(plan.config) / num_engines / GIB
        yield (
            f"  up to {1 + batches} batches of prompts are started and not trained: at most {most:,.2f} GiB of host "
            "memory for each engine"
        )


def weights_summary(plan: RunPlan) -> str:
    """Return each model's parameters, trained parameters, and bytes on the rank that holds most."""
    rows = [["", "parameters", "trained", "bytes on a rank, at most"]]
    shapes = Shapes()
    for name, spec in plan.components.items():
        shape = shapes.of(spec)
        most = max(map(sum, shape.stages(spec.parallel.value, beside_base=spec.base is not None)))
        trained = sum(shape.stages(Parallel(), trained=True)[0]) if spec.training else 0
        named = f"{name}, with the weights of the {spec.base}" if spec.base else name
        rows.append([named, f"{shape.size:,}", f"{trained:,}", f"{most * DTYPES[plan.config.model.dtype].nbytes:,}"])
        if shape.tower:
            rows.append([f"{name}'s vision tower, of these", f"{shape.tower:,}", "0", "in host memory"])
    return aligned(rows)
