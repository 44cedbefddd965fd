"""Conditions of the health rules on series of metrics, and what a run reports of them."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from megappo.config.values import HealthRule
from megappo.lab.report.health import QUIET_STEPS, RULES, Health
from megappo.observe.findings import held_steps

HEALTHY = json.loads(Path(__file__).with_name("healthy_runs.json").read_text())
"""Run -> metric -> values of its steps: the quickstart, calculator and grid as they are shipped, and, of which the
thresholds know nothing, the quickstart by GRPO with seed 7."""
VARIED = {"reward/score/max": 1.0, "reward/score/min": 0.0, "reward/score/std": 0.5, "reward/score/mean": 0.5}


def check(series: Mapping[str, Sequence[float | None]], config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return rule -> first step in which it holds, of steps from 1 with these metrics."""
    health, first = Health(config or {}), {}
    for step, values in enumerate(zip(*series.values(), strict=True), 1):
        _, findings = health.check(step, dict(zip(series, values, strict=True)))
        for finding in findings:
            first.setdefault(finding.rule, step)
    return first


def steady(num_steps: int, **changes: Sequence[float]) -> dict[str, list[float]]:
    """Return scores that differ in each step, beside other metrics."""
    return {name: [value] * num_steps for name, value in VARIED.items()} | changes


def test_the_config_names_the_rules():
    assert get_args(HealthRule) == tuple(RULES)


@pytest.mark.parametrize("run", HEALTHY)
def test_no_rule_holds_in_a_healthy_run(run):
    series = HEALTHY[run]
    by_method = "reward/equal_groups_frac" if run == "grpo" else "critic/vf_explained_var"
    assert {"actor/entropy", by_method, "rollout/truncated_frac", "reward/score/std"} <= {*series}
    assert check(series) == {}


