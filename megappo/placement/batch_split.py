"""Split a step's batch into trajectories, mini-batches and micro-batches. Without torch."""

from dataclasses import dataclass

from megappo.config.eval_sets import longest_row
from megappo.placement.run_plan import RunPlan

Range = tuple[int, int]
"""The fewest and the most."""
SHORTEST_ROW = 2
"""Tokens of the shortest trajectory: a prompt of one, a response of one."""


@dataclass(frozen=True)
class BatchSplit:
    """One component's split of a step's trajectories.

    Attributes:
        shards: data-parallel shards.
        mini_batches: per epoch; 1 for a component that only computes log-probs.
        epochs: passes over the trajectories; 0 for a component that is not trained.
        trajectories: in one mini-batch, over all shards.
        shard_trajectories: of one mini-batch, per data-parallel shard (balanced by tokens, so about this many).
        micro_batches: of one mini-batch, per shard: if all rows are shortest, and longest.
    """

    shards: int
    mini_batches: int
    epochs: int
    trajectories: int
    shard_trajectories: Range
    micro_batches: Range

    @property
    def optimizer_steps(self) -> int:
        """Per PPO step."""
        return self.mini_batches * self.epochs


def batch_splits(plan: RunPlan) -> dict[str, BatchSplit]:
    """Return each component's split of a step's trajectories, by name."""
    splits, config = {}, plan.config
    for name, spec in plan.components.items():
        mini_batch, max_tokens = spec.mini_batch_prompts(config).value, spec.max_tokens.value
        epochs = spec.training.section.ppo_epochs if spec.training else 0
        trajectories = mini_batch * config.rollout.n
        shards, group = plan.layouts[name].data, plan.layouts[name].micro_batch_group
        shard = (trajectories // shards, _ceil(trajectories, shards))
        fewest, most = _ceil(shard[0] * SHORTEST_ROW, max_tokens), _ceil(shard[1], max_tokens // longest_row(config))
        micro = (_ceil(fewest, group) * group, _ceil(most, group) * group)
        splits[name] = BatchSplit(
            shards, config.data.train_batch_size // mini_batch, epochs, trajectories, shard, micro
        )
    return splits


def _ceil(number: int, size: int) -> int:
    return -(-number // size)
