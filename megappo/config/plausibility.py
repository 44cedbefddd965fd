"""Values that are allowed and most probably a mistake: the dry run warns of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from megappo.config.schema import Config


@dataclass(frozen=True)
class Suspicion:
    """A key, whether its value is suspicious in a run, and why."""

    key: str
    is_odd: Callable[[float, Config], bool]
    reason: str


SUSPICIONS = (
    Suspicion("actor.optim.lr", lambda lr, run: 0.01 < lr < 1, "Adam takes 1e-7 to 1e-4 for a language model"),
    Suspicion(
        "critic.optim.lr", lambda lr, run: 0.01 < lr < 1 and run.has_critic, "Adam takes 1e-6 to 1e-4 for a critic"
    ),
    Suspicion(
        "rollout.sync.probe_tolerance",
        lambda tolerance, run: run.model.dtype == "bf16" and tolerance < 0.005,
        "in bf16 engine and trainer differ by about 0.01 to 0.05 on average, so that the run may stop at its first "
        "probe; 1e-3 is for model.dtype fp32",
    ),
    Suspicion("rollout.temperature", lambda value, run: not 0.1 <= value <= 2, "responses are sampled at about 1"),
    Suspicion("rollout.top_p", lambda value, run: value < 0.5, "most of what the policy would write is never sampled"),
    Suspicion("algorithm.gamma", lambda value, run: value < 0.9, "a reward is forgotten within some tokens"),
    Suspicion("algorithm.kl_ctrl.kl_coef", lambda value, run: value > 1, "the penalty outweighs scores of 0 to 1"),
    Suspicion(
        "actor.use_kl_loss",
        lambda used, run: bool(used) and run.algorithm.use_kl_in_reward,
        "the KL to the reference is in the rewards already; set algorithm.use_kl_in_reward to false to count it once",
    ),
    Suspicion("actor.kl_loss_coef", lambda value, run: value > 1, "the KL loss outweighs the policy's"),
    Suspicion("actor.entropy_coeff", lambda value, run: value > 0.1, "the bonus makes responses random"),
)


def config_warnings(config: Config) -> Iterator[str]:
    """Every suspicious value, one line each."""
    for suspicion in SUSPICIONS:
        value = attrgetter(suspicion.key)(config)
        if suspicion.is_odd(value, config):
            yield f"{suspicion.key} {value} is unusual: {suspicion.reason}"