NAN = math.nan
SHAPED = {"reward/shaped/min": [0.0] * 6, "reward/shaped/max": [1.0] * 6}
CASES = [
    ("truncation", {"rollout/truncated_frac": [0.99] * 3}, 3),
    ("truncation", {"rollout/truncated_frac": [0.2, 0.3, 0.4]}, None),
    ("truncation", {"rollout/truncated_frac": [0.9, 0.9, None, 0.9, 0.9, NAN, 0.9, 0.9]}, None),
    ("truncation", {"rollout/truncated_frac": [0.9] * 3, "episode/length_frac": [0.5] * 3}, 3),
    ("truncation", {"rollout/truncated_frac": [0.9] * 9, "episode/length_frac": [0.0] * 9}, None),
    ("repetition", {"rollout/repetition_frac": [0.0, 0.3, 0.4]}, 3),
    ("repetition", {"rollout/repetition_frac": [0.1] * 9}, None),
    ("equal_groups", {"reward/equal_groups_frac": [0.95] * 6}, 5),
    ("equal_groups", {"reward/equal_groups_frac": [0.95, 0.95, 0.95, 0.95, 0.6]}, None),
    ("entropy_collapse", {"actor/entropy": [1.0, 0.9, 0.8, 0.2, 0.02, 0.01, 0.02]}, 7),
    ("entropy_collapse", {"actor/entropy": [1.0, 0.9, 0.8, 0.2, 0.1, 0.05, 0.05]}, None),
    ("entropy_explosion", {"actor/entropy": [0.3, 0.3, 0.3, 0.5, 1.2, 1.4, 1.5]}, 6),
    ("entropy_explosion", {"actor/entropy": [0.01, 0.01, 0.01, 0.5, 0.6, 0.7]}, None),
    ("entropy_explosion", {"actor/entropy": [2.8] * 9}, None),
    ("reference_kl", {"reward/kl_penalty/mean": [0.0, 0.9, 1.5, 2.0]}, 4),
    ("reference_kl", {"actor/kl_loss": [3.0, 3.0, 3.0]}, 3),
    ("reference_kl", {"reward/kl_penalty/mean": [0.0, 0.3, 0.5, 0.9]}, None),
    ("update_kl", {"actor/ppo_kl": [0.2, 0.1, 0.3]}, 3),
    ("update_kl", {"actor/ppo_kl": [0.05] * 9}, None),
    ("clip_fraction", {"actor/pg_clipfrac": [0.5] * 3}, 3),
    ("clip_fraction", {"actor/pg_clipfrac": [0.2] * 9}, None),
    ("lost_episodes", {"episode/lost_frac": [0.0, 0.5, 0.5]}, 3),
    ("lost_episodes", {"episode/lost_frac": [0.05] * 9}, None),
    ("ratio", {"actor/ratio": [1.3] * 3}, 3),
    ("ratio", {"actor/ratio": [0.6] * 3}, 3),
    ("ratio", {"actor/ratio": [0.95] * 9}, None),
    ("explained_variance", {"critic/vf_explained_var": [-0.5] * 5}, 5),
    ("explained_variance", {"critic/vf_explained_var": [0.6, 0.7, 0.7, 0.2, 0.1, 0.1, 0.1, 0.1]}, 7),
    ("explained_variance", {"critic/vf_explained_var": [-0.1, 0.0, 0.3, 0.5, 0.4, 0.5, 0.3, 0.4]}, None),
    ("explained_variance", {"critic/vf_explained_var": [-4000.0, -300.0, -40.0, -8.0, -2.0, -1.0, -0.4, 0.1]}, None),
    ("explained_variance", {"critic/vf_explained_var": [-40.0, -8.0, -2.0, -1.0, -1.0, -1.0, -1.0, -1.0]}, 8),
    ("gradient_norm", {"actor/grad_norm": [1.0, 2.0, 1.0, 2.0, 1.0, 30.0, 20.0]}, 7),
    ("gradient_norm", {"critic/grad_norm": [1.0] * 12 + [11.0] * 2}, 14),
    ("gradient_norm", {"actor/grad_norm": [1.0, 2.0, 1.0, 2.0, 1.0, 9.0, 8.0]}, None),
    ("gradient_norm", {"actor/grad_norm": [2.0] * 15 + [66.0] + [2.0] * 9 + [40.0, 2.0]}, None),
    ("value_loss", {"critic/vf_loss": [5.0] * 5}, 5),
    ("value_loss", {"critic/vf_loss": [3.0, 1.0, 0.5, 0.2, 0.2, 0.2]}, None),
    ("value_loss", {"critic/vf_loss": [60.0, 30.0, 16.0, 9.0, 6.0, 4.0, 2.0]}, None),
    ("accuracy", {"reward_model/accuracy": [0.525] * 25, "reward_model/bt_loss": [0.7] * 5 + [0.9] * 20}, 20),
    ("accuracy", {"reward_model/accuracy": [0.525] * 25, "reward_model/bt_loss": [0.7] * 5 + [0.65] * 20}, None),
    ("accuracy", {"reward_model/accuracy": [0.6] * 25, "reward_model/bt_loss": [0.7] * 25}, None),
    ("value_support", {"critic/vf_outside": [0.0, 0.02, 0.1, 0.1]}, 4),
    ("value_support", {"critic/vf_outside": [0.01] * 9}, None),
    ("explained_variance", {"critic/vf_explained_var": [-0.15 + 0.001 * step for step in range(20)]}, 20),
    ("explained_variance", {"critic/vf_explained_var": [-0.1] * 10 + [0.01] + [-0.1] * 15}, None),
    ("value_range", {"values/min": [0.1] * 6, "values/max": [2.5] * 6, **SHAPED}, 5),
    ("value_range", {"values/min": [-0.9] * 6, "values/max": [1.9] * 6, **SHAPED}, None),
    ("value_range", {"values/min": [0.0] * 6, "values/max": [9.0] * 4 + [1.5, 9.0], **SHAPED}, None),
    ("return_drift", {"returns/mean": [1.2] * 6, **SHAPED}, 5),
    ("return_drift", {"returns/mean": [1.05] * 6, **SHAPED}, None),
    ("log_prob_diff", {"rollout/log_prob_diff/mean": [0.008, 0.008, 0.008, 0.05, 0.06, 0.07]}, 5),
    ("log_prob_diff", {"rollout/log_prob_diff/mean": [1e-7, 1e-7, 1e-7, 1e-5, 1e-5, 1e-5]}, None),
    ("log_prob_diff", {"rollout/log_prob_diff/mean": [0.02] * 9}, None),
    ("reward_failures", {"reward/failed_frac": [0.0, 0.1, 0.2]}, 3),
    ("reward_failures", {"reward/failed_frac": [0.0, 0.01, 0.0]}, None),
    ("new_segments", {"agent/new_segment_frac": [1.0, 0.9, 0.95]}, 3),
    ("new_segments", {"agent/new_segment_frac": [2 / 3] * 9}, None),  # a turn, two helpers and a turn
    ("staleness", {"rollout_is/ess": [0.9, 0.7, 0.7]}, 3),
    ("staleness", {"rollout_is/ess": [0.95] * 9}, None),
]


@pytest.mark.parametrize(("rule", "series", "step"), CASES)
def test_a_rule_holds_from_a_step_on(rule, series, step):
    num_steps = max(map(len, series.values()))
    assert check(steady(num_steps, **series)) == ({} if step is None else {rule: step})


def test_every_rule_has_a_case():
    with_tests_of_their_own = {"no_reward_signal", "expert_load", "left_out_tokens"}
    assert {rule for rule, _, step in CASES if step} == RULES.keys() - with_tests_of_their_own


@pytest.mark.parametrize(("limit", "held"), [(1.8, {"expert_load": 4}), (2.5, {})])
def test_experts_get_more_tokens_than_the_plan_has_memory_for(limit, held):
    """Without a limit, on a CPU and for models whose ranks have all experts, any load is healthy."""
    series = steady(
        5, **{"actor/expert_rank_load_max": [1.2, 1.5, 1.7, 2.3, 2.4], "critic/expert_rank_load_max": [9.0] * 5}
    )
    assert check(series, {"limits": {"actor/expert_rank_load_max": limit}}) == held and check(series) == {}


