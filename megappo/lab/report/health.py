"""Health of a run: rules that the metrics of each step are checked against. Torch-free.

A rule that begins to hold is one finding, with its remedy. It is counted in the metrics, and changes nothing unless
trainer.stop_on names it: the run then ends as after a signal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.lab.report.health_conditions import (
    GRADIENT_NORMS,
    SHAPED_RANGE,
    SPREAD,
    Condition,
    History,
    all_scores_equal,
    beyond_limits,
    beyond_scores,
    entropy_collapsed,
    few_effective_samples,
    gradient_jumped,
    groups_equal,
    grown,
    outside,
    pairs_unlearned,
    value_loss_large,
    values_useless,
)
from megappo.observe.findings import PREFIX, Examples, Finding, LoggedMetrics, Steps
from megappo.observe.loggers import Monitor, RunInfo
from megappo.observe.metrics_file import read_metrics
from megappo.table import Table

QUIET_STEPS = 10
"""Steps without a rule after which it is over; it is reported again only after that."""


@dataclass(frozen=True)
class Rule:
    """A condition under which a run is unhealthy.

    Attributes:
        metrics: metrics that the rule reads. It is checked in the steps that have one of them.
        figures: returns the figures for `message` where the rule holds, else ().
        meaning: the condition in words, for docs/metrics.md.
        message: a format string of the figures.
        remedy: what to do, a sentence without its full stop.
        page: page and section of the documentation about it.
        shows_responses: a finding has a few responses of the step.
        applies: returns whether the rule makes sense for a config, nested as in YAML.
    """

    metrics: tuple[str, ...]
    figures: Condition
    meaning: str
    message: str
    remedy: str
    page: str
    shows_responses: bool = False
    applies: Callable[[Mapping[str, Any]], bool] = field(default=lambda config: True)


LOWER_LR = "Lower actor.optim.lr or actor.ppo_epochs"


def _policy_loss(config: Mapping[str, Any]) -> Any:
    return config.get("actor", {}).get("policy_loss")


RULES: Table[Rule] = Table(
    "health rule",
    {
        "no_reward_signal": Rule(
            ("reward/score/mean", "reward/score/max", "reward/score/min"),
            all_scores_equal,
            "all scores of 5 steps are the same number",
            "every response of the last 5 steps has score {0:g}, so nothing can be learned",
            "Compare responses and labels with what reward.function expects; start from a model that is sometimes "
            "right",
            "docs/rewards.md#return-values",
            shows_responses=True,
        ),
        "equal_groups": Rule(
            ("reward/equal_groups_frac",),
            groups_equal,
            "for more than 90 % of the prompts of 5 steps, all responses have the same score",
            "all responses to {0:.0%} of the prompts have equal scores, so comparing them teaches nothing",
            "Choose prompts of another difficulty, raise rollout.n, or set algorithm.filter_groups.enable=true",
            "docs/data.md#dynamic-sampling",
            shows_responses=True,
        ),
        "truncation": Rule(
            ("rollout/truncated_frac", "episode/length_frac"),
            outside("episode/length_frac", "rollout/truncated_frac", high=0.3),
            "more than 30 % of the responses of 3 steps reach rollout.max_response_length; episodes that run out of "
            "turns do not count",
            "{0:.0%} of the responses are cut off before they end",
            "Raise rollout.max_response_length; if the responses never end, start from a model that writes the "
            "tokenizer's end token, or name one in rollout.stop",
            "docs/data.md#special-tokens",
            shows_responses=True,
        ),
        "repetition": Rule(
            ("rollout/repetition_frac",),
            outside("rollout/repetition_frac", high=0.2),
            "more than 20 % of the responses of 3 steps end in a loop",
            "{0:.0%} of the responses repeat themselves",
            "Lower actor.optim.lr, or raise algorithm.kl_ctrl.kl_coef; check that the reward does not pay for length",
            "docs/rewards.md#built-in-functions",
            shows_responses=True,
        ),
        "entropy_collapse": Rule(
            ("actor/entropy", SPREAD),
            entropy_collapsed,
            "entropy below 3 % of its first value while the task is unsolved",
            "the policy's entropy has collapsed to {0:.3g}, from {1:.3g}, while the scores still differ",
            "Lower actor.optim.lr, set actor.entropy_coeff=0.001, or raise actor.clip_ratio_high",
            "docs/methods.md#policy-losses",
            shows_responses=True,
        ),
        "entropy_explosion": Rule(
            ("actor/entropy",),
            grown("actor/entropy", least=1.0),
            "entropy above 1 and above 3 times its first value",
            "the policy's entropy has risen to {0:.3g}, from {1:.3g}: its responses become noise",
            "Lower actor.entropy_coeff or actor.optim.lr",
            "docs/methods.md#policy-losses",
            shows_responses=True,
        ),
        "reference_kl": Rule(
            ("reward/kl_penalty/mean", "actor/kl_loss"),
            outside("reward/kl_penalty/mean", "actor/kl_loss", high=1.0),
            "KL to the reference above 1 per token",
            "the policy is {0:.3g} nats per token away from the reference",
            "Raise algorithm.kl_ctrl.kl_coef (or actor.kl_loss_coef), or lower actor.optim.lr",
            "docs/methods.md#kl-to-the-reference",
        ),
        "update_kl": Rule(
            ("actor/ppo_kl",),
            outside("actor/ppo_kl", high=0.1),
            "a step moves the policy by a KL above 0.1 per token",
            "a step moves the policy by a KL of {0:.3g} per token",
            f"{LOWER_LR}, or set actor.target_kl=0.02",
            "docs/methods.md#policy-losses",
        ),
        "clip_fraction": Rule(
            ("actor/pg_clipfrac",),
            outside("actor/pg_clipfrac", high=0.3),
            "the ratios of more than 30 % of the tokens are clipped (gspo clips more by design, and is not checked)",
            "the ratios of {0:.0%} of the tokens are clipped",
            LOWER_LR,
            "docs/methods.md#policy-losses",
            applies=lambda config: _policy_loss(config) not in ("gspo", "dis"),
        ),
        "left_out_tokens": Rule(
            ("actor/pg_clipfrac",),
            outside("actor/pg_clipfrac", high=0.05),
            "dis leaves out more than 5 % of the tokens",
            "dis leaves out {0:.0%} of the tokens: the policy has moved too far from the weights that wrote them",
            "Make one update per batch (actor.ppo_mini_batch_size = data.train_batch_size x rollout.n, "
            "actor.ppo_epochs=1), or lower actor.optim.lr or rollout.max_staleness",
            "docs/methods.md#old-log-probs-decoupled-ppo-and-sao",
            applies=lambda config: _policy_loss(config) == "dis",
        ),
        "ratio": Rule(
            ("actor/ratio",),
            outside("actor/ratio", low=0.9, high=1.1),
            "the mean ratio of new to old probabilities is more than 0.1 away from 1",
            "the mean ratio of new to old probabilities is {0:.3g}, far from 1",
            LOWER_LR,
            "docs/methods.md#policy-losses",
        ),
        "explained_variance": Rule(
            ("critic/vf_explained_var", SPREAD),
            values_useless,
            "over 5 steps the critic explains less than -0.2 of the variance of the returns, or 0.4 less than its "
            "best, and does not rise, or less than -0.05 in each of 20 steps, while the task is unsolved",
            "the critic explains {0:.2f} of the variance of the returns; its best was {1:.2f}",
            "Lower critic.optim.lr if critic/grad_norm is large, else raise it; set critic.warmup_steps",
            "docs/methods.md#values",
        ),
        "gradient_norm": Rule(
            (*GRADIENT_NORMS, SPREAD),
            gradient_jumped,
            "a gradient norm is above 10 times the median of the 10 (at first 5) steps before, in 2 steps one after "
            "the other, while the task is unsolved",
            "a gradient norm has jumped to {0:.3g}, {1:.0f} times its median",
            "Lower optim.lr, add optim.lr_warmup_steps, or lower optim.clip_grad of the actor or critic",
            "docs/troubleshooting.md#training",
        ),
        "value_loss": Rule(
            ("critic/vf_loss", SPREAD),
            value_loss_large,
            "the value loss of 5 steps is above 10 times the variance of the scores, and does not fall (the "
            "cross-entropy of hl_gauss and two_hot is not checked)",
            "the value loss is {0:.0f} times the variance of the scores, which the critic should explain",
            "Lower critic.optim.lr, set reward.normalize=running, or set critic.warmup_steps",
            "docs/methods.md#values",
            applies=lambda config: config.get("critic", {}).get("value_loss") not in ("hl_gauss", "two_hot"),
        ),
        "value_support": Rule(
            ("critic/vf_outside",),
            outside("critic/vf_outside", high=0.05),
            "more than 5 % of the returns are outside of critic.value_range, whose classes cannot express them",
            "{0:.0%} of the returns are outside of critic.value_range, and count as its nearest end",
            "Set critic.value_range to reach from returns/min to returns/max",
            "docs/critic.md#distributions-of-values",
        ),
        "accuracy": Rule(
            ("reward_model/accuracy", "reward_model/bt_loss"),
            pairs_unlearned,
            "a reward model orders less than 55 % of the pairs of 20 steps as they are labelled (chance: 50 %), and "
            "its loss has not fallen below its first value",
            "the reward model orders {0:.1%} of the pairs of 20 steps right, hardly more than chance, with a loss of "
            "{1:.3g}",
            "Lower optim.lr of the reward model; check which response of a pair is the chosen one",
            "docs/reward_models.md#metrics",
        ),
        "value_range": Rule(
            ("values/max", "values/min", *SHAPED_RANGE),
            beyond_scores("values/min", "values/max", margin=1.0),
            "in each of 5 steps some values are further outside the range of the shaped scores than that is wide",
            "values reach from {0:.3g} to {1:.3g}, but the scores from {2:.3g} to {3:.3g} only",
            "Lower critic.optim.lr; if critic.model_path is a reward model, check that it gives such scores",
            "docs/critic.md#what-to-watch",
        ),
        "return_drift": Rule(
            ("returns/mean", *SHAPED_RANGE),
            beyond_scores("returns/mean", "returns/mean", margin=0.1),
            "in each of 5 steps the mean of the returns is outside the range of the shaped scores (algorithm.gamma 1)",
            "the returns are {0:.3g} on average, but the scores from {2:.3g} to {3:.3g} only",
            "Raise algorithm.lam or algorithm.critic_lam towards 1, so that targets are scores rather than values; "
            "lower algorithm.kl_ctrl.kl_coef if the KL penalty outweighs the scores",
            "docs/critic.md#what-to-watch",
            applies=lambda config: config.get("algorithm", {}).get("gamma", 1.0) == 1.0,
        ),
        "log_prob_diff": Rule(
            ("rollout/log_prob_diff/mean",),
            grown("rollout/log_prob_diff/mean", least=0.01),
            "trainer and engine disagree about the log-probs of the rollouts by more than 0.01, and more than 3 times "
            "as much as in the first steps",
            "trainer and engine disagree by {0:.3g} per token, {1:.3g} in the first steps",
            "Check rollout.server_args and rollout.sync; set algorithm.rollout_correction.level=token",
            "docs/methods.md#when-engine-and-trainer-disagree",
        ),
        "reward_failures": Rule(
            ("reward/failed_frac",),
            outside("reward/failed_frac", high=0.05, num_steps=2),
            "a reward function fails, or takes too long, for more than 5 % of the responses of 2 steps",
            "the reward function fails for {0:.0%} of the responses, whose score is 0",
            "Fix the errors that the log names, or set reward.on_error=raise",
            "docs/rewards.md#how-functions-run",
            shows_responses=True,
        ),
        "lost_episodes": Rule(
            ("episode/lost_frac",),
            outside("episode/lost_frac", high=0.1),
            "more than 10 % of the episodes of 3 steps lose their environment or agent",
            "{0:.0%} of the episodes lose their environment or agent, and count as truncated",
            "Mend what the warnings name; raise rollout.environment_timeout_seconds, or rollout.agent_timeout_seconds, "
            "if it is slow",
            "docs/environments.md#failures",
        ),
        "new_segments": Rule(
            ("agent/new_segment_frac",),
            outside("agent/new_segment_frac", high=0.8),
            "more than 80 % of the turns of the agents' episodes of 3 steps, without their first ones, begin a new "
            "segment",
            "{0:.0%} of the agents' turns begin a new segment, which repeats the prompt before them: the cost of "
            "training grows with the square of the turns",
            "Find in the responses what rewrites the history (another system prompt or list of tools, dropped "
            "thoughts, calls written as text); let the agent send messages back as it got them",
            "docs/agents.md#histories-that-change",
            shows_responses=True,
        ),
        "staleness": Rule(
            ("rollout_is/ess",),
            few_effective_samples,
            "the effective sample size of the weights pi_trainer / pi_engine is below 80 % of the tokens (with "
            "algorithm.rollout_correction; with level=sequence below 30 %)",
            "the rollouts come from a policy other than the actor: their effective sample size is {0:.0%}",
            "Lower rollout.max_staleness, record the rollouts again, or set algorithm.rollout_correction.level=token",
            "docs/methods.md#when-engine-and-trainer-disagree",
        ),
        "expert_load": Rule(
            ("actor/expert_rank_load_max", "critic/expert_rank_load_max"),
            beyond_limits,
            "on GPUs, the experts of a rank get more tokens in 3 steps than its memory allows by the plan",
            "the experts of a rank get {0:.2f} times their even share of the tokens, and have memory for {1:.2f} times",
            "Balance the load by router.seq_aux_loss_coef, or lower max_tokens_per_micro_batch",
            "docs/placement.md#load-balancing",
        ),
    },
)
"""<rule> of the metric health/<rule>, which trainer.stop_on names -> the rule."""


class Health(Monitor):
    """Checks the rules after each step.

    Args:
        config: see `History`.
        steps: metrics of the earlier steps of a run that is resumed.
    Attributes:
        stop_reason: the first rule of trainer.stop_on that began to hold since this process started; "" before.
    """

    def __init__(self, config: Mapping[str, Any], steps: Steps = ()):
        self.stop_reason = ""
        self._stop_on = config.get("trainer", {}).get("stop_on", ())
        self._rules = {name: rule for name, rule in RULES.items() if rule.applies(config)}
        self.reads = {PREFIX + name: rule.metrics for name, rule in self._rules.items()}
        self._history = History({name for rule in self._rules.values() for name in rule.metrics}, config)
        self._last_held: dict[str, int] = {}
        for metrics in steps[:-QUIET_STEPS]:
            self._history.add(metrics)
        for metrics in steps[-QUIET_STEPS:]:
            self.check(metrics["step"], metrics)
        self.stop_reason = ""

    def check(
        self, step: int, metrics: LoggedMetrics, examples: Examples = tuple
    ) -> tuple[dict[str, float], list[Finding]]:
        """Return `health/<rule>` of a step, and the rules that begin to hold or are over with it."""
        self._history.add(metrics)
        held, findings = {}, []
        for name, rule in self._rules.items():
            if not any(metric in metrics for metric in rule.metrics):
                continue
            figures = rule.figures(self._history)
            held[PREFIX + name] = float(bool(figures))
            last_held = self._last_held.get(name)
            if figures:
                self._last_held[name] = step
            if figures and last_held is None:
                samples = examples() if rule.shows_responses else ()
                findings.append(Finding(name, step, rule.message.format(*figures), rule.remedy, rule.page, samples))
                if name in self._stop_on and not self.stop_reason:
                    self.stop_reason = f"trainer.stop_on ({name} at step {step})"
            elif not figures and last_held is not None and step - last_held >= QUIET_STEPS:
                del self._last_held[name]
                findings.append(Finding(name, step, f"has not held since step {last_held}"))
        return held, findings


def health_of(run: RunInfo) -> Health:
    """Return the health of a run, after the steps that its earlier processes have logged."""
    return Health({**run.config, "limits": run.limits}, read_metrics(run.output_dir))
