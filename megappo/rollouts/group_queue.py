"""The groups that no step has trained on yet: which prompts may be begun, and on which groups a step trains.

A step trains on all groups of a draw, on the first that are finished (over-sampling), or on the first whose scores
differ, of as many draws as that takes (dynamic sampling: Yu et al. 2025, DAPO, section 3.2; the keys are verl's).
"""

from collections import Counter
from collections.abc import Callable, Iterable

from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.rollouts.journal import Choice, GroupFacts


def next_lookahead(lookahead: int, waited_frac: float, max_staleness: int) -> int:
    """Return how many batches the engines may run ahead in the next step: one more if the models have waited for
    responses in more than a tenth of the last one. Otherwise prompts that are begun earlier would only become older.
    """
    return min(lookahead + (waited_frac > 0.1), max_staleness)


def block_of(position: int, size: int) -> int:
    """Return the number of the block of `size` prompts, in the order of drawing, that a prompt belongs to."""
    return position // size


class GroupQueue:
    """Prompts, and facts about their groups, that no step has trained on or left out yet. The same on all ranks.

    The admitted prompts that no step has trained on never exceed the draws of 1 + rollout.max_staleness steps. Steps
    train on groups in the order in which their prompts were drawn, and wait for slow groups, so no group becomes too
    old. The first finished groups are the shortest: a batch of these alone would mislead the update. Only with
    data.gen_batch_size does a step take the first finished groups of its draw, and leaves out the others.

    Attributes:
        drawn: prompts that are not admitted yet, by position.
        prompts: admitted prompts, by position.
        admitted: positions of the prompts that engines begin, in this order. Engines count in it, so it only grows.
        finished: facts about the finished groups, in the order of their prompts.
        lookahead: draws that may be begun ahead of the step's own; at most rollout.max_staleness.
        num_draws: draws for the current step.

    Source: the limit is AReaL's (Fu et al. 2025, arXiv 2505.24298, eq. 3). There, a response may be too old when it is
        finished; here no response is too old, and none is dropped.
    """

    def __init__(self, config: Config):
        self._config = config
        self._size = config.data.train_batch_size
        self._draw_size = config.data.draw_size
        self._over_samples = config.data.gen_batch_size is not None
        self.drawn: dict[int, Prompt] = {}
        self.prompts: dict[int, Prompt] = {}
        self.admitted: list[int] = []
        self.finished: list[GroupFacts] = []
        self.num_draws = 0
        self.lookahead = min(1, config.rollout.max_staleness)

    @property
    def takes_equal(self) -> bool:
        """True if the step has made its most draws: groups that algorithm.filter_groups leaves out then fill it up."""
        filters = self._config.algorithm.filter_groups
        return filters.enable and self.num_draws >= filters.max_num_gen_batches

    def admit(self, step: int, draw: Callable[[], Iterable[tuple[int, Prompt]]]) -> None:
        """Admit as many prompts as may be begun.

        Args:
            draw: draws prompts with their positions; all ranks together.
        """
        num_steps = min(1 + self.lookahead, self._config.trainer.total_steps - step + 1)
        most = max(self._size - 1, (num_steps - 1) * self._draw_size)
        num_equal = sum(facts.is_equal for facts in self.finished)
        while len(self.prompts) - num_equal <= most:
            if not self.drawn:
                if self.takes_equal:
                    return  # equal groups fill up the step
                self.drawn |= draw()
                self.num_draws += 1
            for position in list(self.drawn)[: self._draw_size]:
                self.prompts[position] = self.drawn.pop(position)
                self.admitted.append(position)

    def num_waiting(self) -> Counter[int]:
        """Return the number of groups that no step has trained on or left out yet, by block."""
        return Counter(block_of(position, self._draw_size) for position in self.prompts)

    def has_enough(
        self,
        waiting: Counter[int],
        finished: Counter[int],
        equal: Counter[int],
    ) -> bool:
        """Return whether the blocks before the first one with an unfinished group have enough groups for a step; with
        over-sampling, this block's finished groups count, too. Groups that algorithm.filter_groups leaves out count
        once no group is unfinished.

        Args:
            waiting: see `num_waiting`.
            finished: number of finished groups of each block, without groups that algorithm.filter_groups leaves out.
            equal: number of finished groups of each block that algorithm.filter_groups leaves out.
        """
        num_found = 0
        for block, num_waiting in sorted(waiting.items()):
            is_whole = finished[block] + equal[block] >= num_waiting
            if is_whole or self._over_samples:
                num_found += finished[block]
            if num_found >= self._size or not is_whole:
                return num_found >= self._size
        return self.takes_equal and num_found + equal.total() >= self._size

    def choose(self, step: int) -> Choice:
        """Return the groups that a step trains on, once there are enough: the first groups that `has_enough`
        counts."""
        ranked = sorted(self._usable(), key=lambda facts: (facts.is_equal, facts.position))
        chosen = sorted(facts.position for facts in ranked[: self._size])
        left_out = {facts.position for facts in self.finished if facts.is_equal}
        if not self._config.rollout.runs_ahead:
            left_out |= self.prompts.keys()
        elif self._over_samples:
            last = block_of(chosen[-1], self._draw_size)
            left_out |= {position for position in self.prompts if block_of(position, self._draw_size) <= last}
        return Choice(step, chosen, sorted(left_out.difference(chosen)), self.num_draws)

    def _usable(self) -> list[GroupFacts]:
        """Return the finished groups before the first unfinished one; with over-sampling, of the blocks up to its
        own."""
        facts_of = {facts.position: facts for facts in self.finished}
        usable = []
        incomplete = None
        for position in sorted(self.prompts):
            block = block_of(position, self._draw_size)
            if incomplete is not None and (block > incomplete or not self._over_samples):
                break
            if position in facts_of:
                usable.append(facts_of[position])
            elif incomplete is None:
                incomplete = block
        return usable

    def remove(self, choice: Choice) -> None:
        """Remove the groups of a choice."""
        removed = {*choice.chosen, *choice.left_out}
        self.finished = [facts for facts in self.finished if facts.position not in removed]
        for position in removed:
            self.prompts.pop(position, None)
            self.drawn.pop(position, None)

    def adapt_lookahead(self, waited_frac: float) -> None:
        """Decide how far the engines may run ahead in the next step; `waited_frac` is the same on all ranks."""
        self.lookahead = next_lookahead(self.lookahead, waited_frac, self._config.rollout.max_staleness)
