"""What comes back from the engines, before it goes to the models."""

import pytest

from megappo.config.errors import ConfigError
from megappo.rollout.sampler import Sample
from megappo.trainer.rollouts import check_known


def test_tokens_that_the_critic_does_not_know_are_refused():
    samples = [Sample(0, 0, [3, 6], [-1.0, -1.0], "stop"), Sample(1, 0, [8], [-1.0], "length")]
    check_known(samples, 9)
    check_known([], 9)
    with pytest.raises(ConfigError, match="critic.model_path: the actor wrote token 8, .*vocab_size is 8 "):
        check_known(samples, 8)
