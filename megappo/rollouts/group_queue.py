"""The groups that no step has trained on yet in a run that samples ahead of training: which prompts may be begun, and
on which groups a step trains."""

from collections.abc import Callable, Iterable, Mapping

from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.rollouts.journal import Choice, GroupFacts


def has_enough(
    finished: Mapping[int, int], unfinished: Mapping[int, int], step: int, batch_size: int, max_staleness: int
) -> bool:
    """Return whether a step can train on `batch_size` finished groups, those of the oldest weights first, and leave
    later steps so few of each age that none becomes too old.

    Groups of version v can be trained on until step v + 1 + max_staleness. So after this step at most as many of
    version v or older may remain as the steps until then take.

    Args:
        finished, unfinished: number of groups by the version of the weights with which they were begun.
    """
    if sum(finished.values()) < batch_size:
        return False
    num_finished = num_unfinished = 0
    for version in sorted(finished.keys() | unfinished.keys()):
        num_finished += finished.get(version, 0)
        num_unfinished += unfinished.get(version, 0)
        num_left = num_unfinished + max(0, num_finished - batch_size)
        if num_left > batch_size * max(0, version + 1 + max_staleness - step):
            return False
    return True


class GroupQueue:
    """Prompts, and facts about their groups, that no step has trained on or left out yet. The same on all ranks.

    As many prompts may be admitted and not trained on as 1 + rollout.max_staleness steps take. A step trains on the
    groups of the oldest weights first, in the order in which they were begun, as the first finished ones are the
    shortest. It waits until those that it leaves can be trained on before they are too old: see `has_enough`.

    Attributes:
        drawn: prompts that are not admitted yet, by position.
        prompts: admitted ones, by position.
        admitted: positions of the prompts that engines begin, in this order. Engines count in it, so it only grows.
        finished: facts about the finished groups, in the order in which steps train on them.
        num_left: finished groups that the last step has left.
        num_draws: batches of prompts that were drawn for the current step.

    Source: the limit is AReaL's (Fu et al. 2025, arXiv 2505.24298, eq. 3). There, a response may be too old when it is
    finished; here none is, and none is dropped.
    """

    def __init__(self, config: Config):
        self._config, self._size = config, config.data.train_batch_size
        self.drawn: dict[int, Prompt] = {}
        self.prompts: dict[int, Prompt] = {}
        self.admitted: list[int] = []
        self.finished: list[GroupFacts] = []
        self.num_draws = 0
        self.num_left = 0

    @property
    def takes_equal(self) -> bool:
        """True if groups that algorithm.filter_groups leaves out fill up the step."""
        filters = self._config.algorithm.filter_groups
        return filters.enable and self.num_draws >= filters.max_num_gen_batches

    def admit(self, step: int, draw: Callable[[], Iterable[tuple[int, Prompt]]]) -> None:
        """Admit as many prompts as may be begun; fewer while the models are slower than the engines, as they would only
        become older. With two steps ahead slow responses still delay none: see docs/async.md.

        Args:
            draw: draws a batch of prompts with their positions; all ranks together.
        """
        max_staleness = self._config.rollout.max_staleness
        lookahead = max_staleness if self.num_left < self._size else min(2, max_staleness)
        num_steps = min(1 + lookahead, self._config.trainer.total_steps - step + 1)
        most = max(self._size - 1, (num_steps - 1) * self._size)
        num_equal = sum(facts.is_equal for facts in self.finished)
        while len(self.prompts) - num_equal <= most:
            if not self.drawn:
                if self.takes_equal:
                    return  # equal groups fill up the step
                self.drawn |= draw()
                self.num_draws += 1
            for position in list(self.drawn)[: self._size]:
                self.prompts[position] = self.drawn.pop(position)
                self.admitted.append(position)

    def choose(self, step: int) -> Choice:
        """Return the groups that a step trains on, once there are enough."""
        chosen = sorted(facts.position for facts in self.finished[: self._size])
        left_out = [facts.position for facts in self.finished[self._size :] if facts.is_equal]
        return Choice(step, chosen, left_out, self.num_draws)

    def remove(self, choice: Choice) -> None:
        """Remove the groups of a choice."""
        removed = {*choice.chosen, *choice.left_out}
        self.finished = [facts for facts in self.finished if facts.position not in removed]
        self.num_left = len(self.finished)
        for position in removed:
            del self.prompts[position]
