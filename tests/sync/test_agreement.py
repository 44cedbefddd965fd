"""What is said when engine and trainer disagree."""

import pytest

from megappo.config.schema import Config
from megappo.rollout.client import EngineError
from megappo.sync.proof import check_log_probs

FAULT = "so the engine does not run the actor's weights"


def config(dtype: str, tolerance: float) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "model", "dtype": dtype},
            "data": {"train_files": ["train.jsonl"]},
            "trainer": {"output_dir": "out"},
            "rollout": {"sync": {"probe_tolerance": tolerance}},
        }
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance", "difference", "cause"),
    [
        (
            "bf16",
            1e-3,
            0.02,
            "rounding in bf16 may cause up to about 0.05 with the same weights: raise it to 0.05, or set",
        ),
        ("bf16", 1e-3, 0.2, f"more than rounding in bf16 explains, {FAULT}"),
        ("bf16", 0.05, 0.06, f"more than rounding in bf16 explains, {FAULT}"),
        ("fp32", 1e-8, 1e-6, "rounding in fp32 may cause up to about 0.001 with the same weights: raise it to 0.001"),
        ("fp32", 1e-3, 2e-3, f"more than rounding in fp32 explains, {FAULT}"),
        ("fp32", 1e-3, float("nan"), FAULT),
    ],
)
def test_a_difference_that_rounding_explains_accuses_nobody(dtype, tolerance, difference, cause):
    check_log_probs("a probe", tolerance, config(dtype, tolerance))
    with pytest.raises(EngineError) as caught:
        check_log_probs("a probe", difference, config(dtype, tolerance))
    assert cause in str(caught.value)
    assert (FAULT in cause) == (FAULT in str(caught.value))
