"""A method and a metric of one's own, each added by one registration in a file of trainer.extensions."""

from pathlib import Path

import pytest
from program import Program, logged

OWN = """
import torch
from megappo.config.methods import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from megappo.batch.metrics import ROW_METRICS, RowMetric, of_rows


def halved_mean_baseline(token_level_rewards, response_mask, groups, truncated):
    scores = (token_level_rewards * response_mask).sum(dim=1)
    means = torch.stack([scores[groups == group].mean() for group in groups])
    advantages = 0.5 * (scores - means)[:, None] * response_mask
    return advantages, advantages


def squashed(tokens, config):
    loss = -tokens.advantages * torch.tanh(tokens.ratios()) - config.clip_ratio
    spread = (tokens.ratios()[tokens.mask], "min")
    result, metrics = tokens.result(tokens.weighted(loss), config, ratios=tokens.ratios())
    return result, metrics | {"own_ratio_min": spread}


ESTIMATORS.register("own", Estimator(halved_mean_baseline, compares_responses=True))
POLICY_LOSSES.register("own", PolicyLoss(squashed, ("clip_ratio",)))
ROW_METRICS.register("reward/own_score", RowMetric(of_rows("scores"), ("sum",)))
"""
KEYS = ("algorithm.adv_estimator=own", "actor.policy_loss=own", "algorithm.use_kl_in_reward=false")

pytestmark = pytest.mark.timeout(300)


def test_own_methods_and_metrics_take_part_in_a_run(config: Path, folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    run = folder / "run"
    short = ("trainer.total_steps=2", "trainer.save_interval=0", "trainer.export_hf=false", "data.val_files=[]")
    extension = f"trainer.extensions={folder / 'own.py'}"
    arguments = (f"trainer.output_dir={run}", extension, *short, "trainer.eval_interval=null", *KEYS)
    with Program(folder, config, *arguments, "actor.clip_ratio=0.3") as program:
        assert program.wait() == 0, program.output
    for metrics in logged(run):
        assert "values/mean" not in metrics, "without values there is no critic"
        assert metrics["reward/own_score/sum"] == pytest.approx(metrics["reward/score/mean"] * 32 * 4)
        assert 0 < metrics["actor/own_ratio_min"] <= metrics["actor/ratio"] <= metrics["actor/ratio_max"]
        assert metrics["actor/pg_loss"] < -0.25, "tanh(1) x 0, minus the clip ratio"
        assert abs(metrics["advantages/mean"]) < 0.1 < metrics["advantages/max"] - metrics["advantages/min"]
    with Program(folder / "2", config, *arguments, "actor.clip_ratio_c=2") as program:
        assert program.wait() == 2
        assert "actor.clip_ratio_c 2.0 has no effect, as actor.policy_loss own does not read it" in program.output
