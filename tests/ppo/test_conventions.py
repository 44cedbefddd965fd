"""Presets: what each sets, and that every attribute has a reader that follows it."""

import dataclasses
import math
from typing import get_args

import pytest
import torch
from policy_oracles import policy_loss

from megappo.config.schema import Actor, Algorithm
from megappo.config.values import Aggregation
from megappo.ppo import conventions as module
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions, Whitening
from megappo.ppo.reductions import AGGREGATIONS


def test_presets_are_those_the_config_names_and_verl_is_the_default():
    names = Algorithm.model_fields["preset"].annotation
    assert all(repr(name) in repr(names) for name in PRESETS) and len(PRESETS) == 5
    assert Conventions() == DEFAULT and PRESETS["verl"] == dataclasses.replace(DEFAULT, counts_empty_rows=True)
    assert {preset.loss_agg_mode for preset in PRESETS.values()} <= set(AGGREGATIONS) == set(get_args(Aggregation))


def test_the_docstrings_table_is_that_of_the_presets():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in module.__doc__.splitlines() if line[:1] == "|"]
    names = ["verl", "slime", "miles", "openrlhf", "nemo_rl"]
    columns = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows[2:]}
    biased = Whitening(ddof=0, clamps_variance=True)
    for name, preset in PRESETS.items():
        assert float(columns["whitening.ddof"][name]) == preset.whitening.ddof
        assert float(columns["whitening.eps"][name]) == preset.whitening.eps
        assert float(columns["value_loss_factor"][name]) == preset.value_loss_factor
        for field in ("log_ratio_clamp", "kl_input_clamp", "kl_output_clamp"):
            cell = columns[field][name]
            assert (None if cell == "none" else float(cell)) == getattr(preset, field)
        assert columns["loss_agg_mode"][name] == preset.loss_agg_mode
        assert ("max(var,eps)" in columns["it divides by"][name]) == preset.whitening.clamps_variance
        cell = columns["reinforce_whitening"][name]
        assert preset.reinforce_whitening == {"the same": preset.whitening, "as OpenRLHF's": biased}[cell]
        assert (columns["kl_true_gradient"][name] == "yes") == preset.kl_true_gradient
        assert columns["counts_empty_rows"][name].endswith("yes") == preset.counts_empty_rows
        cell = columns["token_kl_gamma"][name]
        assert (None if cell == "none" else float(cell)) == preset.token_kl_gamma
        everything = columns["kl_clamped"][name] == "all"
        assert preset.kl_clamped == ({"k1", "abs", "k2", "k3", "k1+", "k3+"} if everything else {"k3", "k3+"})


def test_a_convention_cannot_be_changed_by_mistake():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.value_loss_factor = 1.0


@pytest.mark.parametrize(
    ("preset", "ratio"), [("verl", 20.0), ("slime", 25.0), ("miles", 20.0), ("openrlhf", 20.0), ("nemo_rl", 25.0)]
)
def test_the_log_ratio_is_clamped_as_the_preset_sets(preset: str, ratio: float):
    one = torch.ones(1, 1)
    config = Actor(clip_ratio_c=None)
    loss, _ = policy_loss(25 * one, 0 * one, -one, one, config, conventions=PRESETS[preset])
    assert float(loss) == pytest.approx(math.exp(ratio), rel=1e-6)


def test_miles_is_slime_with_its_log_ratios_clamped():
    clamped = dataclasses.replace(PRESETS["slime"], log_ratio_clamp=20.0, kl_input_clamp=20.0)
    assert PRESETS["miles"] == clamped


def test_nemo_rl_whitens_reinforce_plus_plus_apart():
    for name, preset in PRESETS.items():
        for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
            biased = name == "openrlhf" or (name == "nemo_rl" and estimator != "gae")
            assert preset.whitening_of(estimator) == Whitening(ddof=0 if biased else 1, clamps_variance=biased)
