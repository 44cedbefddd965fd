"""The proof that an engine runs the actor's weights: both must give the same tokens the same log-probs."""

import torch

from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset
from megappo.rollout.client import EngineError
from megappo.trainer.component import Component
from megappo.trainer.rollouts import Rollouts

NUM_PROMPTS = 4  # continued by each engine
ROUNDING = {"bf16": 0.05, "fp32": 1e-3}
"""model.dtype -> the mean difference of log-probs that rounding may cause."""


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
        self.prompts = prompts.at([i % len(prompts) for i in range(count)])
        self._calls = 0

    def __call__(self) -> dict[str, float]:
        """`sync/log_prob_diff/{mean,max}` if it is this sync's turn; all ranks together.

        Raises:
            EngineError: the difference is too large; see `check_log_probs`.
        """
        self._calls += 1
        interval = self.config.rollout.sync.probe_interval
        if interval == 0 or (self._calls - 1) % interval:
            return {}
        batch = self.rollouts.probe(self.prompts)
        at_actor = self.actor.scatter(batch)
        rows = at_actor.gather(at_actor.forward(), batch.rows, {"log_probs": "old_log_probs"})
        difference = (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs() * rows.response_mask
        engines = rows.ids % self.rollouts.num_engines
        zeros = torch.zeros(self.rollouts.num_engines)
        sums = zeros.index_add(0, engines, difference.sum(dim=1))
        counts = zeros.index_add(0, engines, rows.response_mask.sum(dim=1))
        largest = float(difference.max()) if difference.numel() else 0.0
        all_sums, all_counts, maxima = zip(*self.actor.exchange.share((sums, counts, largest)), strict=True)
        means = sum(all_sums) / sum(all_counts)
        worst = int(means.argmax())  # of many engines, one that is stale would not show in the mean of all
        check_log_probs(f"engine {worst}'s probe", float(means[worst]), self.config)
        return {"sync/log_prob_diff/mean": float(means.mean()), "sync/log_prob_diff/max": max(maxima)}


def check_log_probs(tokens: str, difference: float, config: Config) -> None:
    """See that engine and actor agree.

    Args:
        tokens: whose, for the message. difference: of the log-probs, the mean over them.
    Raises:
        EngineError: they differ by more than `rollout.sync.probe_tolerance`.
    """
    tolerance = config.rollout.sync.probe_tolerance
    if not difference <= tolerance:
        raise EngineError(
            f"trainer and SGLang engine disagree about the log-probs of {tokens} by {difference:.3g} on average, more "
            f"than rollout.sync.probe_tolerance = {tolerance}: {_cause(difference, config.model.dtype)}"
        )


def _cause(difference: float, dtype: str) -> str:
    """What may be behind a difference, and what to do about it."""
    rounding = ROUNDING[dtype]
    if not difference <= rounding:
        return f"more than rounding in {dtype} explains, so the engine does not run the actor's weights"
    other = ", or set model.dtype to fp32" if dtype == "bf16" else ""
    return f"rounding in {dtype} may cause up to about {rounding} with the same weights: raise it to {rounding}{other}"
