"""What a run reads: the tokenizer and the prompts."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megappo.batch.exchange import Exchange
from megappo.config.errors import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import PromptDataset, batch_errors, open_datasets
from megappo.data.tokenizer import load_tokenizer, stop_token_ids
from megappo.placement.components import shared_vocabulary
from megappo.rewards.forms import NOTHING
from megappo.rewards.pool import RewardPool


@dataclass(frozen=True)
class Datasets:
    """A run's prompts, and how they are read.

    Attributes:
        stop_token_ids: end a response, and belong to it.
        vocab_size: tokens below it are known to every model.
        val: dataset name -> its prompts.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    train: PromptDataset
    val: dict[str, PromptDataset]

    def check(self, exchange: Exchange) -> list[str]:
        """See that all prompts can be used, but for those to be left out; all ranks together, each of which looks at
        its share. Gives what is left out or cut, one line for each reason.

        Raises:
            ConfigError: what is wrong with them, on every rank.
        """
        errors, notes = [], []
        for dataset in (self.train, *self.val.values()):
            mine = dataset.check(self.vocab_size, lambda size: range(exchange.rank, size, exchange.world_size))
            parts = exchange.share(mine)
            errors += dataset.errors(parts)
            notes += dataset.leave_out(parts)
        errors += batch_errors(self.train)
        if errors:
            raise ConfigError(*errors)
        return notes


def load_datasets(config: Config, rewards: RewardPool | None, exchange: Exchange) -> Datasets:
    """The prompts of a run, which are yet to be checked; all ranks together.

    Args:
        rewards: this rank's, if it has any; what the function takes of the records is read on all ranks.
    Raises:
        ConfigError: the tokenizer or a file cannot be used.
    """
    of_ranks = exchange.share(rewards and rewards.takes)
    takes = next(filter(None, of_ranks), NOTHING)
    tokenizer = load_tokenizer(config.model.path)
    ends = stop_token_ids(config.model.path, config.rollout.stop, tokenizer)
    return Datasets(tokenizer, ends, shared_vocabulary(config), *open_datasets(config, tokenizer, takes))
