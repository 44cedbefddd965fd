"""Messages when engine and trainer disagree."""

import pytest

from megappo.config.rollout_section import Sync
from megappo.config.schema import Config
from megappo.engines.client import EngineError
from megappo.sync.proof import FAR, check_log_probs

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
        ("bf16", 1e-3, 0.3, f"more than rounding in bf16 explains, {FAULT}"),
        ("bf16", 0.01, 0.06, "more than rounding in bf16 explains in a dense model; in a mixture of experts it may"),
        ("bf16", 0.05, 0.26, f"more than rounding in bf16 explains, {FAULT}"),
        ("fp32", 1e-8, 1e-6, "rounding in fp32 may cause up to about 0.001 with the same weights: raise it to 0.001"),
        ("fp32", 1e-3, 6e-3, f"more than rounding in fp32 explains, {FAULT}"),
        ("fp32", 1e-3, float("nan"), FAULT),
    ],
)
def test_a_difference_that_rounding_explains_accuses_nobody(dtype, tolerance, difference, cause):
    with pytest.raises(EngineError) as caught:
        check_log_probs("a probe", difference, config(dtype, tolerance), pytest.fail)
    assert cause in str(caught.value)
    assert (FAULT in cause) == (FAULT in str(caught.value))


def test_a_run_is_warned_before_it_is_stopped():
    warnings: list[str] = []
    assert check_log_probs("a probe", 0.05, config("bf16", 0.05), warnings.append) == 0 and not warnings
    assert check_log_probs("a probe", 0.2, config("bf16", 0.05), warnings.append) == 1
    [warning] = warnings
    assert warning.startswith("WARNING: trainer and SGLang engine disagree about the log-probs of a probe by 0.2")
    assert warning.endswith("the run stops beyond 5 times the tolerance")
    with pytest.raises(EngineError):
        check_log_probs("a probe", 0.26, config("bf16", 0.05), warnings.append)


def test_the_key_describes_when_a_run_stops():
    assert f"the run stops at {FAR:g} times this" in Sync.model_fields["probe_tolerance"].description