def test_equal_scores_are_one_finding():
    series = {f"reward/score/{kind}": [0.0] * 6 for kind in ("mean", "max", "min", "std")}
    assert check(series | {"reward/equal_groups_frac": [1.0] * 6}) == {"no_reward_signal": 5}
    assert check(series | {"reward/score/max": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]}) == {}


def test_a_solved_task_may_end_without_entropy_and_explained_variance():
    solved = steady(12, **{"reward/score/std": [0.5] * 3 + [0.1] * 9})
    entropy, explained = [1.0] * 3 + [0.001] * 9, [0.7] * 3 + [-5.0] * 9
    norms = [1.0] * 10 + [40.0] * 2
    assert (
        check(solved | {"actor/entropy": entropy, "critic/vf_explained_var": explained, "actor/grad_norm": norms}) == {}
    )


def test_gspo_may_clip_half_of_the_tokens():
    assert check({"actor/pg_clipfrac": [0.5] * 9}, {"actor": {"policy_loss": "gspo"}}) == {}


def test_dis_leaves_out_few_tokens_while_the_policy_is_near_the_one_that_wrote_them():
    config = {"actor": {"policy_loss": "dis"}}
    assert check({"actor/pg_clipfrac": [0.02] * 9}, config) == {}
    assert check({"actor/pg_clipfrac": [0.5] * 9}, config) == {"left_out_tokens": 3}


def test_discounted_returns_may_be_below_all_scores():
    series = steady(6, **{"returns/mean": [-0.5] * 6, **SHAPED})
    assert check(series) == {"return_drift": 5} and check(series, {"algorithm": {"gamma": 0.99}}) == {}


def test_weights_of_whole_responses_may_differ_more_than_those_of_tokens():
    config = {"algorithm": {"rollout_correction": {"level": "sequence"}}}
    assert check({"rollout_is/ess": [0.5] * 9}, config) == {}
    assert check({"rollout_is/ess": [0.2] * 9}, config) == {"staleness": 3}


def truncated(step: int) -> dict[str, float]:
    return {"step": step, "rollout/truncated_frac": 0.9 if step <= 5 else 0.0}


def test_a_rule_is_counted_in_each_step_and_reported_when_it_begins_and_is_over():
    health, findings, logged = Health({}), {}, []
    for step in range(1, 30):
        held, found = health.check(step, truncated(step))
        logged.append(truncated(step) | held)
        findings |= {finding.step: finding for finding in found}
    last = max(step["step"] for step in logged if step["health/truncation"])
    assert {step: finding.is_over for step, finding in findings.items()} == {3: False, last + QUIET_STEPS: True}
    assert held_steps(logged) == {"truncation": list(range(3, last + 1))}
    assert str(findings[3]).startswith(
        "unhealthy (truncation): 90% of the responses are cut off before they end. Raise "
    )
    assert str(findings[last + QUIET_STEPS]) == f"healthy again (truncation): has not held since step {last}"


def test_responses_are_fetched_once_and_shown_on_one_line_each():
    fetched = []

    def examples():
        fetched.append(1)
        return [{"prompt": "1+1=\n", "response": "7" * 500 + "\x1b", "score": 0.5}]

    health = Health({})
    findings = [found for step in range(1, 6) for found in health.check(step, truncated(step), examples)[1]]
    [finding] = findings
    _, line = str(finding).split("\n")
    assert fetched == [1] and line.startswith('  score 0.5: "1+1=\\n" -> "777') and len(line) < 200


@pytest.mark.parametrize("num_before", [4, 12, 25])
def test_a_resumed_run_reports_nothing_twice(num_before):
    whole, findings, logged = Health({}), [], []
    for step in range(1, 30):
        if step == num_before + 1:
            whole = Health({}, logged)
        held, found = whole.check(step, truncated(step))
        logged.append(json.loads(json.dumps(truncated(step) | held)))
        findings += [(finding.step, finding.is_over) for finding in found]
    assert findings == [(3, False), (16, True)]


def test_only_a_rule_of_stop_on_gives_a_reason_to_stop_when_it_begins_to_hold():
    reasons = {}
    for rule in ("truncation", "repetition"):
        health = Health({"trainer": {"stop_on": [rule]}})
        logged = []
        for step in range(1, 5):
            held, _ = health.check(step, truncated(step))
            logged.append(truncated(step) | held)
        reasons[rule] = health.stop_reason
    assert reasons["repetition"] == "" and reasons["truncation"] == "trainer.stop_on (truncation at step 3)"
    resumed = Health({"trainer": {"stop_on": ["truncation"]}}, logged)
    resumed.check(5, truncated(5))
    assert resumed.stop_reason == "", "it held before the run was resumed"
