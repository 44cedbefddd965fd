"""A short run of the whole program for each method: it learns, and uses that method."""

from pathlib import Path

import pytest
from program import Program, logged

METHODS = {
    "grpo": ("algorithm.adv_estimator=grpo", "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=false"),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "reinforce_plus_plus": ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.rollout_correction.level=token"),
    "remax": ("algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=false"),
    "gdpo": ("algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=false"),
    "gspo": (
        *("algorithm.adv_estimator=grpo", "actor.policy_loss=gspo", "actor.loss_agg_mode=seq-mean-token-mean"),
        *("actor.clip_ratio_low=3e-2", "actor.clip_ratio_high=4e-2", "algorithm.use_kl_in_reward=false"),
    ),
    "clip_cov": (
        *("algorithm.adv_estimator=grpo", "actor.policy_loss=clip_cov", "actor.clip_cov_ratio=0.01"),
        *("algorithm.use_kl_in_reward=false", "actor.ppo_epochs=4", "actor.target_kl=0.02"),
    ),
    "dual clip": ("actor.clip_ratio_c=1.2", "actor.ppo_epochs=3", "critic.warmup_steps=1"),
    "adaptive KL": (
        *("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=1000", "algorithm.kl_penalty=full"),
        "algorithm.bootstrap_truncated=true",
    ),
    "shared out rows": (
        *("actor.parallel={tensor: 1, context: 2}", "critic.parallel={pipeline: 1, context: 2}"),
        *("algorithm.bootstrap_truncated=true", "actor.use_kl_loss=true", "actor.kl_loss_type=full"),
    ),
    "sao": (
        *("algorithm.old_log_probs=engine", "actor.policy_loss=dis", "algorithm.use_kl_in_reward=false"),
        *("actor.clip_ratio_low=0.3", "actor.clip_ratio_high=5", "algorithm.critic_lam=1", "algorithm.lam_alpha=0.5"),
        *("critic.freeze=[attention]", "critic.ppo_epochs=2", "critic.warmup_steps=1"),
        "actor.positive_nll_coef=0.1",
    ),
    "ensemble": (
        *("critic.ensemble=2", "algorithm.bootstrap_truncated=true"),
        *("critic.offload=[weights,gradients,optimizer]", "actor.entropy_coeff=1e-4"),
        *("algorithm.mask_agreed=0.2", "algorithm.mask_disputed=0.2"),
    ),
    "shared backbone": ("algorithm.shared_backbone=true", "reward.normalize=running", "algorithm.preset=openrlhf"),
    "shared backbone, shared out rows": (
        *("algorithm.shared_backbone=true", "reward.normalize=running", "algorithm.preset=openrlhf"),
        *("actor.parallel={tensor: 1, context: 2}", "algorithm.bootstrap_truncated=true"),
        *("actor.use_kl_loss=true", "actor.kl_loss_type=full"),
    ),
}
REWARDS = {"gdpo": "sevens_and_pluses"}
OF_CRITIC = ("critic/vf_loss", "critic/vf_explained_var", "values/mean", "returns/mean")

pytestmark = pytest.mark.timeout(300)


def check_grpo(steps: list[dict]) -> None:
    assert all(metrics["actor/kl_loss"] >= 0 for metrics in steps) and steps[-1]["actor/kl_loss"] > 0
    assert all("reward/kl_penalty/mean" not in metrics for metrics in steps)


def check_reinforce_plus_plus(steps: list[dict]) -> None:
    assert all(abs(metrics["advantages/mean"]) < 1e-5 for metrics in steps), "whitened"
    assert all(metrics["rollout_is/mean"] == pytest.approx(1, abs=1e-3) for metrics in steps)


def check_gdpo(steps: list[dict]) -> None:
    for metrics in steps:
        parts = [metrics[f"reward/score_component/{i}/mean"] for i in (0, 1)]
        assert sum(parts) == pytest.approx(metrics["reward/score/mean"], abs=1e-6)
        assert abs(metrics["advantages/mean"]) < 1e-5, "whitened"
    assert metrics["reward/score_component/0/mean"] > 0.5, "sevens"
    assert "reward/score_component/2/mean" not in metrics


def check_gspo(steps: list[dict]) -> None:
    assert any(metrics["actor/pg_clipfrac"] > 0 for metrics in steps)


def check_clip_cov(steps: list[dict]) -> None:
    counts = [metrics["actor/num_optimizer_steps"] for metrics in steps]
    assert min(counts) < 8 == 4 * 32 // 16, "target_kl has skipped some of the 8"


