"""A few tokens that engines and actor are asked about after a sync, to prove it."""

from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset
from megappo.sync.proof import check_probe
from megappo.trainer.component import Component
from megappo.trainer.rollouts import Rollouts

NUM_PROMPTS = 4  # continued by each engine


class Probe:
    """A few tokens that every engine writes after a weight sync, and what the actor says of them.

    Args:
        prompts: the first of these, the same every time.
    """

    def __init__(self, config: Config, prompts: PromptDataset, rollouts: Rollouts, actor: Component):
        self.config = config
        self.rollouts = rollouts
        self.actor = actor
        # Every data-parallel shard of the actor needs a row.
        count = max(NUM_PROMPTS, -(-actor.layout.data // rollouts.num_engines))
        self.prompts = prompts.at([prompts.kept[i % len(prompts)] for i in range(count)])
        self._calls = 0

    def __call__(self) -> dict[str, float]:
        """`sync/log_prob_diff/{mean,max,warnings}` if it is this sync's turn; all ranks together.

        Raises:
            EngineError: the difference is too large; see `check_probe`.
        """
        self._calls += 1
        interval = self.config.rollout.sync.probe_interval
        if interval == 0 or (self._calls - 1) % interval:
            return {}
        batch = self.rollouts.probe(self.prompts)
        at_actor = self.actor.scatter(batch)
        rows = at_actor.gather(at_actor.forward(), batch.rows, {"log_probs": "old_log_probs"})
        rollouts = self.rollouts
        warn = rollouts.observer.message
        return check_probe(rows, rollouts.engine_number, self.config, self.actor.exchange, warn)
