"""Presets: what each sets, and that every attribute has a reader that follows it."""

import dataclasses
import math

import pytest
import torch

from megappo.config.schema import Actor, Algorithm
from megappo.ppo import conventions as module
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import AGGREGATIONS, policy_loss


def test_presets_are_those_the_config_names_and_verl_is_the_default():
    names = Algorithm.model_fields["preset"].annotation
    assert all(repr(name) in repr(names) for name in PRESETS) and len(PRESETS) == 4
    assert PRESETS["verl"] == DEFAULT == Conventions()
    assert {preset.loss_agg_mode for preset in PRESETS.values()} <= set(AGGREGATIONS)


def test_the_docstrings_table_says_what_the_presets_set():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in module.__doc__.splitlines() if line[:1] == "|"]
    columns = {row[0]: dict(zip(["verl", "slime", "openrlhf", "nemo_rl"], row[1:], strict=True)) for row in rows[2:]}
    for name, preset in PRESETS.items():
        for field in ("whiten_ddof", "whiten_eps", "value_loss_factor"):
            assert float(columns[field][name]) == getattr(preset, field)
        for field in ("log_ratio_clamp", "kl_input_clamp", "kl_output_clamp"):
            cell = columns[field][name]
            assert (None if cell == "none" else float(cell)) == getattr(preset, field)
        assert columns["loss_agg_mode"][name] == preset.loss_agg_mode
        assert ("max(var, eps)" in columns["whitening divides by"][name]) == preset.whiten_clamps_variance
        everything = columns["kl_clamped"][name] == "all"
        assert preset.kl_clamped == ({"k1", "abs", "k2", "k3", "k1+", "k3+"} if everything else {"k3", "k3+"})


def test_a_convention_cannot_be_changed_by_mistake():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.whiten_ddof = 0


@pytest.mark.parametrize(("preset", "ratio"), [("verl", 20.0), ("slime", 25.0), ("openrlhf", 20.0), ("nemo_rl", 25.0)])
def test_the_log_ratio_is_clamped_as_the_preset_says(preset: str, ratio: float):
    one = torch.ones(1, 1)
    config = Actor(clip_ratio_c=None)
    loss, _ = policy_loss(25 * one, 0 * one, -one, one, config, conventions=PRESETS[preset])
    assert float(loss) == pytest.approx(math.exp(ratio), rel=1e-6)