def check_dual_clip(steps: list[dict]) -> None:
    assert "actor/pg_loss" not in steps[0], "the critic warms up"
    assert any(metrics["actor/pg_clipfrac_lower"] > 0 for metrics in steps[1:])


def check_adaptive_kl(steps: list[dict]) -> None:
    coefficients = [metrics["reward/kl_coef"] for metrics in steps]
    assert coefficients[0] == 0.001 and coefficients[1] < 0.001, "at first the policy is the reference"
    assert coefficients[-1] > min(coefficients), "then it has left it by more than target_kl"
    assert all(metrics["reward/kl_penalty/min"] > -1e-6 for metrics in steps), "an exact KL is never negative"


def check_sao(steps: list[dict]) -> None:
    assert all("timing_s/old_log_probs" not in metrics for metrics in steps), "no forward pass of the actor"
    assert not any(name.startswith(("rollout/log_prob_diff", "rollout_is/")) for name in steps[-1])
    assert "actor/pg_loss" not in steps[0], "the critic warms up"
    assert all(metrics["sync/log_prob_diff/mean"] < 1e-3 for metrics in steps), "the probe still proves the weights"
    assert all(metrics["actor/positive_nll_loss"] > 0 for metrics in steps[1:]), "shares of sevens are above 0"
    updates = [(metrics["critic/num_optimizer_steps"], metrics["actor/num_optimizer_steps"]) for metrics in steps[1:]]
    assert all(critic == 2 * actor for critic, actor in updates)


def check_ensemble(steps: list[dict]) -> None:
    for metrics in steps:
        assert metrics["critic/ensemble_std/mean"] > 0 and metrics["critic/vf_loss"] != metrics["critic_2/vf_loss"]
        assert metrics["critic/agreed_frac"] == pytest.approx(0.2, abs=0.05)
        assert metrics["timing_s/values_2"] > 0 and metrics["timing_s/update_critic_2"] > 0


def check_shared_backbone(steps: list[dict]) -> None:
    assert all("timing_s/values" not in metrics and "critic/lr" not in metrics for metrics in steps)
    assert all(metrics["critic/vf_loss"] > 0 for metrics in steps)
    assert abs(steps[0]["reward/shaped/mean"]) < 1e-5 < steps[-1]["reward/shaped/mean"]


CHECKS = {
    "grpo": check_grpo,
    "reinforce_plus_plus": check_reinforce_plus_plus,
    "gdpo": check_gdpo,
    "gspo": check_gspo,
    "clip_cov": check_clip_cov,
    "dual clip": check_dual_clip,
    "adaptive KL": check_adaptive_kl,
    "sao": check_sao,
    "ensemble": check_ensemble,
    "shared backbone": check_shared_backbone,
    "shared backbone, shared out rows": check_shared_backbone,
}
CRITIC_FREE = ("grpo", "rloo", "reinforce_plus_plus", "remax", "gdpo", "gspo", "clip_cov")


# The fixture `run` has a critic, test_extensions.py a run without, whose responses are compared; tests/ppo has what
# each method computes, tests/trainer what each layout does.
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_method_learns(method: str, config: Path, folder: Path) -> None:
    run = folder / "run"
    short = ("trainer.total_steps=10", "trainer.save_interval=0", "trainer.export_hf=false")
    no_evaluation = ("data.val_files=[]", "trainer.eval_interval=null")
    reward = f"reward.function={config.parent / 'reward.py'}:{REWARDS.get(method, 'share_of_sevens')}"
    keys = (reward, *METHODS[method])
    with Program(folder, config, f"trainer.output_dir={run}", *short, *no_evaluation, *keys) as program:
        assert program.wait() == 0, program.output
        assert "evaluation: none (data.val_files, " in program.output
    steps = logged(run)
    assert [metrics["step"] for metrics in steps] == list(range(1, 11))
    assert [name for metrics in steps for name, value in metrics.items() if value is None] == [], "no NaN"
    compares = method != "sao"  # whose actor makes no forward pass to compare
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps if compares)
    rewards = [metrics["reward/score/mean"] for metrics in steps]
    assert rewards[0] < 0.2 and min(rewards[-2:]) > 0.4, rewards
    assert all((name in metrics) != (method in CRITIC_FREE) for metrics in steps[1:] for name in OF_CRITIC)
    CHECKS.get(method, lambda steps: None)(steps)
